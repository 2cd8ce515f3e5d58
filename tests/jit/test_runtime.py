"""_C: the arguments that reach a kernel, and work outside of its tensors, which is refused.

Work is hand-written here; test_runtime_batch.py has calls that the scheduler planned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_jit import _C
from flashattn_jit.codegen.spec import host_target, host_targets
from flashattn_jit.errors import AbiError

Item = tuple[int, int, int, int, int, int, int, int]


def packed(*items: Iterable[int]) -> bytes:
    """Work or merge items as the buffer that `BatchPlan.of_work` takes."""
    return b"".join(struct.pack("8i", *item) for item in items)


def core_of(
    module: _C.Module,
    q: torch.Tensor,
    work: Any,
    *,
    kv_len: int = 5,
    num_kv_heads: int | None = None,
    kind: int = 0,
    **written: Any,
) -> _C.BatchCall:
    """A call of work on q [B, H, S, D] and `kv_len` keys; written: more arguments of `of_work`."""
    batch, heads, q_len, dim = q.shape
    return _C.BatchCall(
        _C.BatchPlan.of_work(work, kind=kind, **written),
        _C.BatchLengths.dense(batch, q_len, kv_len),
        (None, module) if kind else (module, None),
        num_q_heads=heads,
        num_kv_heads=num_kv_heads or heads,
        head_dim=dim,
        head_dim_v=dim,
    )


def bound(core: _C.BatchCall, q: torch.Tensor, **options: Any) -> _C.BatchCall:
    """A call bound to q, out like q and lse [B, H, S]; options: arguments of `bind`."""
    _, heads, q_len, dim = q.shape
    rows = q.stride()[:3]
    out, lse = (heads * q_len * dim, q_len * dim, dim), (heads * q_len, q_len, 1)
    return core.bind(**{"strides": (rows, rows, rows, out, lse), **options})


def call_of(module: _C.Module, q: torch.Tensor, work: Any, **options: Any) -> _C.BatchCall:
    """`core_of`, then `bound`; options: those of `core_of`."""
    return bound(core_of(module, q, work, **options), q)


def all_rows(batch: int, heads: int, group: int, rows: int, kv_len: int) -> bytes:
    """One final item for each request and kv head."""
    return packed(
        *(
            (b, h, group, 0, rows * group, 0, kv_len, -1)
            for b in range(batch)
            for h in range(0, heads, group)
        )
    )


ONE_ROW = packed((0, 0, 1, 0, 1, 0, 0, -1))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
def test_dense_calls_reach_every_row_through_strides(
    minimal_module: _C.Module, group: int, threads: int, kind: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 7, 6, 8).transpose(1, 2)  # [B, H, S, D], rows strided
    out, lse = torch.empty(2, 6, 7, 8), torch.empty(2, 6, 7)
    work = all_rows(2, 6, group, 7, 5)
    core = core_of(minimal_module, q, work, num_kv_heads=6 // group, kind=kind)
    call = bound(core, q, flags=_C.WRITE_LSE)
    call.launch(
        q.data_ptr(), q.data_ptr(), q.data_ptr(), out.data_ptr(), lse.data_ptr(), 0.5, threads
    )
    torch.testing.assert_close(out, (0.5 * q[..., :1]).expand_as(out))
    assert (lse == 5).all()


def test_params_reach_the_kernel(minimal_module: _C.Module) -> None:
    q, out = torch.ones(1, 1, 1, 4), torch.empty(1, 1, 1, 4)
    tensors = [torch.tensor([[3.0, 9.0]]), torch.tensor(40.0)]
    call = bound(
        core_of(minimal_module, q, ONE_ROW),
        q,
        layouts=[(tuple(t.shape), t.stride()) for t in tensors],
        scalar_kinds="if",
    )
    addresses = tuple(t.data_ptr() for t in tensors)

    def launch(tensors: Any = addresses, scalars: Any = (500, 0.25)) -> None:
        call.launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, 1.0, 1, tensors, scalars)

    launch()
    assert (out == 544).all()
    launch(scalars=[-500, 1])  # an int is a fine float; a new value needs nothing new
    assert (out == -456).all()
    for wrong in ((), addresses[:1], (*addresses, 0)):
        with pytest.raises(ValueError, match="tensors must have 2 addresses"):
            launch(tensors=wrong)
    with pytest.raises(ValueError, match="param tensor 1 has address 0"):
        launch(tensors=(addresses[0], 0))
    with pytest.raises(ValueError, match="scalars must have 2 entries, got 1"):
        launch(scalars=(1,))
    with pytest.raises(TypeError, match=r"an int scalar .* got 0\.5"):
        launch(scalars=(0.5, 0.5))
    with pytest.raises(TypeError, match="fit 64 bits"):
        launch(scalars=(2**63, 0.5))
    with pytest.raises(TypeError):
        launch(scalars=(1, "x"))
    with pytest.raises(TypeError):
        launch(tensors=(1.5, 2.5))
    with pytest.raises(TypeError, match="tuple or list"):
        launch(tensors=iter(addresses))


def test_an_empty_param_tensor_may_have_no_address(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 1, 4)
    call = bound(core_of(minimal_module, q, b""), q, layouts=[((3, 0), (0, 1))])
    call.launch(0, 0, 0, 0, 0, 1.0, 1, (0,))


def test_many_params_do_as_well_as_few(minimal_module: _C.Module) -> None:
    q, out, one = torch.zeros(1, 1, 1, 4), torch.empty(1, 1, 1, 4), torch.ones(1)
    core = core_of(minimal_module, q, ONE_ROW)
    call = bound(core, q, layouts=[((1,), (1,))] * 40, scalar_kinds="i" * 40)
    call.launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, 1.0, 1, (one.data_ptr(),) * 40, (2,) * 40)
    assert (out == 42).all()


TWO_SPLITS = packed((0, 0, 2, 0, 6, 0, 4, 0), (0, 0, 2, 0, 6, 4, 10, 6))  # of 6 packed rows


@pytest.mark.parametrize("listed", [False, True], ids=["in order", "listed"])
def test_split_rows_are_merged_from_the_workspace(minimal_module: _C.Module, listed: bool) -> None:
    q, out = torch.full((1, 2, 3, 4), 2.0), torch.full((1, 2, 3, 4), -1.0)
    call = call_of(
        minimal_module, q, TWO_SPLITS, kv_len=10, num_kv_heads=1, partial_rows=12,
        merge_work=packed((0, 0, 2, 0, 6, 0, 2, 0)), merge_sources=(6, 0) if listed else (),
    )  # fmt: skip
    assert call.workspace_bytes == 12 * 4 * 4 + 12 * 4
    workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8)
    arguments = (q.data_ptr(), q.data_ptr(), q.data_ptr(), out.data_ptr(), 0, 1.0, 1)
    call.launch(*arguments, workspace=workspace.data_ptr())
    assert (out == 4).all()
    with pytest.raises(ValueError, match="workspace has address 0"):
        call.launch(*arguments)


def test_the_partial_lse_starts_aligned(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 3, 3)
    assert core_of(minimal_module, q, b"", partial_rows=3).workspace_bytes == 64 + 3 * 4
    assert core_of(minimal_module, q, b"").workspace_bytes == 0


@pytest.mark.parametrize("missing", ["q", "k", "v", "out", "lse"])
def test_a_null_tensor_is_refused(minimal_module: _C.Module, missing: str) -> None:
    q = torch.ones(1, 1, 2, 4)
    core = core_of(minimal_module, q, packed((0, 0, 1, 0, 2, 0, 5, -1)))
    call = bound(core, q, flags=_C.WRITE_LSE)
    addresses = dict.fromkeys(("q", "k", "v", "out", "lse"), q.data_ptr())
    with pytest.raises(ValueError, match=f"{missing} has address 0"):
        call.launch(**{**addresses, missing: 0}, scale=1.0, num_threads=1)


def test_work_that_touches_nothing_needs_no_tensors(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 2, 4)
    for nothing in (b"", packed((0, 0, 1, 1, 1, 0, 5, -1))):
        call_of(minimal_module, q, nothing).launch(0, 0, 0, 0, 0, 1.0, 1)


@pytest.mark.parametrize("kind", [0, 1], ids=["prefill", "few-row"])
@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((2, 0, 1, 0, 1, 0, 1, -1), "request 2 of num_requests=2"),
        ((-1, 0, 1, 0, 1, 0, 1, -1), "request -1"),
        ((0, 4, 1, 0, 1, 0, 1, -1), r"heads \[4, 5\) of num_q_heads=4"),
        ((0, -1, 1, 0, 1, 0, 1, -1), r"heads \[-1, 0\)"),
        ((0, 0, 0, 0, 1, 0, 1, -1), r"heads \[0, 0\)"),
        ((0, 1, 2, 0, 1, 0, 1, -1), "not of one kv head"),
        ((0, 0, 2**31 - 1, 0, 1, 0, 1, -1), "heads"),
        ((0, 0, 2, 0, 7, 0, 1, -1), r"rows \[0, 7\) of 6 packed rows"),
        ((0, 0, 1, 0, 4, 0, 1, -1), r"rows \[0, 4\) of 3 packed rows"),  # one of two heads
        ((0, 0, 2, 3, 2, 0, 1, -1), r"rows \[3, 2\)"),
        ((0, 0, 2, -1, 2, 0, 1, -1), r"rows \[-1, 2\)"),
        ((0, 0, 1, 0, 3, 0, 6, -1), r"keys \[0, 6\) of keys \[0, 5\)"),
        ((0, 0, 1, 0, 3, -1, 5, -1), r"keys \[-1, 5\)"),
        ((0, 0, 1, 0, 3, 5, 4, -1), r"keys \[5, 4\)"),
        ((0, 0, 1, 0, 3, 0, 5, 2), r"partial rows \[2, 5\) of 4"),
        ((0, 0, 1, 0, 3, 0, 5, -2), "partial rows"),
        ((0, 0, 1, 0, 3, 0, 5, 2**31 - 1), "partial rows"),
    ],
)
def test_work_outside_of_its_tensors_is_refused(
    minimal_module: _C.Module, item: Item, says: str, kind: int
) -> None:
    q = torch.ones(2, 4, 3, 4)
    shape = {"num_kv_heads": 2, "partial_rows": 4, "kind": kind}
    fine = (0, 0, 1, 0, 3, 0, 5, 1)
    core_of(minimal_module, q, packed(fine), **shape)
    name = ("prefill", "few-row")[kind]
    with pytest.raises(ValueError, match=rf"{name} work\[1\].*{says}"):
        core_of(minimal_module, q, packed(fine, item), **shape)


@pytest.mark.parametrize(
    ("item", "sources", "says"),
    [
        ((2, 0, 1, 0, 1, 0, 1, 0), (), "request 2"),
        ((0, 0, 1, 0, 4, 0, 1, 0), (), r"rows \[0, 4\) of 3 packed rows"),
        ((0, 0, 1, 0, 3, 0, 2, 0), (), r"partial rows \[0, 6\) of 4"),
        ((0, 0, 1, 0, 3, -1, 1, 0), (), "partial rows"),
        ((0, 0, 1, 0, 3, 0, 0, 0), (), "it has no splits"),
        ((0, 0, 1, 0, 3, 0, -1, 0), (), "it has no splits"),
        ((0, 0, 1, 0, 3, 2**31 - 1, 2**31 - 1, 0), (), "partial rows"),
        ((0, 0, 1, 0, 3, 0, 2, 0), (1,), r"sources \[0, 2\) of 1"),
        ((0, 0, 1, 0, 3, -1, 1, 0), (1,), r"sources \[-1, 0\) of 1"),
        ((0, 0, 1, 0, 3, 2**31 - 1, 2**31 - 1, 0), (1,), "sources"),
        ((0, 0, 1, 0, 3, 0, 1, 0), (2,), r"partial rows \[2, 5\) of 4"),
        ((0, 0, 1, 0, 3, 0, 1, 0), (-1,), "partial rows"),
    ],
)
def test_merge_work_outside_of_the_partial_rows_is_refused(
    minimal_module: _C.Module, item: Item, sources: tuple[int, ...], says: str
) -> None:
    q = torch.ones(2, 4, 3, 4)
    with pytest.raises(ValueError, match=rf"merge work\[0\].*{says}"):
        core_of(
            minimal_module, q, b"", num_kv_heads=2, merge_work=packed(item), partial_rows=4,
            merge_sources=sources,
        )  # fmt: skip


def test_a_work_buffer_may_be_any_contiguous_memory() -> None:
    item = [0, 0, 1, 0, 2, 0, 5, -1]
    array = np.array([item, item], dtype=np.int32)
    for work in (array, memoryview(array), bytearray(array.tobytes())):
        plan = _C.BatchPlan.of_work(work)
        assert (plan.work(0), plan.num_work) == (array.tobytes(), 2)
    with pytest.raises(ValueError, match="work must be contiguous"):
        _C.BatchPlan.of_work(array.T)
    with pytest.raises(ValueError, match=r"merge_work has 28 bytes, .* multiple"):
        _C.BatchPlan.of_work(array, merge_work=array.tobytes()[:28])
    with pytest.raises(TypeError):
        _C.BatchPlan.of_work([item])
    with pytest.raises(ValueError, match="kind is 0"):
        _C.BatchPlan.of_work(array, kind=2)


BlockMask = tuple[tuple[int, ...], tuple[int, ...], int, int]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (((1, 1, 2), (0, 0, 0, 1), 2, 4), "4 entries"),
        (((1, 1, 2, 2), (0, 0, 1), 2, 4), "4 entries"),
        (((1, 1, 2, 2), (4, 0, 2, 1), 2), r"must be \(sizes, strides, q_block, kv_block\)"),
        (((1, 1, 2, 2), (0, 0, 0, 1), 0, 4), "positive"),
        (((1, 1, 2, 2), (0, 0, 0, 1), 2, -4), "positive"),
        (((1, 1, 2, 2), (4, 0, 2, 1), 2, 4), "1 requests, the call 2: a broadcast dim"),
        (((2, 2, 2, 2), (8, 4, 2, 1), 2, 4), "2 heads, the call 4"),
        (((2, -4, 2, 2), (8, 0, 2, 1), 2, 4), "negative"),
        (((2, 1, 1, 2), (8, 0, 2, 1), 2, 4), "covers 2 query rows and 8 keys, .* up to 3 and 5"),
        (((2, 1, 2, 1), (8, 0, 2, 1), 2, 4), "covers 4 query rows and 4 keys, .* up to 3 and 5"),
        (((2, 1, 0, 2), (8, 0, 2, 1), 2, 4), "covers 0 query rows"),
    ],
)
def test_a_block_mask_must_cover_the_call(
    minimal_module: _C.Module, mask: BlockMask, says: str
) -> None:
    q = torch.ones(2, 4, 3, 4)
    core = core_of(minimal_module, q, b"")
    bound(core, q, block_mask=((2, 4, 2, 2), (16, 4, 2, 1), 2, 4))
    bound(core, q, block_mask=((1, 1, 2, 2), (0, 0, 2, 1), 2, 4))
    with pytest.raises(ValueError, match=says):
        bound(core, q, block_mask=mask)


def test_a_block_mask_needs_its_states_where_keys_are_read(minimal_module: _C.Module) -> None:
    q, mask = torch.ones(1, 1, 2, 4), ((1, 1, 1, 2), (2, 2, 2, 1), 2, 4)
    core = core_of(minimal_module, q, packed((0, 0, 1, 0, 2, 0, 4, -1)))
    address = q.data_ptr()
    with pytest.raises(ValueError, match="states has address 0"):
        bound(core, q, block_mask=mask).launch(address, address, address, address, 0, 1.0, 1)
    no_keys = core_of(minimal_module, q, packed((0, 0, 1, 0, 2, 0, 0, -1)))
    bound(no_keys, q, block_mask=mask).launch(address, 0, 0, address, 0, 1.0, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strides": ((1, 2), *((1, 1, 1),) * 4)}, "strides of q must have 3 entries, got 2"),
        ({"strides": ((1, 1, 1),) * 4}, "strides must have 5 entries"),
        ({"layouts": [((1,) * 9, (1,) * 9)]}, "rank 9, at most 8"),
        ({"layouts": [((1, 2), (1,))]}, "strides must have 2 entries"),
        ({"layouts": [((1, -2), (1, 1))]}, "negative"),
        ({"layouts": [(1,)]}, r"\(sizes, strides\)"),
        ({"scalar_kinds": "ix"}, "'i' .*'f'"),
        ({"flags": 64}, "unknown bits"),
        ({"num_pages": -1}, "num_pages must not be negative"),
        ({"kv_requests": -1}, "kv_requests and kv_rows must not be negative"),
        ({"kv_rows": -1}, "kv_requests and kv_rows must not be negative"),
    ],
)
def test_an_impossible_binding_is_refused(
    minimal_module: _C.Module, change: dict[str, Any], says: str
) -> None:
    q = torch.ones(2, 4, 3, 4)
    with pytest.raises(ValueError, match=says):
        bound(core_of(minimal_module, q, b""), q, **change)


@pytest.mark.parametrize(
    "change",
    [{"strides": 3}, {"strides": ("1", *((1, 1, 1),) * 4)}, {"layouts": 3}, {"block_mask": 3},
     {"strides": ((1.0, 1, 1), *((1, 1, 1),) * 4)}],
)  # fmt: skip
def test_a_wrong_type_is_a_type_error(minimal_module: _C.Module, change: dict[str, Any]) -> None:
    q = torch.ones(2, 4, 3, 4)
    with pytest.raises(TypeError):
        bound(core_of(minimal_module, q, b""), q, **change)


def test_bad_options_of_a_call_are_refused(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 2, 4)
    for rows in (-1, 2**31):
        with pytest.raises(ValueError, match=f"{rows} partial rows"):
            core_of(minimal_module, q, b"", partial_rows=rows)
    with pytest.raises(ValueError, match="num_threads=0"):
        call_of(minimal_module, q, b"").launch(0, 0, 0, 0, 0, 1.0, 0)


def test_what_is_no_artifact_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot load artifact"):
        _C.Module(str(tmp_path / "absent.so"))
    text = tmp_path / "text.so"
    text.write_text("no shared object")
    with pytest.raises(OSError, match=r"text\.so"):
        _C.Module(str(text))
    import _ctypes

    with pytest.raises(AbiError, match="fajit_describe"):
        _C.Module(_ctypes.__file__)


# ---- merging states ---------------------------------------------------------------------------


def merge(
    outs: list[torch.Tensor], lses: list[torch.Tensor], threads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged (out, lse) of states out [a, b, c, D], lse [a, b, c]."""
    out = torch.empty(outs[0].shape)
    lse = torch.empty(outs[0].shape[:3])
    _C.merge_states(
        [t.data_ptr() for t in outs],
        [t.stride()[:3] for t in outs],
        [t.data_ptr() for t in lses],
        [t.stride() for t in lses],
        tuple(out.shape[:3]),
        out.shape[3],
        out.data_ptr(),
        out.stride()[:3],
        lse.data_ptr() if lses else 0,
        lse.stride(),
        "float32",
        0,
        (0, 0, 0),
        threads,
    )
    return out, lse


