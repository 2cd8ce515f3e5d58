"""Runs after the first: tensors of the same layouts are recognised, and all others are checked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError
from flashattn_jit.ops.launching import batch_run
from tests.ops.repeats.cases import (
    DIM,
    FORMATS,
    HEADS,
    KV_LENS,
    NUM_PAGES,
    PAGE,
    Q_LENS,
    Case,
    calls_of,
    indptr,
)


class Odd(torch.Tensor):
    """A subclass."""


@pytest.fixture
def first_runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each run that was not recognised."""
    return calls_of(monkeypatch, batch_run, "launch")


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


@pytest.mark.by_turns(3)
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


def test_cascades(first_runs: list[object]) -> None:
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
        "from tests.ops.repeats.cases import Case\n"
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


@pytest.mark.parametrize("formats", [(None, None), (None, fa.kv.Format("int8"))], ids=str)
def test_autograd_sees_that_given_results_are_written(formats: tuple[Any, Any]) -> None:
    """Of batches and of cascades, whose levels of several formats are merged by a launch."""
    batch, tensors = ragged_case(fa.Causal())
    q, k, v = tensors()
    shared = fa.Ragged(indptr([7]))
    cascade = fa.CascadeAttention(
        fa.Causal(), num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM,
        q_dtype=torch.float32,
    )  # fmt: skip
    cascade.plan([
        fa.CascadeLevel(indptr([sum(Q_LENS)]), shared, kv_format=formats[0]),
        fa.CascadeLevel(indptr(Q_LENS), fa.Ragged(indptr(KV_LENS)), kv_format=formats[1]),
    ])  # fmt: skip
    if formats[1] is None:
        keys = [tuple(torch.cat([t[:7], t]) for t in (k, v))] * 2
    else:
        keys = [(k[:7], v[:7]), tuple(formats[1].quantize(t) for t in (k, v))]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    for call in (lambda **x: batch.run(q, k, v, **x), lambda **x: cascade.run(q, keys, **x)):
        for _ in range(5):
            before = out._version, lse._version
            call(out=out, lse=lse)
            assert out._version > before[0] and lse._version > before[1]
        assert [x._version for x in call(return_lse=True)] == [0, 0]


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
            assert native.run_again(fa.Causal(), *given, None, None, False, False, {}) is None
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
