"""Biases added to scores: ALiBi, relative positions, any tensor; and soft-capping."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.torch_modes import remembered
from flashattn_jit.variants.builtins import q_len, q_row
from flashattn_jit.variants.functions import tanh_approx
from flashattn_jit.variants.library.limits import limited
from flashattn_jit.variants.variant import Dims, Variant, scalar, tensor


@remembered(64)
def _slopes(num_q_heads: int, device: torch.device) -> Tensor:
    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    closest = 1 << (num_q_heads.bit_length() - 1)
    slopes = powers(closest) + powers(2 * closest)[0::2][: num_q_heads - closest]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_slopes(num_q_heads: int | Dims, device: torch.device | str | None = None) -> Tensor:
    """ALiBi's slopes: float32 ``[num_q_heads]``.

    For n a power of two ``2 ** (-8 (h + 1) / n)``; otherwise those of the closest power of two
    below, then the odd ones (first, third, ...) of twice that power. num_q_heads may be a call's
    dims, which makes this the default of a param. The tensor is shared: do not write to it.
    Press et al. 2021, "Train Short, Test Long", and its code for other head counts.

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    if isinstance(num_q_heads, int):
        if num_q_heads < 1:
            raise VariantError(f"num_q_heads must be at least 1, got {num_q_heads}")
        return _slopes(num_q_heads, torch.device(device or "cpu"))
    return _slopes(num_q_heads.num_q_heads, torch.device(device or num_q_heads.device))


class ALiBi(Variant):
    """``s + slopes[h] * (j - i)``, or ``s - slopes[h] * |i - j|`` if symmetric.

    slopes: float tensor ``[num_q_heads]``, default `alibi_slopes` (any head count). symmetric:
    compiled in; the two are equal under a causal mask.
    BLOOM, MPT, Falcon-RW, Baichuan 13B (causal); Jina v2 (symmetric). Falcon adds its bias before
    the scale: pass ``slopes * scale``. Press et al. 2021.

    >>> fa.ALiBi() & fa.Causal()
    """

    slopes: Tensor = tensor("num_q_heads", default=alibi_slopes)
    symmetric: bool = scalar(False)

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The formula of the class."""
        behind = kv_idx - q_idx
        return score + self.slopes[h] * (-torch.abs(behind) if self.symmetric else behind)


class SoftCap(Variant):
    """``cap * tanh(s / cap)``: scores bounded to (-cap, cap), before the mask.

    cap: runtime float above 0, 50 by default; there is no number for "no cap": leave the variant
    out. approximate: compiled in; `tanh` becomes `tanh_approx`, whose relative error is at most
    2^-11: a score of 1 is off by up to 0.0005, one near a cap of 50 by up to 0.024. FlashAttention
    2 and 3 compute it so on CUDA.
    Gemma 2 (50), T5Gemma, VaultGemma, Grok 1 (30). Bello et al. 2016; Gemma Team 2024, section 2.

    >>> fa.SoftCap(50.0, approximate=True) & fa.Causal()
    """

    cap: float = limited(0, "without a cap, leave fa.SoftCap out", 50.0, above=True)
    approximate: bool = scalar(False)

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The formula of the class."""
        tanh = tanh_approx if self.approximate else torch.tanh
        return self.cap * tanh(score / self.cap)


class AdditiveBias(Variant):
    """``s + bias[b, h, row, j]``, row being the row of q (`q_idx` less the offset).

    bias: float tensor ``[batch or 1, num_q_heads or 1, q_len, kv_len]``; dims of size 1 are
    broadcast. Dense calls only: rows are those of q ``[B, Hq, Sq, D]``.
    Pair bias of AlphaFold and ESMFold, Graphormer, additive masks of Hugging Face.
    """

    bias: Tensor = tensor("batch|1", "num_q_heads|1", "q_len", "kv_len")

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The formula of the class."""
        row = q_row(b, q_idx) - b * q_len(b)
        return score + self.bias[b, h, row, kv_idx]
