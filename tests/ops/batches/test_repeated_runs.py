"""Runs after the first: tensors of the same layouts are recognised, and all others are checked."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError, ParamError
from flashattn_jit.ops.launching import batch_run
from flashattn_jit.variants.reference import varlen_reference

HEADS, DIM, PAGE = (4, 2), 32, 16
Q_LENS, KV_LENS = (1, 3, 1), (70, 20, 300)
NUM_PAGES = 32


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


class Case:
    """A planned batch over pages, and new random tensors of any layer."""

    def __init__(self, variant: Any = None, **options: Any) -> None:
        self.variant = fa.Causal() if variant is None else variant
        self.batch = fa.BatchAttention(
            self.variant, num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM,
            q_dtype=torch.float32, **options,
        )  # fmt: skip
        self.replan()

    def replan(self) -> None:
        pages = [-(-n // PAGE) for n in KV_LENS]
        self.indices = torch.randperm(NUM_PAGES)[: sum(pages)].to(torch.int32)
        self.page_indptr = indptr(tuple(pages))
        last = torch.tensor([n - (p - 1) * PAGE for n, p in zip(KV_LENS, pages, strict=True)])
        paged = fa.Paged(self.page_indptr, self.indices, last.to(torch.int32), PAGE)
        self.batch.plan(indptr(Q_LENS), paged)

    def repeats(self) -> dict[Any, Any]:
        """What later runs of the plan are recognised by."""
        planned = self.batch.in_force()
        assert isinstance(planned, batch_run.Planned)
        return planned.repeats

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = torch.randn(sum(Q_LENS), HEADS[0], DIM)
        k, v = torch.randn(2, NUM_PAGES, PAGE, HEADS[1], DIM)
        return q, k, v

    def expected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any = None) -> Any:
        rows = []
        for x in (k, v):
            found = [
                x[self.indices[a:b].long()].flatten(0, 1)[:n]
                for a, b, n in zip(self.page_indptr, self.page_indptr[1:], KV_LENS, strict=False)
            ]
            rows.append(torch.cat(found).double())
        out, _ = varlen_reference(
            q.double(), *rows, indptr(Q_LENS), indptr(KV_LENS), self.variant, q_offset="end",
            scale=scale,
        )  # fmt: skip
        return out

    def check(self, out: torch.Tensor, *given: Any) -> None:
        torch.testing.assert_close(out.double(), self.expected(*given), atol=2e-5, rtol=2e-5)


class Odd(torch.Tensor):
    """A subclass."""


@pytest.fixture
def first_runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by a launch at each run that was not recognised."""
    found: list[object] = []
    launch = batch_run.launch

    def counted(plan: Any, ready: Any, *rest: Any) -> Any:
        found.append(ready)
        return launch(plan, ready, *rest)

    monkeypatch.setattr(batch_run, "launch", counted)
    return found


