"""The recipes of docs/guides/cookbook.md as FlexAttention runs them, from the names of a recipe.

Block masks are made ahead. Missing are 05, whose rotations are outside of FlexAttention, and 09: a
sink is applied through lse, which compiled FlexAttention does not return on CPUs (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.parts.measure import Run
from benchmarks.parts.peers import causal, compiled_flex

Names = dict[str, Any]


def _blocks(mask: Callable[..., Tensor], n: Names, heads: int | None = None) -> BlockMask:
    return create_block_mask(mask, None, heads, n["q"].shape[2], n["k"].shape[2], "cpu")


def _flex(n: Names, mask: Callable[..., Tensor] = causal, score: Any = None, **options: Any) -> Run:
    compiled, blocks = compiled_flex(), _blocks(mask, n)
    return lambda: compiled(n["q"], n["k"], n["v"], score, blocks, **options)


def _window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128)


def _soft_cap(n: Names) -> Run:
    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 50.0 * torch.tanh(score / 50.0)

    local, everywhere = _flex(n, _window, cap), _flex(n, causal, cap)
    return lambda: (local(), everywhere())


def _ssmax(n: Names) -> Run:
    sharpness = n["sharpness"]

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * (sharpness[h] * torch.log(q_idx + 1.0))

    return _flex(n, causal, score)


def _selected(n: Names) -> Run:
    chosen, block, group = n["chosen"], n["block"], n["heads"] // n["kv_heads"]

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return chosen[h // group, q_idx, kv_idx // block] & (q_idx >= kv_idx)

    compiled, blocks = compiled_flex(), _blocks(mask, n, n["heads"])
    return lambda: compiled(n["q"], n["k"], n["v"], block_mask=blocks, enable_gqa=True)


def _cosine(n: Names) -> Run:
    compiled, normalize = compiled_flex(), torch.nn.functional.normalize
    return lambda: compiled(
        normalize(n["q"], dim=-1), normalize(n["k"], dim=-1), n["v"], n["by_temperature"], scale=1.0
    )


def _t5(n: Names) -> Run:
    behind = torch.arange(n["tokens"])
    by_distance = n["table"][n["buckets"](behind)].t().contiguous()

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + by_distance[h, (q_idx - kv_idx).clamp(min=0)]

    return _flex(n, causal, score, scale=1.0)


def _tree(n: Names) -> Run:
    drafts, context, bits = len(n["parents"]), n["context"], n["variant"].bits[0, :, 0]

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        token = (kv_idx - context[0]).clamp(min=0, max=drafts - 1)
        return (kv_idx < context[0]) | ((bits[q_idx] >> token) & 1 != 0)

    return _flex(n, mask)


def _differential(n: Names) -> Run:
    compiled, blocks = compiled_flex(), _blocks(causal, n)
    parts = list(zip(n["q"].chunk(2, dim=-1), n["k"].chunk(2, dim=-1), strict=True))

    def joined() -> Tensor:
        first, second = (compiled(q, k, n["v"], block_mask=blocks) for q, k in parts)
        out = first - n["share"] * second
        return torch.nn.functional.rms_norm(out, out.shape[-1:]) * (1 - n["share_init"])

    return joined


def _streaming(n: Names) -> Run:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 4))

    return _flex(n, mask)


FLEX: dict[str, Callable[[Names], Run]] = {
    "01": _soft_cap,
    "02": lambda n: _flex(n, causal, n["forget"]),
    "03": _ssmax,
    "04": _selected,
    "06": _cosine,
    "07": lambda n: _flex(n, n["mask"]),
    "08": _t5,
    "10": _tree,
    "11": _differential,
    "12": _streaming,
}
"""By the number of the recipe."""
