"""Weights far below the largest of their row: no denormal numbers, and exact where they count."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference
from tests.ops.cases import HOST_TARGETS

DTYPES = (torch.float32, torch.bfloat16)


def inputs(q_len: int, kv_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 2, q_len, 64).to(dtype)
    k, v = (torch.randn(1, 2, kv_len, 64).to(dtype) for _ in "kv")
    return q, k, v


def check(mod: object, target: str, dtype: torch.dtype, q_len: int, kv_len: int) -> None:
    q, k, v = inputs(q_len, kv_len, dtype)
    out, lse = fa.attention(q, k, v, mod, target=target, return_lse=True)
    expected, expected_lse = attention_reference(q.double(), k.double(), v.double(), mod)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("slope", [0.05, 0.5, 3.0])
def test_scores_that_fall_off_on_both_sides(target: str, dtype: torch.dtype, slope: float) -> None:
    near = fa.variant(score_mod=lambda s, b, h, i, j: s - slope * (i * 5 - j).abs())
    for q_len in (3, 150):
        check(near, target, dtype, q_len, 700)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("step", [0.01, 0.03, 0.2, 2.0, -0.2])
def test_scores_that_rise_with_the_keys(target: str, dtype: torch.dtype, step: float) -> None:
    # Largest scores that rise slowly leave the base of a row where it was; fast ones move it.
    top = 1099 if step > 0 else 0  # the largest scores are near 0, where fp32 is exact enough
    rising = fa.variant(score_mod=lambda s, b, h, i, j: s / 8 + step * (j - top))
    for q_len in (3, 150):
        check(rising, target, dtype, q_len, 1100)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_a_late_key_that_gets_nearly_all_weight(target: str, dtype: torch.dtype) -> None:
    # bf16 holds the largest weight of a row exactly, so that its value is the output.
    late = fa.variant(score_mod=lambda s, b, h, i, j: torch.where(j == 600, 9.0, s * 0))
    q, k, v = inputs(150, 700, dtype)
    v[:, :, :600] = 0
    v[:, :, 601:] = 0
    out = fa.attention(q, k, v, late, target=target)
    weight = torch.tensor(9.0).exp() / (torch.tensor(9.0).exp() + 699)
    expected = (v[:, :, 600:601].float() * weight).to(dtype).expand_as(out)
    torch.testing.assert_close(
        out, expected, rtol=2**-8 if dtype != torch.float32 else 1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_denormals_of_the_caller_stay(target: str, dtype: torch.dtype) -> None:
    def keeps_denormals(q: Tensor, k: Tensor, v: Tensor) -> bool:
        fa.attention(q, k, v, target=target)
        return bool((torch.full((1000,), 1e-39) * 0.5 > 0).all())

    for q_len in (3, 150):
        q, k, v = inputs(q_len, 300, dtype)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(keeps_denormals, q, k, v).result()
        assert keeps_denormals(q, k, v)
    # fp32 values that are denormal are kept.
    out = fa.attention(q.float(), k.float(), torch.full_like(v, 2e-39).float(), target=target)
    assert (out > 1e-39).all()