def ragged_case(variant: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A planned batch over ragged keys; new tensors of it."""
    batch = fa.BatchAttention(
        variant, num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, q_dtype=dtype
    )
    batch.plan(indptr(Q_LENS), fa.Ragged(indptr(KV_LENS)))

    def tensors() -> list[torch.Tensor]:
        rows = sum(Q_LENS), sum(KV_LENS), sum(KV_LENS)
        heads = HEADS[0], HEADS[1], HEADS[1]
        return [torch.randn(n, h, DIM).to(dtype) for n, h in zip(rows, heads, strict=True)]

    return batch, tensors


DOCUMENT = torch.arange(400) // 50


@pytest.mark.parametrize(
    "variant",
    [None, fa.Causal(), fa.ALiBi() & fa.Causal(), fa.SlidingWindow(20), fa.SoftCap(5.0),
     lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j]],
    ids=["none", "causal", "tensor", "number", "pair", "table"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_variants_and_dtypes(variant: Any, dtype: torch.dtype, first_runs: list[object]) -> None:
    batch, tensors = ragged_case(variant, dtype)
    batch.run(*tensors())
    given = tensors()
    result = batch.run(*given)
    assert len(first_runs) == 1
    other, _ = ragged_case(variant, dtype)
    assert torch.equal(result, other.run(*given))


FORMATS = [
    "int8", "e4m3", "e5m2", "int4", "nf4", ("int8", "token_head"), ("int4", "token_head"),
    ("e4m3", "tensor"),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_formats(name: Any, first_runs: list[object]) -> None:
    own = fa.kv.Format(*name) if isinstance(name, tuple) else fa.kv.Format(name)
    case = Case(kv_format=own)
    for i in range(3):
        q, k, v = case.tensors()
        stored = own.quantize(k), own.quantize(v)
        result = case.batch.run(q, *stored)
        assert len(first_runs) == 1, f"run {i}"
        case.check(result, q, *(x.dequantize() for x in stored))


def test_latents_and_cascades(first_runs: list[object]) -> None:
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=1, head_dim=48, head_dim_v=32, v_in_k=True,
        q_dtype=torch.float32,
    )  # fmt: skip
    batch.plan(indptr(Q_LENS), fa.Ragged(indptr(KV_LENS)))
    for _ in range(3):
        q, k = torch.randn(sum(Q_LENS), 4, 48), torch.randn(sum(KV_LENS), 1, 48)
        batch.run(q, k, scale=0.2)
    assert len(first_runs) == 1
    first_runs.clear()
    cascade = fa.CascadeAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=DIM, q_dtype=torch.float32
    )
    lens = torch.tensor([0, 1, 2], dtype=torch.int32)
    pages = [torch.randn(12, 4, 2, DIM) for _ in range(2)]
    last = torch.tensor([3, 4], dtype=torch.int32)
    prefix = fa.Paged(lens[:2], torch.tensor([5, 6], dtype=torch.int32)[:1], last[1:], 4)
    own = fa.Paged(lens, torch.tensor([1, 2], dtype=torch.int32), last, 4)
    cascade.plan(
        [fa.CascadeLevel(torch.tensor([0, 2], dtype=torch.int32), prefix),
         fa.CascadeLevel(torch.tensor([0, 1, 2], dtype=torch.int32), own)]
    )  # fmt: skip
    outs = [cascade.run(torch.ones(2, 4, DIM), *pages) for _ in range(3)]
    assert len(first_runs) == 1 and torch.equal(outs[0], outs[2])


def test_layouts_that_take_turns(first_runs: list[object]) -> None:
    case = Case()
    for _ in range(3):
        q, k, v = case.tensors()
        apart = k.transpose(1, 2).contiguous().transpose(1, 2)
        for keys in (k, apart):
            case.check(case.batch.run(q, keys, v), q, k, v)
    assert len(first_runs) == 2
    for gap in range(1, 9):
        wide = torch.randn(sum(Q_LENS), HEADS[0], DIM + gap)
        case.batch.run(wide[..., :DIM], k, v)
        case.batch.run(*case.tensors(), return_lse=torch.tensor(True))
    kept = [len(repeats) for repeats in case.repeats().values()]
    assert max(kept) == batch_run.KEPT_REPEATS and len(kept) == 2


def test_subclasses_are_computed_and_not_kept() -> None:
    case = Case()
    q, k, v = case.tensors()
    for _ in range(3):
        case.check(case.batch.run(q.as_subclass(Odd), k, v), q, k, v)
    assert all(len(repeats) == 1 for repeats in case.repeats().values())


def test_a_tensor_that_another_thread_rebinds_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is remembered with the layouts that it was bound to."""
    case = Case()
    q, k, v = case.tensors()
    q_by_head = torch.randn(HEADS[0], q.shape[0], DIM).transpose(0, 1)
    out, wide = torch.empty_like(q), torch.zeros(sum(Q_LENS), HEADS[0], 2 * DIM)
    cell, given = q.clone(), wide[..., :DIM]
    launch = batch_run.launch

    def rebound(*arguments: Any) -> Any:
        result = launch(*arguments)
        cell.data, given.data = q_by_head, out
        return result

    with monkeypatch.context() as patch:
        patch.setattr(batch_run, "launch", rebound)
        case.batch.run(cell, k, v, out=given)
    space = torch.zeros(2 * q.numel())
    mine = space[: q.numel()].view(q.shape)
    case.batch.run(q_by_head, k, v, out=mine)
    case.check(mine, q_by_head, k, v)
    assert not space[q.numel() :].any()
    case.check(case.batch.run(q, k, v, out=mine), q, k, v)


def test_without_torchs_functions_for_dlpack(tmp_path: Path) -> None:
    """In another process, as the functions are looked up once."""
    program = tmp_path / "run.py"
    program.write_text(
        "import torch\n"
        "del torch.Tensor.__dlpack_c_exchange_api__\n"
        "from tests.ops.batches.test_repeated_runs import Case\n"
        "case = Case()\n"
        "for _ in range(3):\n"
        "    given = case.tensors()\n"
        "    case.check(case.batch.run(*given), *given)\n"
    )
    subprocess.run(
        [sys.executable, str(program)], check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_freed_memory(name: str) -> None:
    for runs_before in (0, 1):
        case = Case()
        q, k, v = case.tensors()
        given = {"q": q, "k": k.clone(), "v": v.clone(), "out": torch.empty_like(q)}
        for _ in range(runs_before):
            case.batch.run(**given)
        given[name].untyped_storage().resize_(0)
        with pytest.raises(InputError, match=f"{name} has no memory"):
            case.batch.run(**given)


def test_other_tensors_of_the_same_layouts(first_runs: list[object]) -> None:
    case = Case()
    for _ in range(3):
        given = case.tensors()
        case.check(case.batch.run(*given), *given)
    assert len(first_runs) == 1
    out = torch.empty_like(given[0])
    for _ in range(3):
        given = case.tensors()
        assert case.batch.run(*given, out=out) is out
        case.check(out, *given)
    assert len(first_runs) == 2, "a given result is a kind of its own"
    for _ in range(2):
        result, lse = case.batch.run(*given, return_lse=True)
        case.check(result, *given)
        rows = torch.empty_like(lse)
        _, same = case.batch.run(*given, lse=rows)
        assert same is rows
        torch.testing.assert_close(rows, lse)
        partial, _ = case.batch.run(*given, partial=True)
        torch.testing.assert_close(partial, result)
    assert len(first_runs) == 5


def test_a_new_plan_is_used_at_once() -> None:
    case = Case()
    for _ in range(3):
        case.replan()
        for _ in range(2):
            given = case.tensors()
            case.check(case.batch.run(*given), *given)


def other_layouts() -> Iterator[Any]:
    yield "q with gaps", 0, lambda t: torch.randn(t.shape[0], HEADS[0], 2 * DIM)[..., :DIM]
    yield "q by head", 0, lambda t: torch.randn(HEADS[0], t.shape[0], DIM).transpose(0, 1)
    yield "k by head", 1, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)
    yield "v with gaps", 2, lambda t: torch.randn(NUM_PAGES, PAGE, HEADS[1], 2 * DIM)[..., :DIM]
    yield "more pages", 1, lambda t: torch.cat([t, t])


@pytest.mark.parametrize(
    ("index", "change"), [pytest.param(i, change, id=name) for name, i, change in other_layouts()]
)
def test_other_layouts(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = Case()
    for _ in range(2):
        given = list(case.tensors())
        case.check(case.batch.run(*given), *given)
        given[index] = change(given[index])
        if given[1].shape[0] != given[2].shape[0]:
            given[2] = change(given[2])
        case.check(case.batch.run(*given), *given)


def refused() -> dict[str, Callable[[Any, Any, Any], dict[str, Any]]]:
    wide = torch.randn(sum(Q_LENS), HEADS[0], 2 * DIM)
    return {
        "q of another dtype": lambda q, k, v: {"q": q.half()},
        "k of another dtype": lambda q, k, v: {"k": k.bfloat16()},
        "more rows of q": lambda q, k, v: {"q": torch.cat([q, q])},
        "fewer pages": lambda q, k, v: {"k": k[:2], "v": v[:2]},
        "other page size": lambda q, k, v: {"k": k[:, :8], "v": v[:, :8]},
        "heads": lambda q, k, v: {"k": k[:, :, :1], "v": v[:, :, :1]},
        "a list": lambda q, k, v: {"q": q.tolist()},
        "None": lambda q, k, v: {"q": None},
        "meta": lambda q, k, v: {"q": q.to("meta")},
        "sparse": lambda q, k, v: {"q": q.to_sparse()},
        "out of another dtype": lambda q, k, v: {"out": q.half()},
        "out is q": lambda q, k, v: {"out": q},
        "out overlaps q": lambda q, k, v: {"q": wide[..., :DIM], "out": wide[..., DIM:]},
        "out in k": lambda q, k, v: {"out": k.view(-1)[: q.numel()].view(q.shape)},
        "out in v": lambda q, k, v: {"out": v.view(-1)[-q.numel() :].view(q.shape)},
        "another shape that requires grad": lambda q, k, v: {
            "q": q[:, :, :16].clone().requires_grad_()
        },
        "another dtype that requires grad": lambda q, k, v: {"q": q.double().requires_grad_()},
        "out of another shape that requires grad": lambda q, k, v: {
            "out": torch.zeros(2, 4, 8, requires_grad=True)
        },
        "NaN as scale": lambda q, k, v: {"scale": float("nan")},
        "a word as scale": lambda q, k, v: {"scale": "large"},
    }  # fmt: skip


@pytest.mark.parametrize("what", list(refused()))
def test_what_a_first_run_refuses_later_ones_refuse(what: str) -> None:
    """By the same error, changing nothing; and the run after it is right."""
    messages = []
    for runs_before in (0, 2):
        torch.manual_seed(0)
        case = Case()
        out = torch.zeros(sum(Q_LENS), HEADS[0], DIM)
        for _ in range(runs_before):
            given = case.tensors()
            case.batch.run(*given)
            case.batch.run(*given, out=out)
        q, k, v = case.tensors()
        before = k.clone(), v.clone()
        arguments = {"q": q, "k": k, "v": v, **refused()[what](q, k, v)}
        with pytest.raises(FlashAttnJitError) as caught:
            case.batch.run(**arguments)
        messages.append((type(caught.value), str(caught.value)))
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])
        given = case.tensors()
        case.check(case.batch.run(*given), *given)
    assert messages[0] == messages[1]


