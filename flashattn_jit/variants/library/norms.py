"""Norms of queries and keys per head, before or after their rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.variant import Dims, Variant, scalar, tensor


def _ones(dims: Dims) -> Tensor:
    return torch.ones(dims.head_dim, device=dims.device)


class QKRmsNorm(Variant):
    """``x * rsqrt(mean(x ** 2) + eps) * weight`` for the rows of q and k; see `QKNorm`.

    q_weight, k_weight: float tensors ``[head_dim]``, default ones. eps: runtime float.
    """

    q_weight: Tensor = tensor("head_dim", default=_ones)
    k_weight: Tensor = tensor("head_dim", default=_ones)
    eps: float = scalar(1e-6)

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The normed query row."""
        return row * torch.rsqrt((row * row).mean() + self.eps) * self.q_weight

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The normed key row."""
        return row * torch.rsqrt((row * row).mean() + self.eps) * self.k_weight


class QKL2Norm(Variant):
    """``x / max(sqrt(sum(x ** 2)), eps)`` for the rows of q and k; see `QKNorm`.

    eps: runtime float.
    """

    eps: float = scalar(1e-12)

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The normed query row."""
        return row / torch.clamp(torch.sqrt((row * row).sum()), min=self.eps)

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The normed key row."""
        return row / torch.clamp(torch.sqrt((row * row).sum()), min=self.eps)


def QKNorm(kind: str = "rms", eps: float | None = None) -> Variant:
    """Every row of q and k normed on its own.

    kind "rms": ``x * rsqrt(mean(x ** 2) + eps) * weight``, eps 1e-6 by default; params ``q_weight``
    and ``k_weight``, float ``[head_dim]``, default ones (Gemma stores weight - 1: pass 1 + weight).
    kind "l2": ``x / max(|x|, eps)``, eps 1e-12. Compose to the left of `RoPE` where the model norms
    first: ``fa.QKNorm() & fa.RoPE()``. Raises `VariantError` for another kind.
    RMS: Qwen 3, Gemma 3, OLMoE, Llama 4 (after RoPE, no weights). L2: SwinV2, ViT-22B's relatives,
    nGPT. Henry et al. 2020, "Query-Key Normalization for Transformers".
    """
    if kind == "rms":
        return QKRmsNorm() if eps is None else QKRmsNorm(eps=eps)
    if kind == "l2":
        return QKL2Norm() if eps is None else QKL2Norm(eps=eps)
    raise VariantError(f"QKNorm's kind is 'rms' or 'l2', got {kind!r}")
