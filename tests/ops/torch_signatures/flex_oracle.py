"""FlexAttention's own unfused implementation as an oracle, and its BlockMasks read literally."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.flex_attention import flex_attention as math_attention
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

Mod = Callable[..., torch.Tensor]


class Expected(NamedTuple):
    """out [B, Hq, Sq, Dv], lse and max_scores [B, Hq, Sq], in fp64 unless asked otherwise."""

    out: torch.Tensor
    lse: torch.Tensor
    max_scores: torch.Tensor


def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values, made in fp32 and converted."""
    return torch.randn(*sizes).to(dtype)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it FlexAttention runs its mods eagerly."""
    before = torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _identity(score: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    return score


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Expected:
    """What FlexAttention computes in `dtype`, with mask_mod on every pair."""
    empty = torch_flex._create_empty_block_mask(q, k).as_tuple()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.no_grad():
        out, lse, top = math_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), score_mod or _identity,
            (*empty[:-1], mask_mod or torch_flex.noop_mask), scale, {},
        )  # fmt: skip
    # The implementation reports base-2 units.
    return Expected(out, lse * math.log(2), top * math.log(2))


def literal_mask(mask: BlockMask, batch: int, num_q_heads: int, q_len: int, kv_len: int) -> Mod:
    """The pairs that a BlockMask visits, as a dense mask_mod: its lists decide, then its mask_mod.

    This is what compiled FlexAttention does, and its unfused implementation does not.
    """
    q_block, kv_block = mask.BLOCK_SIZE
    full = torch.zeros(batch, num_q_heads, q_len, kv_len, dtype=torch.bool)
    partial = full.clone()
    parts = [(mask.kv_num_blocks, mask.kv_indices, partial)]
    if mask.full_kv_num_blocks is not None:
        parts.append((mask.full_kv_num_blocks, mask.full_kv_indices, full))
    for counts, indices, into in parts:
        counts = counts.expand(batch, num_q_heads, -1)
        indices = indices.expand(batch, num_q_heads, -1, -1)
        for b in range(batch):
            for h in range(num_q_heads):
                for i in range(-(-q_len // q_block)):
                    for j in indices[b, h, i, : counts[b, h, i]].tolist():
                        rows = slice(i * q_block, (i + 1) * q_block)
                        into[b, h, rows, j * kv_block : (j + 1) * kv_block] = True
    seen = torch_flex.create_mask(mask.mask_mod, batch, num_q_heads, q_len, kv_len, device="cpu")
    keep = full | (partial & seen)
    return lambda b, h, i, j: keep[b, h, i, j]


def assert_close(
    actual: torch.Tensor, gold: torch.Tensor, reference: torch.Tensor, what: str = "out"
) -> None:
    """The error against `gold` is at most 1.5 (fp32: 4) times `reference`'s, plus half an ulp.

    `reference` is torch's result in the dtype under test; errors are root mean squares.
    """
    assert actual.shape == gold.shape, f"{what}: {tuple(actual.shape)} is not {tuple(gold.shape)}"
    finite = torch.isfinite(gold)
    assert torch.equal(actual.double()[~finite], gold.double()[~finite]), f"{what}: infinities"
    actual, gold, reference = (x.double()[finite] for x in (actual, gold, reference))
    if not actual.numel():
        return
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    size = gold.square().mean().sqrt().item()
    error = (actual - gold).square().mean().sqrt().item()
    allowed = (reference - gold).square().mean().sqrt().item()
    dtype = torch.bfloat16 if allowed > 1e-4 * size else torch.float32
    factor, ulp = (1.5, 2.0**-9) if dtype == torch.bfloat16 else (4.0, 2.0**-22)
    limit = factor * allowed + ulp * size
    assert error <= limit, f"{what}: error {error:.2e}, allowed {limit:.2e}"


def check_against_oracle(
    actual: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
    lse: torch.Tensor | None = None,
    max_scores: torch.Tensor | None = None,
) -> None:
    """`actual` and, where given, lse and max_scores are what FlexAttention computes."""
    gold = oracle(q, k, v, score_mod, mask_mod, scale)
    same = oracle(q, k, v, score_mod, mask_mod, scale, q.dtype)
    assert actual.dtype == q.dtype
    assert_close(actual, gold.out, same.out)
    if lse is not None:
        torch.testing.assert_close(lse.double(), gold.lse, rtol=1e-5, atol=2e-5)
    if max_scores is not None:
        torch.testing.assert_close(max_scores.double(), gold.max_scores, rtol=1e-5, atol=2e-5)