def test_lse_in_out_and_in_the_inputs() -> None:
    case = Case()
    q, k, v = case.tensors()
    space = torch.zeros(q.numel() + q.shape[0] * HEADS[0])
    out, lse = space[: q.numel()].view(q.shape), space[q.numel() :].view(q.shape[:2])
    for _ in range(2):
        case.batch.run(q, k, v, out=out, lse=lse)
        case.check(out, q, k, v)
    inside = space[q.numel() - lse.numel() : q.numel()].view(lse.shape)
    for wrong in (inside, k.view(-1)[: lse.numel()].view(lse.shape)):
        with pytest.raises(InputError, match="lse shares memory"):
            case.batch.run(q, k, v, out=out, lse=wrong)


def test_gradients_are_refused_and_frozen_parameters_pass() -> None:
    case = Case()
    q, k, v = case.tensors()
    case.batch.run(q, k, v)
    out = torch.zeros_like(q)
    case.batch.run(q, k, v, out=out)
    with pytest.raises(GradError):
        case.batch.run(q.clone().requires_grad_(), k, v)
    with pytest.raises(GradError, match="out requires grad"):
        case.batch.run(q, k, v, out=torch.zeros_like(q).requires_grad_())
    with torch.no_grad():
        case.check(case.batch.run(torch.nn.Parameter(q), k, v), q, k, v)
    with torch.inference_mode():
        case.check(case.batch.run(q, k, v), q, k, v)


