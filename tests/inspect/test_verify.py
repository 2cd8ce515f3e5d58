"""`Variant.verify` passes right kernels, and names the failures of wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import (
    FlashAttnJitError,
    InputError,
    ParamError,
    VariantError,
    VerificationError,
)
from flashattn_jit.inspect.verification import error, verification
from flashattn_jit.inspect.verification.cases import Case
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

FP32 = (torch.float32,)


@pytest.fixture
def few_cases(monkeypatch):
    """A few cases instead of fifty, where a test is about reporting."""

    def few(base, tile_q, tile_kv):
        yield Case("few rows", base._replace(q_len=1))
        yield Case("many rows", base._replace(q_len=40))
        yield Case("no keys", base._replace(kv_len=0))
        yield Case("group size 4", base._replace(num_q_heads=4, num_kv_heads=1), group=True)

    monkeypatch.setattr(verification, "cases", few)
    monkeypatch.setattr(verification, "extra_kernels", lambda base, tile_q, tile_kv: iter(()))


class Decay(fa.Variant):
    """A score hook with a tensor and a scalar."""

    slopes: torch.Tensor = fa.tensor("num_q_heads")
    rate: float = fa.scalar(0.1)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score - self.rate * self.slopes[h] * (q_idx - kv_idx).abs()


def slopes(dims: Dims) -> torch.Tensor:
    """Slopes for any number of heads."""
    return torch.linspace(0.1, 1.0, dims.num_q_heads)


def test_a_right_kernel_passes_every_case():
    report = fa.Causal().verify(dtypes=FP32)
    assert report.ok
    assert len(report.rows) > 40
    assert {r.tile_kind for r in report.rows} == {"prefill", "few_row"}
    assert "failed" in str(report)


def test_a_kernel_that_differs_from_its_reference_fails_with_a_readable_row(few_cases):
    wrong = fa.variant(
        score_mod=fa.cpp(
            "return score + 0.01f * (kv_idx - q_idx);",
            reference=lambda score, b, h, q_idx, kv_idx: score - 0.01 * (kv_idx - q_idx),
        ),
        name="WrongSign",
    )
    with pytest.raises(VerificationError) as info:
        wrong.verify(dtypes=FP32)
    report = info.value.report
    assert not report.ok
    assert {r.case for r in report.failures} == {"few rows", "many rows", "group size 4"}
    row = report.failures[0]
    assert row.error > row.allowed
    assert row.note.startswith(("out at b=", "lse at b="))
    text = str(info.value)
    assert "WrongSign" in text
    assert "FAIL few rows, float32, B2 H4/2 1x131 D64: RMS " in text


def test_a_mask_that_is_off_by_one_fails(few_cases):
    wrong = fa.variant(
        mask_mod=fa.cpp(
            "return kv_idx <= q_idx;", reference=lambda b, h, q_idx, kv_idx: kv_idx < q_idx
        )
    )
    report = wrong.verify(dtypes=FP32, raise_on_failure=False)
    failed = {r.case for r in report.failures}
    assert failed == {"few rows", "many rows", "group size 4"}


def test_params_may_be_functions_of_the_sizes(few_cases):
    report = Decay().verify(dtypes=FP32, slopes=slopes)
    assert report.ok
    assert [r.status for r in report.rows] == ["pass"] * 4


def test_cases_that_params_do_not_fit_are_skipped_and_say_why(few_cases):
    report = Decay().verify({"num_q_heads": 12}, dtypes=FP32, slopes=torch.rand(12))
    assert report.ok
    assert [r.status for r in report.rows] == ["pass", "pass", "pass", "skip"]
    assert all(r.dims.num_q_heads == 12 for r in report.rows[:3])
    assert "num_q_heads=4" in report.rows[3].note
    assert "1 do not fit the params" in str(report)


def test_a_pointwise_normaliser_has_no_lse_to_compare(few_cases):
    assert fa.Sigmoid().verify(dtypes=FP32).ok


def test_params_that_fit_nothing_are_the_callers_error():
    with pytest.raises(ParamError, match="slopes"):
        Decay().verify(dtypes=FP32)
    with pytest.raises(InputError, match="num_q_heads=4"):
        Decay().verify({"num_q_heads": 4}, dtypes=FP32, slopes=torch.rand(5))
    with pytest.raises(ParamError, match="colour"):
        fa.Causal().verify(dtypes=FP32, colour=1)


def test_a_hook_in_cpp_needs_a_reference():
    with pytest.raises(VariantError, match="reference"):
        fa.variant(score_mod=fa.cpp("return score * 2.0f;")).verify(dtypes=FP32)


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="float64"):
        fa.Causal().verify(dtypes=(torch.float64,))


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        (torch.float32, r"sequence of dtypes, got torch\.float32; pass .*\(torch\.float32,\)"),
        ("float32", "sequence of dtypes, got str"),
        (b"float32", "sequence of dtypes, got bytes"),
        (3, "sequence of dtypes, got int"),
        ({torch.float32}, "sequence of dtypes, got set"),
        ([], "dtypes is empty"),
        ((), "dtypes is empty"),
        (("float32",), "got 'float32'"),
        (([torch.float32],), "got <list>"),
        ((None,), "got None"),
    ],
)
def test_dtypes_that_are_no_sequence_of_dtypes_are_refused(dtypes, words):
    with pytest.raises(InputError, match=words):
        fa.Causal().verify(dtypes=dtypes)


@pytest.mark.parametrize("seed", [True, None, "3", 1.0, torch.tensor(3), 2**64, -(2**63) - 1])
def test_a_seed_that_is_no_int_is_refused(seed):
    with pytest.raises(InputError, match="seed"):
        fa.Causal().verify(dtypes=FP32, seed=seed)


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), 2**64 - 1, -1])
def test_a_seed_may_be_any_int_of_64_bits(few_cases, seed):
    report = fa.Causal().verify(dtypes=FP32, seed=seed)
    assert report.ok
    assert type(report.seed) is int and report.seed == int(seed)


@pytest.mark.parametrize("dims", ["12", b"12", bytearray(b"12"), memoryview(b"12")])
def test_text_is_no_dims(dims):
    with pytest.raises(InputError, match=f"got {type(dims).__name__}"):
        fa.Causal().verify(dims, dtypes=FP32)


def test_where_no_case_ran_nothing_is_said_of_the_kernel(monkeypatch):
    def one(base, tile_q, tile_kv):
        yield Case("group size 4", base._replace(num_q_heads=4, num_kv_heads=1), group=True)

    monkeypatch.setattr(verification, "cases", one)
    monkeypatch.setattr(verification, "extra_kernels", lambda base, tile_q, tile_kv: iter(()))
    with pytest.raises(VerificationError) as info:
        Decay().verify({"num_q_heads": 12}, dtypes=FP32, slopes=torch.rand(12))
    headline = str(info.value).splitlines()[0]
    assert headline.startswith("no case ran") and "params fit none" in headline
    assert "disagrees" not in str(info.value)
    assert [r.status for r in info.value.report.rows] == ["skip"]


def test_a_kernel_that_raises_is_a_failure_not_a_skip(few_cases, monkeypatch):
    def broken(*args, **kwargs):
        raise FlashAttnJitError("the launch failed\nand more")

    monkeypatch.setattr("flashattn_jit.inspect.verification.run.attention", broken)
    report = fa.Causal().verify(dtypes=FP32, raise_on_failure=False)
    assert not report.ok
    assert report.failures[0].note == "FlashAttnJitError: the launch failed"


def test_threads_are_as_before(few_cases, monkeypatch):
    monkeypatch.setattr(
        verification, "cases", lambda base, q, kv: iter([Case("threads", base, threads=3)])
    )
    before = torch.get_num_threads()
    assert fa.Causal().verify(dtypes=FP32).ok
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("cpu:generic", ("float32", "bfloat16", "float16")),
        ("emulated:sm_80", ("bfloat16", "float16")),
        ("emulated:sm_75", ("float16",)),
    ],
)
def test_dtypes_are_by_default_those_that_the_target_takes(target, dtypes):
    assert verification._dtypes_of(target) == tuple(getattr(torch, d) for d in dtypes)


@needs_nvcc
def test_cuda_kernels_are_verified_in_the_emulator(monkeypatch):
    few = [
        Case("ragged", Dims(1, 2, 1, 71, 67, 32, 32)),
        Case("decode", Dims(1, 2, 1, 1, 99, 32, 32)),
    ]
    monkeypatch.setattr(verification, "cases", lambda base, *tile: iter(few))
    monkeypatch.setattr(verification, "extra_kernels", lambda base, *tile: iter(()))
    report = fa.Causal().verify({"head_dim": 32}, target="emulated:sm_75")
    assert report.ok and {r.dtype for r in report.rows} == {"float16"}
    assert {r.tile_kind for r in report.rows} == {"prefill", "few_row"}


# --- approximate functions ------------------------------------------------------------------------

TARGETS = ["cpu:generic", pytest.param("emulated:sm_80", marks=needs_nvcc)]


def one_dtype(target: str) -> list[torch.dtype]:
    """By turns, one of the dtypes that a target takes: each has kernels of its own."""
    return rotation.turn(0, verification._dtypes_of(target))


@pytest.fixture
def approximations(monkeypatch):
    """Cases of few and many rows, of large scores and of masked pairs."""
    few = [
        Case("prefill", Dims(1, 2, 1, 71, 67, 32, 32)),
        Case("decode", Dims(1, 2, 1, 1, 99, 32, 32), offset="end"),
        Case("extreme", Dims(1, 2, 1, 40, 67, 32, 32), extreme=True),
        Case("masked", Dims(1, 2, 1, 40, 67, 32, 32), masked=True),
    ]
    monkeypatch.setattr(verification, "cases", lambda base, *tile: iter(few))
    monkeypatch.setattr(verification, "extra_kernels", lambda base, *tile: iter(()))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cap", [50.0, 1.0])
def test_the_error_of_an_approximate_function_is_allowed(approximations, target, cap):
    variant = fa.SoftCap(cap, approximate=True)
    report = variant.verify({"head_dim": 32}, target=target, dtypes=one_dtype(target))
    assert report.ok and {r.status for r in report.rows} == {"pass"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("exponent", rotation.turn(0, [8, 9]))
def test_a_larger_error_than_that_of_an_approximate_function_fails(
    approximations, target, exponent
):
    text = f"return 2.0f * math::tanh(score / 2.0f) * {1 + 2.0**-exponent}f;"
    wrong = fa.variant(
        score_mod=fa.cpp(text, reference=lambda s, b, h, q, k: 2.0 * fa.tanh_approx(s / 2.0))
    )
    report = wrong.verify(
        {"head_dim": 32}, target=target, dtypes=one_dtype(target), raise_on_failure=False
    )
    assert {r.case for r in report.failures} >= {"prefill", "decode", "masked"}
    assert all(r.status == "FAIL" for r in report.rows if r.case != "extreme")


@pytest.mark.parametrize("target", TARGETS)
def test_an_error_of_the_exact_function_is_not_allowed(approximations, target):
    """The approximate kernel does not pass for a variant that asks for the exact function."""
    text = "return 2.0f * math::tanh_approx(score / 2.0f);"
    wrong = fa.variant(
        score_mod=fa.cpp(text, reference=lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0))
    )
    dtypes = (torch.float32 if target.startswith("cpu") else torch.float16,)
    options = {"target": target, "dtypes": dtypes, "raise_on_failure": False}
    assert wrong.verify({"head_dim": 32}, **options).failures


def test_approximate_functions_in_rows_and_masks_are_allowed_for(approximations):
    variant = fa.variant(
        query_mod=lambda row, b, h, q: fa.tanh_approx(row) * 3,
        output_mod=lambda row, lse, b, h, q: fa.tanh_approx(row) + fa.tanh_approx(lse),
        mask_mod=lambda b, h, q, k: fa.tanh_approx((k - q) / 40.0) < 0.7311,
        normalizer=fa.Pointwise(lambda s: fa.tanh_approx(s) + 1),
    )
    assert variant.verify({"head_dim": 32}, dtypes=FP32).ok


def test_the_effect_of_an_approximation_is_that_of_its_error():
    """The scores of one key are their own lse: it moves by the error, by no more and no less."""
    q, k = (torch.full((1, 1, 1, 4), x) for x in (1.0, 2.0))
    exact = [fa.SoftCap(5.0, approximate=True).reference(q, k, k, return_lse=True)[1]]

    def lse(errors):
        _, moved = attention_reference(q, k, k, fa.SoftCap(5.0, approximate=True), errors=errors)
        return [moved]

    (moved,) = error.effect_of_errors(exact, lse)
    torch.testing.assert_close(moved, exact[0] * 2.0**-11, rtol=1e-3, atol=0.0)
    (moved,) = error.effect_of_errors(
        exact, lambda errors: [attention_reference(q, k, k, fa.SoftCap(5.0), errors=errors)[1]]
    )
    assert moved.item() < 1e-6