def random_states(count: int, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    outs = [torch.randn(shape).transpose(0, 1) for _ in range(count)]
    lses = [10 * torch.randn(shape[:3]).transpose(0, 1) for _ in range(count)]
    return outs, lses


@pytest.mark.parametrize("count", [1, 2, 5])
def test_states_merge_as_softmax_weights_say(count: int) -> None:
    outs, lses = random_states(count, 3, 70, 5, 33)
    out, lse = merge(outs, lses)
    weights = torch.stack(lses).double().softmax(0)
    torch.testing.assert_close(lse, torch.stack(lses).double().logsumexp(0).float())
    expected = (weights[..., None] * torch.stack(outs)).sum(0).float()
    torch.testing.assert_close(out, expected)


def test_the_number_of_threads_changes_no_bit() -> None:
    outs, lses = random_states(3, 4, 64, 16, 64)
    assert all(map(torch.equal, merge(outs, lses, 1), merge(outs, lses, 2)))


def test_empty_states_count_nothing_whatever_they_hold() -> None:
    outs, lses = random_states(2, 1, 2, 1, 4)
    lses[0].fill_(-torch.inf)
    outs[0].fill_(torch.nan)
    out, lse = merge(outs, lses)
    assert torch.equal(out, outs[1])
    assert torch.equal(lse, lses[1])
    lses[1].fill_(-torch.inf)
    out, lse = merge(outs, lses)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_sums_are_added() -> None:
    outs, _ = random_states(3, 2, 3, 4, 5)
    out, _ = merge(outs, [])
    torch.testing.assert_close(out, sum(outs))


def test_no_rows_merge_to_no_rows() -> None:
    out, lse = merge([torch.empty(2, 0, 3, 4)], [torch.empty(2, 0, 3)])
    assert out.numel() == lse.numel() == 0


def test_lists_that_do_not_fit_together_are_refused() -> None:
    outs, lses = random_states(2, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="at least one"):
        merge_arguments: Callable[..., None] = _C.merge_states
        merge_arguments(
            [], [], [], [], (1, 1, 1), 4, 8, (1, 1, 1), 8, (1, 1, 1), "float32", 0, (0, 0, 0), 1
        )
    with pytest.raises(ValueError, match="the same length"):
        merge(outs, lses[:1])


# ---- hardware ---------------------------------------------------------------------------------


def test_the_isa_agrees_with_the_kernels_list() -> None:
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    info = {name.strip(): value.split() for name, _, value in reversed(lines)}
    flags = {*info.get("flags", ())}
    slow_bf16 = info.get("vendor_id") == ["GenuineIntel"]
    v3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    vnni = v4 | {"avx512_vnni"}
    expected, runs = "generic", ["cpu:generic"]
    for isa, needed in (
        ("avx2", v3),
        ("avx512", v4),
        ("avx512_vnni", vnni),
        ("avx512_fp16", vnni | {"avx512_fp16"}),
        ("avx512_bf16", vnni | {"avx512_bf16"}),
        ("amx_bf16", vnni | {"avx512_fp16", "avx512_bf16", "amx_tile", "amx_bf16"}),
    ):
        if needed <= flags:
            runs.append(f"cpu:{isa}")
            expected = expected if isa == "avx512_bf16" and slow_bf16 else isa
    assert host_target() == f"cpu:{expected}"
    assert host_targets() == tuple(runs)


def test_cache_sizes_are_plausible() -> None:
    l1, l2, l3 = _C.cache_sizes()
    for size, low, high in (
        (l1, 8 << 10, 1 << 20),
        (l2, 64 << 10, 1 << 28),
        (l3, 1 << 19, 1 << 34),
    ):
        assert size == 0 or low <= size <= high
