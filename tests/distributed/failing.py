"""What ranks do in the tests of failures: see `ranks.on_ranks`. Each says what it met."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

import flashattn_jit as fa
from tests.distributed.ranks import die

OPTIONS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "q_dtype": torch.float32}
TOKENS = 516


def _made(mesh: DeviceMesh, variant=None, **options) -> fa.ContextParallel:
    return fa.ContextParallel(variant or fa.Causal(), mesh, **{**OPTIONS, **options})


def _own(mesh: DeviceMesh, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    rows = tokens // mesh.size()
    made = torch.Generator().manual_seed(mesh.get_local_rank())
    return tuple(torch.randn(rows, heads, 64, generator=made) for heads in (2, 1, 1))


def _error(call: Callable[[], object]) -> fa.FlashAttnJitError:
    try:
        call()
    except fa.FlashAttnJitError as error:
        return error
    raise AssertionError("nothing was raised")


def compiled(mesh: DeviceMesh) -> None:
    """Compiles what `killed` and `absent` need, whose groups have short timeouts."""
    for way in ("keys", "ring"):
        parallel = _made(mesh, way=way)
        parallel.plan(torch.tensor([0, TOKENS]))
        parallel.run(*_own(mesh))


def killed(mesh: DeviceMesh, when: str, way: str) -> str | None:
    """The last rank dies; the others raise, also at the next call."""
    parallel = _made(mesh, way=way)
    rank, tokens = mesh.get_local_rank(), torch.tensor([0, TOKENS])
    parallel.plan(tokens)
    parallel.run(*_own(mesh))
    if rank == mesh.size() - 1:
        if when == "late":  # in the middle of a run: after the agreement, before its rows are sent
            from flashattn_jit.distributed import ring, together

            module = ring if way == "ring" else together
            module.begin_moves = lambda *_: die()
            parallel.run(*_own(mesh))
        die()
    start = time.monotonic()
    error = _error(lambda: parallel.run(*_own(mesh)))
    assert type(error) is fa.DistributedError, error
    assert time.monotonic() - start < 30
    assert type(_error(lambda: parallel.plan(tokens))) is fa.DistributedError
    return str(error)


def absent(mesh: DeviceMesh) -> str:
    """The last rank comes too late: the others raise after the group's timeout."""
    parallel = _made(mesh, way="keys")
    parallel.plan(torch.tensor([0, TOKENS]))
    if mesh.get_local_rank() == mesh.size() - 1:
        time.sleep(8)
        return "late"
    start = time.monotonic()
    error = _error(lambda: parallel.run(*_own(mesh)))
    assert type(error) is fa.DistributedError and time.monotonic() - start < 8
    return str(error)


def differing(mesh: DeviceMesh) -> None:
    """Plans that differ are an error on every rank, and change nothing."""
    rank = mesh.get_local_rank()
    last = rank == mesh.size() - 1
    tokens = torch.tensor([0, TOKENS])
    parallel = _made(mesh)
    parallel.plan(tokens)
    before = parallel.run(*_own(mesh))

    def differs(call: Callable[[], object]) -> None:
        error = _error(call)
        assert type(error) is fa.DistributedError, error
        assert "must be equal on every rank" in str(error)
        assert f"rank {mesh.size() - 1} gave" in str(error)

    other = torch.tensor([0, 100, TOKENS]) if last else tokens
    differs(lambda: parallel.plan(other))
    differs(lambda: parallel.plan(tokens, q_offset=1 if last else 0))
    shards = [0, *[TOKENS - 1 if last else TOKENS] * mesh.size()]
    shards[-1] = TOKENS
    differs(lambda: parallel.plan(tokens, q_shards=shards))
    assert torch.equal(parallel.run(*_own(mesh)), before)
    differs(lambda: parallel.run(*_own(mesh), return_lse=last))
    differs(lambda: parallel.run(*_own(mesh), scale=0.5 if last else None))
    assert torch.equal(parallel.run(*_own(mesh)), before)
    variant = fa.SlidingWindow(100 if last else 101)
    differs(lambda: _made(mesh, variant).plan(tokens))
    differs(lambda: _made(mesh, fa.Full() if last else fa.Causal()).plan(tokens))
    differs(lambda: _made(mesh, num_q_heads=3 if last else 2).plan(tokens))
    documents = torch.zeros(1, TOKENS, dtype=torch.int32)
    documents[0, TOKENS - 1 if last else 0] = 1
    differs(lambda: _made(mesh, fa.DocumentMask()).plan(tokens, documents=documents))


