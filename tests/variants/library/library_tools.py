"""Weights and masks of library variants, read off the eager reference, never from hooks."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flashattn_jit.variants.reference import attention_reference
from flashattn_jit.variants.variant import Bound, Dims, Variant

Offset = int | Literal["end"]


def bound(
    variant: Variant, batch: int = 1, num_q_heads: int = 2, num_kv_heads: int = 1,
    q_len: int = 16, kv_len: int = 16, head_dim: int = 16, head_dim_v: int = 16, **params: Any,
) -> Bound:  # fmt: skip
    """The variant traced and bound for a call of these dims."""
    dims = Dims(batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v)
    return variant.bind(dims, params)


def weights(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, q_offset: Offset = 0,
    scale: float | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """The weights [B, Hq, Sq, Skv] in float64: the output for v = the identity. Also binds."""
    batch, num_q_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[1:3]
    dims = Dims(batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, max(kv_len, 1))
    variant.bind(dims, params)
    eye = torch.eye(kv_len, dtype=torch.float64).expand(batch, num_kv_heads, -1, -1)
    out, _ = attention_reference(q, k, eye, variant, scale=scale, q_offset=q_offset, params=params)
    return out


def kept_pairs(
    variant: Variant, q_len: int, kv_len: int, q_offset: int = 0, batch: int = 1,
    num_q_heads: int = 2, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """The pairs that the mask keeps: bool [B, Hq, Sq, Skv], where equal scores give weight."""
    q, k = torch.zeros(batch, num_q_heads, q_len, 1), torch.zeros(batch, 1, kv_len, 1)
    return weights(variant, q, k, q_offset, **params) > 0


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Weights of float64 scores; a row of -inf gives zeros."""
    return torch.softmax(scores, -1).nan_to_num(0.0)


def normal(seed: int, *sizes: int) -> torch.Tensor:
    """Random float64 values, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)