def test_the_scale_of_each_run() -> None:
    case = Case()
    moving = torch.tensor(0.25)
    for scale in (None, 0.5, 0.125, moving, 1):
        given = case.tensors()
        out = case.batch.run(*given, scale=scale)
        case.check(out, *given, 0.25 if scale is moving else scale)
    moving.fill_(0.75)
    case.check(case.batch.run(*given, scale=moving), *given, 0.75)


def test_what_a_hook_captures_is_read_at_each_run() -> None:
    bias = torch.randn(HEADS[0])
    factor = 1.5

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor + bias[h]

    case = Case(score)
    for _ in range(3):
        given = case.tensors()
        case.check(case.batch.run(*given), *given)
        bias, factor = torch.randn(HEADS[0]), factor + 1


def test_params_of_runs() -> None:
    slopes = torch.rand(HEADS[0])
    case = Case(fa.ALiBi() & fa.Causal())
    first = case.tensors()
    expected = case.batch.run(*first, slopes=slopes)
    for _ in range(2):
        assert torch.equal(case.batch.run(*first, slopes=slopes.clone()), expected)
    other = case.batch.run(*first, slopes=2 * slopes)
    assert not torch.equal(other, expected)
    strided = torch.stack([slopes, -slopes], 1)[:, 0]
    assert torch.equal(case.batch.run(*first, slopes=strided), expected)
    negated = torch.complex(torch.zeros_like(slopes), -slopes).conj().imag
    assert negated.is_neg()
    assert torch.equal(case.batch.run(*first, slopes=negated), expected)
    space = torch.zeros(first[0].numel())
    out = space.view(first[0].shape)
    for _ in range(2):
        case.batch.run(*first, slopes=slopes, out=out)
    with pytest.raises(InputError, match="out shares memory"):
        case.batch.run(*first, slopes=space[: HEADS[0]], out=out)


