"""Which tensors have entries where kernels and the planner read them: at their own address."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from flashattn_jit.errors import ParamError
from flashattn_jit.variants.modes import has_no_values

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that always have an address, if their layout does."""

_REMEDIES = {
    "MaskedTensor": "pass its get_data(), and the mask as a mask_mod or an attn_mask",
    "DTensor": "pass its to_local(), or its full_tensor()",
}


def unreadable(tensor: torch.Tensor) -> str:
    """Why a tensor has no dense entries at an address, and what to pass; empty where it has.

    Nested, sparse, MKL-DNN and quantized tensors have none, nor have wrapper subclasses, which hold
    another tensor. The stand-ins that torch traces with (fake and functional tensors) pass.
    """
    if type(tensor) in PLAIN:
        return _odd_layout(tensor)
    name = type(tensor).__name__
    if is_lazy(tensor):
        return f"is an {name}, which has no shape yet; run its module once before"
    with torch._C.DisableTorchFunctionSubclass():
        problem = _odd_layout(tensor)
        if problem or has_no_values(tensor) or _has_address(tensor):
            return problem
    remedy = _REMEDIES.get(name, "pass the tensor that it wraps")
    return f"is a {name}, a wrapper subclass without entries of its own; {remedy}"


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raises ParamError for a captured tensor or a param that no kernel can read."""
    if problem := unreadable(tensor):
        raise ParamError(f"the variant's tensor {name!r} {problem}")


def _odd_layout(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return (
            "is a nested tensor; pass its values() to fa.varlen_attention, with its offsets() as "
            "indptr, or pad it with torch.nested.to_padded_tensor"
        )
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; pass a strided (dense) tensor, such as its to_dense()"
    if tensor.is_quantized:
        return (
            f"is a quantized tensor ({tensor.dtype}); pass its dequantize(), or its int_repr() "
            "with the scale as a param of a key_mod or value_mod"
        )
    return ""


def _has_address(tensor: torch.Tensor) -> bool:
    # Of a wrapper's entries nothing is known here but how many it says there are.
    try:
        return tensor.data_ptr() != 0 or tensor.is_meta or tensor.numel() == 0
    except RuntimeError:
        return False
