"""A small batch, and the check that a refused plan changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa

OPTIONS: dict[str, Any] = {
    "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "q_dtype": torch.float32,
}  # fmt: skip
Q_INDPTR = torch.tensor([0, 1, 4, 4, 6])
KV_INDPTR = torch.tensor([0, 10, 14, 14, 40])
PAGED = fa.Paged(
    torch.tensor([0, 3, 4, 4, 11]), torch.arange(11, dtype=torch.int32),
    torch.tensor([2, 4, 0, 2]), 4,
)  # fmt: skip
LIMITS = fa.Limits(max_requests=4, max_q_tokens=8, max_kv_len=30, max_pages=16)


def batch(variant: Any = None, **options: Any) -> fa.BatchAttention:
    return fa.BatchAttention(variant, **{**OPTIONS, **options})


def packed(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(6, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def pages() -> tuple[torch.Tensor, ...]:
    return torch.randn(6, 4, 16), torch.randn(11, 4, 2, 16), torch.randn(11, 4, 2, 16)


def refused(error: type[Exception], text: str, made: fa.BatchAttention, *a: Any, **k: Any) -> None:
    """plan() with the arguments raises, and the plan before it still runs to the same bits."""
    made.plan(Q_INDPTR, fa.Ragged(KV_INDPTR))
    inputs = packed()
    before = made.run(*inputs)
    with pytest.raises(error, match=text):
        made.plan(*a, **k)
    assert torch.equal(made.run(*inputs), before)
