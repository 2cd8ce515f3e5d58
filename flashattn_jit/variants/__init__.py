"""Attention variants: what attention computes, without shapes or devices."""

from flashattn_jit.variants.builtins import kv_len, kv_slot, q_len, q_row
from flashattn_jit.variants.spec import (
    Bound,
    Dims,
    Pointwise,
    Softmax,
    Variant,
    as_variant,
    cpp,
    scalar,
    tensor,
    variant,
)

__all__ = [
    "Bound",
    "Dims",
    "Pointwise",
    "Softmax",
    "Variant",
    "as_variant",
    "cpp",
    "kv_len",
    "kv_slot",
    "q_len",
    "q_row",
    "scalar",
    "tensor",
    "variant",
]
