"""A batch of decodes and prompts, and a variant whose mask and score have params."""

from __future__ import annotations

from typing import Any

import torch

import flashattn_jit as fa
from tests.batch.batches import Batch

MIXED = ((1, 20, 0, 3, 1), (70, 40, 5, 33, 1))


def made_for(b: Batch, variant: Any, target: str = "cpu", **options: Any) -> fa.BatchAttention:
    where = None if target == "cpu" else target
    return fa.BatchAttention(variant, **{**b.options(), **options}, target=where)


def mixed(target: str = "cpu", page_size: int = 0, dim: int = 64, **options: Any) -> Batch:
    dtype = torch.float32 if target == "cpu" else torch.bfloat16
    return Batch(*MIXED, (4, 2), dim, dtype, page_size, **options)


class Windowed(fa.Variant):
    """A mask with two params, a score with two others."""

    width: torch.Tensor = fa.tensor("batch")
    extra: int = fa.scalar(0)
    slopes: torch.Tensor = fa.tensor("num_q_heads")
    gain: float = fa.scalar(1.0)

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.gain * score + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < self.width[b] + self.extra) & (kv_idx <= q_idx)


WIDTH, SLOPES = torch.tensor([9, 30, 2, 12, 4]), torch.linspace(0.1, 0.7, 4)
