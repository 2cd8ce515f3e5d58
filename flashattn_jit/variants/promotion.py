"""PyTorch's type promotion on the dtypes that values inside a hook may have.

The rules are those of ``torch.result_type`` (ATen/native/TypeProperties.cpp): operands fall into
three classes, tensors with dimensions, 0-dim tensors and Python numbers, and a lower class only
matters when its category (bool < int < float) is higher.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

INT_BITS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
DEFAULT_FLOAT = "float32"
"""What an integer becomes in a true division or a transcendental, whatever torch's default is."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
"""Storage dtypes by torch dtype; anything else cannot be captured."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def value_dtype(dtype: torch.dtype) -> str | None:
    """What a hook sees of a tensor of `dtype`: half and fp8 read as float32; None: not readable."""
    name = DTYPE_NAMES.get(dtype)
    return "float32" if name is not None and name.startswith(("float", "bf")) and (
        name != "float64"
    ) else name  # fmt: skip


def is_float(dtype: str) -> bool:
    """Whether `dtype` is a floating dtype of the IR."""
    return dtype in ("float32", "float64")


def category(dtype: str) -> int:
    """0 for bool, 1 for integers, 2 for floating dtypes."""
    return 0 if dtype == "bool" else 2 if is_float(dtype) else 1


def promote(a: str, b: str) -> str:
    """``torch.promote_types`` on IR dtypes."""
    if a == b:
        return a
    ca, cb = category(a), category(b)
    if ca != cb:
        return a if ca > cb else b
    if ca == 2:
        return "float64"
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if INT_BITS[a] > INT_BITS[b] else b


def _combine(higher: str | None, lower: str | None) -> str | None:
    # combine_categories of TypeProperties.cpp, without complex numbers.
    if higher is None or lower is None:
        return higher or lower
    if is_float(higher):
        return higher
    if higher == "bool" or is_float(lower):
        return promote(higher, lower)
    return higher


def result_dtype(operands: Iterable[tuple[str, int, bool]]) -> str:
    """The dtype of an arithmetic result.

    operands: (dtype, rank, weak) each; weak: a Python number, whose floats count as float32.
    """
    dims: str | None = None
    zeros: str | None = None
    numbers: str | None = None
    for dtype, rank, weak in operands:
        if weak:
            own = DEFAULT_FLOAT if is_float(dtype) else dtype
            numbers = own if numbers is None else promote(numbers, own)
        elif rank:
            dims = dtype if dims is None else promote(dims, dtype)
        else:
            zeros = dtype if zeros is None else promote(zeros, dtype)
    result = _combine(dims, _combine(zeros, numbers))
    assert result is not None
    return result
