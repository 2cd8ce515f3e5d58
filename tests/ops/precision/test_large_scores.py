"""Scores up to the largest float: rows whose keys a score_mod hides by `torch.finfo(...).min`."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_jit as fa
from tests.ops.cases import HOST_TARGETS

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("score", [-LARGEST, LARGEST, -2.5e38])
@pytest.mark.parametrize("q_len", [2, 80])  # few-row and prefill kernels
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_a_row_of_equal_scores_is_the_mean_of_the_values(
    target: str, q_len: int, score: float
) -> None:
    variant = fa.variant(score_mod=lambda s, b, h, q_idx, kv_idx: s * 0 + score)
    q = torch.randn(1, 2, q_len, 64)
    k, v = torch.randn(2, 1, 2, 45, 64)
    out, lse = fa.attention(q, k, v, variant, target=target, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, score + math.log(45)))
    out = fa.attention(q, k, v, variant & fa.Sink(torch.ones(2)), target=target)
    kept = v.mean(2, keepdim=True) if score > 0 else torch.zeros(1, 2, 1, 64)
    torch.testing.assert_close(out, kept.expand_as(out), atol=1e-6, rtol=0)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_one_key_that_is_not_hidden_gets_all_weight(target: str, dtype: torch.dtype) -> None:
    variant = fa.variant(
        score_mod=lambda s, b, h, q_idx, kv_idx: torch.where(kv_idx == 7, s, -LARGEST)
    )
    for q_len in (2, 80):
        q = torch.randn(1, 2, q_len, 64).to(dtype)
        k, v = torch.randn(2, 1, 2, 45, 64).to(dtype)
        out = fa.attention(q, k, v, variant, target=target)
        assert torch.equal(out, v[:, :, 7:8].expand_as(out))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("q_len", [2, 97])
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_the_output_of_one_key_is_its_value(target: str, q_len: int) -> None:
    """The fp32 states of bf16 kernels too, whatever the rounding of the only score."""
    variant = fa.SlidingWindow(1)
    q, k, v = torch.randn(3, 1, 2, q_len, 64).bfloat16()
    for scale in (0.125, 0.9, 3.7):
        out, _ = fa.attention(q, k, v, variant, target=target, partial=True, scale=scale)
        torch.testing.assert_close(out, v.float(), atol=0, rtol=2.5e-7)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_a_row_finds_its_largest_score_at_every_key(
    target: str, hook: bool, dtype: torch.dtype
) -> None:
    """The score of key h of head h is 400: weights overflow below a smaller maximum."""
    kv_len = 45
    each = torch.arange(kv_len)
    raised = torch.zeros(kv_len, kv_len)
    raised[each, each] = 400.0
    variant = fa.variant(score_mod=lambda s, b, h, q_idx, kv_idx: s + raised[h, kv_idx])
    q = torch.ones(1, kv_len, 80, 64, dtype=dtype)
    k = torch.zeros(1, kv_len, kv_len, 64, dtype=dtype)
    v = torch.randn(1, kv_len, kv_len, 64).to(dtype)
    if not hook:
        k[0, each, each] = 50.0
    out = fa.attention(q, k, v, variant if hook else None, target=target)
    torch.testing.assert_close(out, v[:, each, each].unsqueeze(2).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_a_hidden_key_of_huge_scores_changes_no_bit(target: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 80, 64).to(dtype) for _ in range(3))
    huge = k.clone()
    huge[:, :, 40] *= 1e8
    outs = [fa.attention(q, x, v, fa.Causal(), target=target)[:, :, :40] for x in (k, huge)]
    assert torch.equal(*outs)