def one_wrong(mesh: DeviceMesh) -> None:
    """What one rank does wrong is its own error, and DistributedError on the others."""
    last = mesh.get_local_rank() == mesh.size() - 1
    tokens = torch.tensor([0, TOKENS])
    parallel = _made(mesh)
    error = _error(lambda: parallel.run(*_own(mesh)))
    assert "run() before plan()" in str(error)
    parallel.plan(tokens)
    q, k, v = _own(mesh)
    before = parallel.run(q, k, v)

    def wrong(call: Callable[[], object], kind: type[Exception], words: str) -> None:
        error = _error(call)
        if last:
            assert type(error) is kind and words in str(error), repr(error)
        else:
            assert type(error) is fa.DistributedError, repr(error)
            assert f"failed on rank {mesh.size() - 1}" in str(error)

    def given(good: object, bad: object) -> object:
        return bad if last else good

    wrong(lambda: parallel.plan(given(tokens, torch.tensor([0, 5, 3]))), fa.InputError, "request")
    wrong(lambda: parallel.plan(given(tokens, "tokens")), fa.InputError, "q_indptr")
    wrong(lambda: parallel.plan(tokens, q_shards=given(None, [0, 1])), fa.InputError, "q_shards")
    descending = [0, 9, *[8] * (mesh.size() - 2), TOKENS - 1]
    wrong(lambda: parallel.plan(tokens, kv_shards=given(None, descending)), fa.InputError, "kv_sh")
    for bad in (3, torch.tensor([0, 1])):
        shards = given(None, bad)
        wrong(lambda x=shards: parallel.plan(tokens, q_shards=x), fa.InputError, "q_shards must be")
        wrong(lambda x=shards: parallel.plan(tokens, kv_shards=x), fa.InputError, "kv_shards must")
    wrong(lambda: parallel.plan(tokens, **given({}, {"window": 3})), fa.ParamError, "window")
    assert torch.equal(parallel.run(q, k, v), before)
    for name, bad in (
        ("shard of rank", q[1:]), ("float16", q.half()), ("meta", q.to("meta")),
        ("num_q_heads", q[:, :1]), ("q must be", 3), ("requires grad", q.clone().requires_grad_()),
    ):  # fmt: skip
        kind = fa.GradError if name == "requires grad" else fa.InputError
        wrong(lambda x=bad: parallel.run(given(q, x), k, v), kind, name)
    wrong(lambda: parallel.run(q, k, v, scale=given(None, "x")), fa.InputError, "scale")
    wrong(lambda: parallel.run(q, k, v, **given({}, {"cap": 1.0})), fa.ParamError, "cap")
    assert torch.equal(parallel.run(q, k, v), before)
    with torch.device("meta"):
        parallel.plan(tokens)
        assert torch.equal(parallel.run(q, k, v), before)
        parallel = _made(mesh, way="heads" if mesh.size() == 1 else "states")
        parallel.plan(tokens)
        torch.testing.assert_close(parallel.run(q, k, v), before)
    with torch.inference_mode():
        assert torch.equal(parallel.run(q, k, v), parallel.run(q, k, v))


def options(mesh: DeviceMesh) -> None:
    """Options of other calls are refused before rows move."""
    for way in ("keys", "ring", "states", "heads"):
        parallel = _made(mesh, way=way)
        parallel.plan(torch.tensor([0, TOKENS]))
        q, k, v = _own(mesh)
        before = parallel.run(q, k, v)
        parallel._ranks.begin = None  # type: ignore[assignment,method-assign]
        for given in ({"out": torch.empty_like(q)}, {"lse": q[..., 0]}, {"partial": True}):
            error = _error(partial(parallel.run, q, k, v, **given))
            assert type(error) is fa.ParamError, error
            assert f"{next(iter(given))} is an option of other calls" in str(error)
        del parallel._ranks.begin
        assert torch.equal(parallel.run(q, k, v), before)


def copied(mesh: DeviceMesh) -> None:
    """Objects of a process group are not copied."""
    import copy
    import pickle

    parallel = _made(mesh)
    plan = parallel.plan(torch.tensor([0, TOKENS]))
    for x in (parallel, plan):
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            assert "cannot be copied or pickled" in str(_error(lambda c=copies, x=x: c(x)))


def threads(mesh: DeviceMesh) -> None:
    """Planned in one thread, run in another."""
    import threading

    parallel, found = _made(mesh), []
    parallel.plan(torch.tensor([0, TOKENS]))
    q, k, v = _own(mesh)
    want = parallel.run(q, k, v)
    thread = threading.Thread(target=lambda: found.append(parallel.run(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def traced(mesh: DeviceMesh) -> None:
    """Tracers and fake tensors are refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    parallel = _made(mesh)
    parallel.plan(torch.tensor([0, TOKENS]))
    q, k, v = _own(mesh)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert "without values" in str(_error(lambda: parallel.run(*fakes)))
    assert parallel.run(q, k, v).shape == q.shape
    with torch.no_grad():
        compiled = torch.compile(parallel.run, backend="eager")
        assert torch.equal(compiled(q, k, v), parallel.run(q, k, v))


def meshes(mesh: DeviceMesh) -> None:
    """Meshes that cannot be used."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("cp", "tp"))
    assert "mesh['cp']" in str(_error(lambda: _made(grid)))
    assert "DeviceMesh" in str(_error(lambda: _made(None)))
    assert "DeviceMesh" in str(_error(lambda: _made(3)))
    assert 'way="keys"' in str(_error(lambda: _made(mesh, way="states", batch_invariant=True)))
    assert 'way="keys"' in str(_error(lambda: _made(mesh, way="ring", batch_invariant=True)))
    assert "way='square'" in str(_error(lambda: _made(mesh, way="square")))
    invariant = _made(mesh, way="heads", batch_invariant=True)
    plan = lambda: invariant.plan(torch.tensor([0, TOKENS]))  # noqa: E731
    assert mesh.size() == 1 or "num_kv_heads=1 is less than" in str(_error(plan))
    named = _made(grid["cp"])
    named.plan(torch.tensor([0, TOKENS]))
    assert named.run(*_own(mesh)).shape == (TOKENS // mesh.size(), 2, 64)
