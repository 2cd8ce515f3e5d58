"""Runs that C repeats alone: what a variant has captured, its params and torch's state."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError, ParamError
from flashattn_jit.ops.launching import batch_run, launches
from flashattn_jit.variants import binding
from flashattn_jit.variants.reference import varlen_reference
from tests.ops.repeats.cases import (
    DIM,
    FORMATS,
    HEADS,
    KV_LENS,
    Q_LENS,
    Case,
    calls_of,
    indptr,
)


@pytest.fixture
def bound_runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each run that Python binds the variant for."""
    return calls_of(monkeypatch, batch_run, "bind")


@pytest.mark.by_turns(3)
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


@pytest.mark.by_turns(3)
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
    if scales.numel() > 1:
        wide = torch.zeros(*scales.shape[:-1], 2 * scales.shape[-1])[..., ::2].copy_(scales)
        apart = replace(stored[0], scales=wide)
        case.check(case.batch.run(q, apart, stored[1]), q, *(x.dequantize() for x in stored))
        assert len(bound_runs) == 2
    with pytest.raises(InputError, match="must be an fa"):
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
    # Other numbers: C repeats the third run.
    for cap in (3.0, 4.0):
        runs = [check(slopes=slopes * i, cap=cap) for i in range(1, 4)]
        assert runs == [1, 1, 0]
    assert [check(slopes=slopes, cap=4), check(slopes=slopes, cap=4)] == [1, 1], "4 is no float"
    assert [check(cap=3.0) for _ in range(3)] == [1, 1, 0]
    assert [check() for _ in range(3)] == [1, 1, 0]
    assert check(cap=3.0) == check(slopes=slopes) == 0
    assert check(slopes=torch.rand(HEADS[0], 2)[:, 1]) == 1
    for wrong in (slopes[:2], slopes.tolist(), 3.0, slopes.to_sparse()):
        with pytest.raises(FlashAttnJitError, match="slopes"):
            case.batch.run(*given, slopes=wrong)
    for unknown in ({"slope": slopes}, {"slopes": slopes, "slope": 1}, {"window": 3}):
        with pytest.raises(ParamError):
            case.batch.run(*given, **unknown)
    with pytest.raises(GradError, match="tensor 'slopes' requires"):
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
    with pytest.raises(GradError, match="tensor 'bias' requires"):
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
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        outs.append(case.batch.run(*given))
    finally:
        torch.set_default_dtype(before)
    assert len(bound_runs) == count + 1
    for out in outs:
        case.check(out, *given)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        with pytest.raises(GradError, match="tangent"):
            case.batch.run(dual, *given[1:])


def test_an_object_that_a_default_refers_to_is_collected() -> None:
    def batch_of_a_default() -> Any:
        box: list[Any] = []

        class Scaled(fa.Variant):
            factor: float = fa.scalar(lambda dims: (box, 2.0)[1])

            def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return score * self.factor

        case = Case(Scaled())
        box.append(case.batch)
        for _ in range(3):
            case.batch.run(*case.tensors())
        planned = case.batch.in_force()
        assert isinstance(planned, batch_run.Planned) and planned.again
        return weakref.ref(case.batch)

    batch = batch_of_a_default()
    binding.clear()
    launches.forget_launches()
    gc.collect()
    assert batch() is None


def test_freed_params(bound_runs: list[object]) -> None:
    for runs_before in (0, 3):
        case, slopes = Case(fa.ALiBi()), torch.rand(HEADS[0])
        given = case.tensors()
        for _ in range(runs_before):
            case.batch.run(*given, slopes=slopes)
        slopes.untyped_storage().resize_(0)
        with pytest.raises(InputError, match=r"'slopes' has no memory"):
            case.batch.run(*given, slopes=slopes)


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
