"""Queries scaled by position, for contexts longer than trained for."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.variants.library.limits import limited
from flashattn_jit.variants.variant import Variant, scalar


class TemperatureTuning(Variant):
    """``q * (1 + attn_scale * ln(1 + max(0, floor((i + shift) / floor_scale))))``: negative
    positions are not scaled.

    attn_scale, floor_scale (above 0): runtime floats. shift: runtime int, 1 in Llama 4, 0 in
    Ministral 3 and Mistral Large 3.
    Llama 4 (0.1, 8192, on layers without RoPE), Ministral 3, Mistral 4. Meta 2025, Llama 4;
    Nakanishi 2025, "Scalable-Softmax".
    """

    attn_scale: float = scalar(0.1)
    floor_scale: float = limited(
        0, "to scale no queries, leave fa.TemperatureTuning out", 8192.0, above=True
    )
    shift: int = scalar(1)

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The formula of the class."""
        steps = torch.floor((q_idx + self.shift) / self.floor_scale)
        return row * (torch.log1p(torch.clamp(steps, min=0.0)) * self.attn_scale + 1.0)


class LogN(Variant):
    """``q * max(1, ln(max(i, 0) + 1) / ln(train_len))``: negative positions are not scaled.

    train_len: runtime int, the length trained with, at least 2.
    Qwen 1 (`use_logn_attn`). Su 2021, "Attention's scale from the invariance of entropy"; Chiang
    and Cholak 2022.
    """

    train_len: int = limited(2, "to scale no queries, leave fa.LogN out")

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The formula of the class."""
        trained = torch.log(torch.tensor(self.train_len, device="cpu"))
        reached = torch.log(torch.clamp(q_idx, min=0) + 1.0)
        return row * torch.clamp(reached / trained, min=1.0)
