"""Variants that change output rows after the weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.builtins import q_len, q_row
from flashattn_jit.variants.variant import Variant, tensor


class PackedGatedOutput(Variant):
    """``o * sigmoid(gate[row, h])`` with row the row of the packed q; see `GatedOutput`.

    gate: float tensor ``[num_q_tokens, num_q_heads, head_dim_v]``.
    """

    gate: Tensor = tensor("num_q_tokens", "num_q_heads", "head_dim_v")

    def output_mod(self, row: Tensor, lse: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The gated row."""
        return row * torch.sigmoid(self.gate[q_row(b, q_idx), h])


class DenseGatedOutput(Variant):
    """``o * sigmoid(gate[b, h, row])`` with row the row of q in its request; see `GatedOutput`.

    gate: float tensor ``[batch, num_q_heads, q_len, head_dim_v]``.
    """

    gate: Tensor = tensor("batch", "num_q_heads", "q_len", "head_dim_v")

    def output_mod(self, row: Tensor, lse: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The gated row."""
        return row * torch.sigmoid(self.gate[b, h, q_row(b, q_idx) - b * q_len(b)])


class HeadGatedOutput(PackedGatedOutput):
    """``o * sigmoid(gate[row, h])``, one gate for a head; see `GatedOutput`.

    gate: float tensor ``[num_q_tokens, num_q_heads]``.
    """

    gate: Tensor = tensor("num_q_tokens", "num_q_heads")


def GatedOutput(layout: str = "dense") -> Variant:
    """``o * sigmoid(gate)``: the output gated by a projection of the token, param ``gate``.

    layout "dense": gate is laid out as the output of a dense call, ``[batch, num_q_heads, q_len,
    head_dim_v]``. "packed": as that of a varlen or batch call, ``[num_q_tokens, num_q_heads,
    head_dim_v]``. "head": one gate for each token and head, ``[num_q_tokens, num_q_heads]``.
    Raises `VariantError` for another layout.
    Qwen 3-Next and 3.5, AFMoE, Step 3 (elementwise or by head). Qiu et al. 2025, "Gated Attention
    for Large Language Models".
    """
    layouts = {"dense": DenseGatedOutput, "packed": PackedGatedOutput, "head": HeadGatedOutput}
    if layout not in layouts:
        raise VariantError(f"GatedOutput's layout is 'dense', 'packed' or 'head', got {layout!r}")
    return layouts[layout]()
