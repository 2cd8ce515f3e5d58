"""The mods of the GPU benchmark, which FlexAttention and this package run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Any]


def alibi(slopes: Tensor) -> Mod:
    """ALiBi with slopes [heads]."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def softcap(cap: float) -> Mod:
    """cap * tanh(score / cap)."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return score_mod


def window(width: int) -> Mod:
    """A causal window of `width` keys, the query's own included."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < width)

    return mask_mod


def document(ids: Tensor) -> Mod:
    """Causal inside documents; ids [length]: the document of each position."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return mask_mod
