"""plan() and run() of a batch over pages as one call."""

from __future__ import annotations

from typing import Any

import torch

import flashattn_jit as fa


def paged_batch(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, variant: Any = None,
    target: str | None = None,
) -> fa.BatchAttention:  # fmt: skip
    """A BatchAttention for tensors like these."""
    return fa.BatchAttention(
        variant, num_q_heads=q.shape[1], num_kv_heads=k_pages.shape[2], head_dim=q.shape[2],
        head_dim_v=v_pages.shape[3], q_dtype=q.dtype, kv_dtype=k_pages.dtype, device=q.device,
        target=target,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: fa.Paged,
    variant: Any = None,
    *,
    target: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); lse is None unless asked for."""
    batch = paged_batch(q, k_pages, v_pages, variant, target)
    batch.plan(q_indptr, paged)
    result = batch.run(q, k_pages, v_pages, return_lse=return_lse, **options)
    return (result, None) if isinstance(result, torch.Tensor) else result
