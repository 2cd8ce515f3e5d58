"""Normalisers other than the plain softmax: sinks, sigmoid, squared ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.variants.builtins import kv_len
from flashattn_jit.variants.params import Pointwise, Softmax
from flashattn_jit.variants.variant import Variant, tensor


class Sink(Variant):
    """A learned sink joins the denominator: ``w_ij = e^s_ij / (sum_j e^s_ij + e^sink[h])``.

    sink: float tensor ``[num_q_heads]``. lse includes it; a row without keys gives 0 and lse
    ``sink[h]``.
    gpt-oss (`sinks`, `s_aux`), MiMo-V2-Flash, Granite with windows. Agarwal et al. 2025, gpt-oss;
    Xiao et al. 2023.
    """

    sink: Tensor = tensor("num_q_heads")
    normalizer = Softmax(sink="sink")


class SoftmaxOffByOne(Variant):
    """``w_ij = e^s_ij / (1 + sum_j e^s_ij)``: a sink of 0, so that a row may attend to nothing.

    Miller 2023, "Attention Is Off By One"; `add_zero_attn` of torch's MultiheadAttention.
    """

    normalizer = Softmax(sink=0.0)


class Sigmoid(Variant):
    """``o_i = sum_j sigmoid(s_ij + bias) v_j``, with ``bias = -ln n`` for n keys by default.

    bias: runtime float, given when the variant is made; None is ``-ln kv_len`` of each request.
    The bias is added after the score mods to its left: compose Sigmoid last. Partial states merge
    where the bias is given; -ln n is that of their own keys.
    Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention".
    """

    bias: float | None = None
    normalizer = Pointwise(torch.sigmoid)

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """``s + bias``."""
        if self.bias is not None:
            return score + self.bias
        return score - torch.log(kv_len(b))


def _relu_squared(score: Tensor) -> Tensor:
    positive = torch.relu(score)
    return positive * positive


def _one_over_kv_len(b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
    # At least 1: a request without keys has sums of 0, and 0 * inf is NaN.
    return 1.0 / torch.clamp(kv_len(b), min=1)


class ReluSquared(Variant):
    """``o_i = sum_j relu(s_ij) ** 2 v_j / n`` for n keys, kv_len of the request.

    GAU of FLASH (Hua et al. 2022, "Transformer Quality in Linear Time"), Primer's activation, ViTs
    with ReLU attention (Wortsman et al. 2023). Partial states are divided by the n of their own
    call, so they do not merge into that of all keys.
    """

    normalizer = Pointwise(_relu_squared, scale=_one_over_kv_len)
