"""Small right arguments: the tests of errors change one of them at a time."""

from __future__ import annotations

from typing import Any

import torch

import flashattn_jit as fa

q = torch.randn(1, 2, 8, 16)
packed = torch.randn(8, 2, 16)
indptr = torch.tensor([0, 8])
lse = torch.randn(1, 2, 8)


def pages() -> torch.Tensor:
    """A cache of 4 pages of 2 slots."""
    return torch.zeros(4, 2, 2, 16)


def paged(**changed: Any) -> fa.Paged:
    """The page table of one request with 8 keys."""
    fields = {
        "page_indptr": torch.tensor([0, 4]),
        "page_indices": torch.arange(4, dtype=torch.int32),
        "last_page_len": torch.tensor([2]),
        "page_size": 2,
    }
    return fa.Paged(**{**fields, **changed})


def batch(kind: type = fa.BatchAttention, **changed: Any) -> Any:
    """A BatchAttention, or CascadeAttention, for these tensors."""
    options = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 16, "q_dtype": torch.float32}
    return kind(**{**options, **changed})
