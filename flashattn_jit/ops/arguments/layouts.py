"""Layouts of results: dtypes and strides, which follow from those of q."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Strides = tuple[int, ...]


def result_dtype(q_dtype: torch.dtype, partial: bool) -> torch.dtype:
    """q's dtype; partial states are fp32."""
    return torch.float32 if partial else q_dtype


def like_q_strides(q: torch.Tensor, head_dim_v: int) -> Strides:
    """Strides of a dense output in q's stride order, last dim contiguous, without gaps."""
    return in_order_of(q.shape, q.stride(), head_dim_v)


def in_order_of(shape: Sequence[int], strides: Sequence[int], head_dim_v: int) -> Strides:
    """Strides without gaps of a result of this `shape` of q, in the order of these strides."""
    order = sorted(range(3), key=lambda d: (strides[d], -d))
    out, reach = [0, 0, 0, 1], max(1, head_dim_v)
    for d in order:
        out[d] = reach
        reach *= max(1, shape[d])
    return tuple(out)


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of a contiguous tensor."""
    out, reach = [], 1
    for size in reversed(shape):
        out.append(reach)
        reach *= max(1, size)
    return tuple(reversed(out))


def filled(lse: torch.Tensor | None, like: Any) -> torch.Tensor:
    """An op's lse: empty, on the device of `like`, where there is none."""
    return like.new_empty(0, dtype=torch.float32) if lse is None else lse