def test_threads_share_a_plan_and_its_workspace() -> None:
    case = Case()
    layers = [case.tensors() for _ in range(4)]
    expected = [case.batch.run(*layer) for layer in layers]
    failed: list[int] = []

    def work(thread: int) -> None:
        for i in range(60):
            at = (i + thread) % len(layers)
            if not torch.equal(case.batch.run(*layers[at]), expected[at]):
                failed.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_number_of_threads_of_each_run() -> None:
    case, before = Case(), torch.get_num_threads()
    given = case.tensors()
    expected = case.batch.run(*given)
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert torch.equal(case.batch.run(*given), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "odd",
    [None, 5, "q", [1.0], torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"),
     torch.zeros(1, 1, 1, 1, 1), torch.zeros(9).as_subclass(Odd), torch.Tensor],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_objects_that_are_no_plain_tensors_are_not_recognised(odd: object) -> None:
    case = Case()
    q, k, v = case.tensors()
    case.batch.run(q, k, v)
    ((repeat,),) = case.repeats().values()
    out = torch.full_like(q, 7.0)
    native = repeat.native
    for i in range(4):
        given: list[Any] = [q, k, v, out]
        given[i] = odd
        if i < 3 or odd is not None:
            assert native.run(*given, None, 1.0, (), ()) is None
            assert native.run_again(*given, None, None, False, False, {}) is None
    assert native.run(q, k, v, out, odd if odd is not None else q, 1.0, (), ()) is None
    assert torch.equal(out, torch.full_like(q, 7.0)), "nothing was written"


def repeated(repeat: Any, layouts: Any, **changed: Any) -> _C.RepeatedCall:
    """A call as a run makes it, but for some arguments."""
    given: dict[str, Any] = {
        "params": (), "param_bytes": (), "plan": None, "workspace": None, "workspace_bytes": 0,
        "page_indices": 0, "key_blocks": 0, "scale": 1.0, "packed": (False, False),
        "num_threads": 0, "variable": None,
        "asked": (False,) * 4, "captured": None, "planned": (), "scalars": (), **changed,
    }  # fmt: skip
    return _C.RepeatedCall(repeat.launch.call, layouts, **given)


def test_layouts_that_are_none() -> None:
    case = Case()
    q, k, v = case.tensors()
    case.batch.run(q, k, v)
    ((repeat,),) = case.repeats().values()
    one = (q.shape, q.stride(), q)
    for wrong in (
        (), (one,) * 4, (one,) * 6, (None, *(one,) * 4), (5, *(one,) * 4),
        ((q.shape, q.stride()), *(one,) * 4), ((q.shape, (1,), q), *(one,) * 4),
        (((1,) * 5, (1,) * 4, q), *(one,) * 4), ((("a",), (1,), q), *(one,) * 4),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            repeated(repeat, wrong)
    unread = repeated(repeat, ((q.shape, q.stride(), "q"), *(one,) * 4))
    assert not unread.can_run_again
    assert unread.run(q, q, q, q, q, 1.0, (), ()) is None


# --- runs that C repeats alone --------------------------------------------------------------------


@pytest.fixture
def bound_runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each run that Python binds the variant for."""
    found: list[object] = []
    bind = batch_run.bind

    def counted(*arguments: Any) -> Any:
        found.append(arguments)
        return bind(*arguments)

    monkeypatch.setattr(batch_run, "bind", counted)
    return found


@pytest.mark.parametrize(
    "variant",
    [None, fa.Causal(), fa.ALiBi() & fa.Causal(), fa.SlidingWindow(20), fa.SoftCap(5.0)],
    ids=["none", "causal", "tensor", "number", "pair"],
)
def test_runs_without_params_are_repeated_by_c(variant: Any, bound_runs: list[object]) -> None:
    case = Case(variant)
    for asked in ({}, {"return_lse": True}, {"partial": True}, {"scale": 0.5}):
        for out in (None, torch.zeros(sum(Q_LENS), HEADS[0], DIM)):
            first, given = case.tensors(), case.tensors()
            case.batch.run(*first, **asked, out=None if out is None else torch.zeros_like(out))
            count = len(bound_runs)
            result = case.batch.run(*given, **asked, out=out)
            assert len(bound_runs) == count
            rows = result if isinstance(result, torch.Tensor) else result[0]
            case.check(rows, *given, asked.get("scale"))
            assert isinstance(result, tuple) == ("return_lse" in asked or "partial" in asked)
            assert out is None or rows is out


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_formats_are_repeated_by_c(name: Any, bound_runs: list[object]) -> None:
    """With scales of the same layouts; others are bound again."""
    own = fa.kv.Format(*name) if isinstance(name, tuple) else fa.kv.Format(name)
    case = Case(kv_format=own)
    for i in range(3):
        q, k, v = case.tensors()
        stored = own.quantize(k), own.quantize(v)
        case.check(case.batch.run(q, *stored), q, *(x.dequantize() for x in stored))
        assert len(bound_runs) == 1, f"run {i}"
    scales = stored[0].scales
    if scales.dim():
        wide = torch.zeros(*scales.shape[:-1], 2 * scales.shape[-1])[..., ::2].copy_(scales)
        apart = replace(stored[0], scales=wide)
        case.check(case.batch.run(q, apart, stored[1]), q, *(x.dequantize() for x in stored))
        assert len(bound_runs) == 2
    with pytest.raises(InputError, match="must be an fa.kv.Stored"):
        case.batch.run(q, k, stored[1])
    with pytest.raises(InputError, match="k_scale is given"):
        case.batch.run(q, *stored, k_scale=scales)


def test_params_of_runs_are_compared_by_c(bound_runs: list[object]) -> None:
    case = Case(fa.ALiBi() & fa.SoftCap(5.0) & fa.Causal())
    given = case.tensors()

    def check(**params: Any) -> int:
        """The runs that Python bound."""
        before = len(bound_runs)
        out = case.batch.run(*given, **params)
        case.variant = fa.ALiBi(**{k: v for k, v in params.items() if k == "slopes"}) & (
            fa.SoftCap(float(params.get("cap", 5.0))) & fa.Causal()
        )
        case.check(out, *given)
        return len(bound_runs) - before

    slopes = torch.rand(HEADS[0])
    assert [check(slopes=slopes), check(slopes=slopes.clone())] == [1, 0]
    assert [check(slopes=2 * slopes, cap=3.0), check(slopes=slopes, cap=3.0)] == [1, 0]
    assert [check(slopes=slopes, cap=4.0), check(slopes=slopes, cap=4)] == [1, 1]
    assert [check(cap=3.0), check(), check(cap=3.0), check()] == [1, 1, 0, 0]
    assert check(slopes=torch.rand(HEADS[0], 2)[:, 1]) == 1
    for wrong in (slopes[:2], slopes.tolist(), None, slopes.half(), slopes.to_sparse()):
        with pytest.raises(ParamError, match="slopes"):
            case.batch.run(*given, slopes=wrong)
    for unknown in ({"slope": slopes}, {"slopes": slopes, "slope": 1}, {"window": 3}):
        with pytest.raises(ParamError):
            case.batch.run(*given, **unknown)
    with pytest.raises(GradError):
        case.batch.run(*given, slopes=slopes.clone().requires_grad_())
    assert check(slopes=slopes) == 0


def test_latents_are_repeated_by_c(bound_runs: list[object]) -> None:
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=1, head_dim=48, head_dim_v=32, v_in_k=True,
        q_dtype=torch.float32,
    )  # fmt: skip
    batch.plan(indptr(Q_LENS), fa.Ragged(indptr(KV_LENS)))
    for _ in range(3):
        q, k = torch.randn(sum(Q_LENS), 4, 48), torch.randn(sum(KV_LENS), 1, 48)
        out = batch.run(q, k, scale=0.2)
        expected, _ = varlen_reference(
            q.double(), k.double(), k[..., :32].double(), indptr(Q_LENS), indptr(KV_LENS),
            fa.Causal(), q_offset="end", scale=0.2,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    assert len(bound_runs) == 1
    with pytest.raises(InputError, match="scale has no default"):
        batch.run(q, k)
    with pytest.raises(InputError, match="give no v"):
        batch.run(q, k, k[..., :32], scale=0.2)


def test_a_captured_tensor_that_changes_its_layout(bound_runs: list[object]) -> None:
    bias = torch.randn(HEADS[0])
    case = Case(lambda s, b, h, i, j: s + bias[h])
    given = case.tensors()
    for _ in range(2):
        case.check(case.batch.run(*given), *given)
    assert len(bound_runs) == 1
    bias.copy_(torch.randn(HEADS[0]))
    case.check(case.batch.run(*given), *given)
    assert len(bound_runs) == 1, "values are the kernel's to read"
    bias.data = torch.randn(HEADS[0], 2)[:, 1]
    case.check(case.batch.run(*given), *given)
    assert len(bound_runs) == 2
    bias.data = torch.randn(HEADS[0], dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    case.check(case.batch.run(*given), *given)
    bias.requires_grad_()
    with pytest.raises(GradError):
        case.batch.run(*given)
    with torch.no_grad():
        case.check(case.batch.run(*given), *given)


def test_params_that_are_set_between_runs() -> None:
    biased = fa.ALiBi()
    capped = fa.SoftCap(5.0)
    case = Case(biased & capped & fa.Causal())
    given = case.tensors()
    for slopes, cap in ((None, 5.0), (torch.rand(HEADS[0]), 5.0), (None, 3.0), (None, 5.0)):
        if slopes is not None:
            biased.slopes = slopes
        capped.cap = cap
        for _ in range(2):
            case.check(case.batch.run(*given), *given)
    case = Case(window := fa.SlidingWindow(20))
    first = case.batch.run(*given)
    window.window = 3
    assert torch.equal(case.batch.run(*given), first), "the mask's params are the plan's"
    case.replan()
    case.check(case.batch.run(*given), *given)


def test_what_is_captured_changes_while_a_run_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: the kernel's numbers are those of before."""
    factor = 1.5

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor

    case = Case(score)
    given = case.tensors()
    launch = batch_run.launch

    def changed(*arguments: Any) -> Any:
        nonlocal factor
        result = launch(*arguments)
        factor = 2.5
        return result

    with monkeypatch.context() as patch:
        patch.setattr(batch_run, "launch", changed)
        case.batch.run(*given)
    for value in (2.5, 1.5, 2.5):
        factor = value
        case.check(case.batch.run(*given), *given)


def test_zeros_of_both_signs_and_types_of_numbers() -> None:
    number: Any = 1.0

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + torch.where(j > i - 3, 1.0 / (number + 1e-30 * (j - j)), 0.0)

    case = Case(score)
    given = case.tensors()
    for value in (1.0, 1, True, 2**40, 1.0, -1.0, 1.0):
        number = value
        for _ in range(2):
            case.check(case.batch.run(*given), *given)


# torch's rules of forward-mode derivatives use it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_modes_are_seen(bound_runs: list[object]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    case = Case()
    given = case.tensors()
    outs = [case.batch.run(*given) for _ in range(2)]
    count = len(bound_runs)
    with Watch():
        outs.append(case.batch.run(*given))
    assert any("batch" in name for name in seen), seen
    with torch.device("meta"):
        outs.append(case.batch.run(*given))
    with torch.autograd.profiler.profile() as events:
        outs.append(case.batch.run(*given))
    assert any("batch" in event.key for event in events.key_averages())
    assert len(bound_runs) == count + 3
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        outs.append(case.batch.run(*given))
    finally:
        torch.set_default_dtype(before)
    assert len(bound_runs) == count + 4
    for out in outs:
        case.check(out, *given)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        with pytest.raises(GradError, match="tangent"):
            case.batch.run(dual, *given[1:])


def test_an_object_that_its_variant_refers_to_is_collected() -> None:
    class Owner:
        case: Case
        factor = 2.0

    def batch_of_an_owner() -> Any:
        owner = Owner()
        owner.case = Case(lambda s, b, h, i, j: s * owner.factor)
        given = owner.case.tensors()
        for _ in range(2):
            owner.case.batch.run(*given)
        planned = owner.case.batch.in_force()
        assert isinstance(planned, batch_run.Planned) and planned.again
        return weakref.ref(owner.case.batch)

    batch = batch_of_an_owner()
    gc.collect()
    assert batch() is None
