"""Scores far from 0 on CUDA: those of hidden keys, such as -1e9, may be all that a row sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.harness import rotation

KV_LEN = 391
LEAST = torch.finfo(torch.float32).min
SLOPES = torch.tensor([0.25, -0.5])

# By name, the score_mod for a value. Sums with large values are ties, or else are exact in fp32.
HOOKS: dict[str, Callable[[float], Callable[..., Any]]] = {
    "every key of some rows": lambda c: lambda s, b, h, i, j: torch.where(i % 3 == 0, c, s),
    "the first tiles": lambda c: lambda s, b, h, i, j: torch.where(j < 230, c, s),
    "the last tiles": lambda c: lambda s, b, h, i, j: torch.where(j > 70, c, s),
    "every other key": lambda c: lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, c, s),
    "a sum of ties": lambda c: lambda s, b, h, i, j: s * 0 + torch.where(i % 3 == 0, c, 0.0),
    "beside a line": lambda c: (
        lambda s, b, h, i, j: (
            torch.where(j < 230, c, s * 0) + torch.where(j < 230, 0.0, SLOPES[h] * (j - i))
        )
    ),
    "a far line": lambda c: lambda s, b, h, i, j: s * 0 + 64.0 * (j - i) + round(c / 4096) * 4096,
}
VALUES = (-1e4, -(2.0**20), -1e9, -1e10, -1e20, -1e30, LEAST, 1e6, 1e10, 1e30)
LINES = (-(2.0**20), -(2.0**24), 2.0**24)
"""What a multiple of 64 can be added to exactly."""
CASES = [
    (hook, value, dtype, q_len)
    for hook in HOOKS
    for value in (LINES if hook == "a far line" else VALUES)
    for dtype in (torch.bfloat16, torch.float16)
    for q_len in (3, 70)
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("hook", "value", "dtype", "q_len"), rotation.some(CASES, 8))
def test_rows_of_large_scores(hook: str, value: float, dtype: torch.dtype, q_len: int) -> None:
    """Ties weigh the same, as in torch, whatever their value is, with a mask and without."""
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, KV_LEN, KV_LEN))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    score_mod = HOOKS[hook](value)
    for mask_mod in (None, lambda b, h, i, j: j > i):
        variant = fa.variant(score_mod=score_mod, mask_mod=mask_mod)
        out, lse = fa.attention(q, k, v, variant, target="emulated:sm_80", return_lse=True)
        expected, wanted = variant.reference(q.double(), k.double(), v.double(), return_lse=True)
        torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
        wanted = wanted.clamp(-(2.0**127) * math.log(2), 2.0**127 * math.log(2))
        torch.testing.assert_close(lse.double(), wanted.double(), atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [-1e9, -1e20, LEAST])
def test_splits_of_large_scores(value: float, dtype: torch.dtype) -> None:
    """Splits of hidden keys have no weight beside those of others."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(dtype) for n in (1, 1500, 1500))
    variant = fa.variant(score_mod=lambda s, b, h, i, j: torch.where(j < 1100, value, s))
    out = fa.attention(q, k, v, variant, target="emulated:sm_80")
    expected = variant.reference(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("value", [-(2.0**70), -(2.0**100), LEAST])
def test_the_reference_weighs_ties_equally(value: float) -> None:
    """Weights add up to 1, also where lse cannot hold the log of their number."""
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16).double()
    variant = fa.variant(score_mod=lambda s, b, h, i, j: s * 0 + value)
    out = variant.reference(q, k, k)
    torch.testing.assert_close(out, k.mean(2, keepdim=True).expand_as(out))
    with_sink = variant & fa.Sink(torch.full((2,), value))
    torch.testing.assert_close(with_sink.reference(q, k, k), out * 0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [(2.0**24, 2.0**24 + 2), (-2e38, -1.5e38)])
def test_warps_whose_bases_differ_little(values: tuple[float, float], dtype: torch.dtype) -> None:
    """The warps of a few-row kernel merge their states by the scores, not by rounded products."""
    q, k, v = (torch.zeros(1, 1, n, 64, dtype=dtype) for n in (3, 64, 64))
    v[:, :, :48] = 1
    variant = fa.variant(score_mod=lambda s, b, h, i, j: torch.where(j < 48, *values))
    out = fa.attention(q, k, v, variant, target="emulated:sm_80")
    expected = variant.reference(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def test_the_gradient_of_a_sink_far_above_the_scores_is_finite() -> None:
    sink = torch.full((1,), 2000.0, requires_grad=True)
    q = torch.randn(1, 1, 3, 8, dtype=torch.double)
    fa.Sink(sink).reference(q, q, q).sum().backward()
    assert sink.grad is not None and sink.grad.isfinite().all()
