"""Torch dtypes by the names that the IR, kernel specs and messages use."""

from __future__ import annotations

import torch

from flashattn_jit.variants.ir.ir import STORAGE_DTYPES, value_dtype

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE_DTYPES}
"""Dtypes that captured tensors may have, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name of each of these dtypes; tensors of other dtypes cannot be captured."""

CODES4 = torch.bits4x2
"""The dtype of codes of 4 bits, two an element: no param has it, keys and values may."""

KV_NAMES = {**DTYPE_NAMES, CODES4: "bits4x2"}
"""The names of dtypes that q, k and v may have, and of more."""


def per_element(dtype: torch.dtype) -> int:
    """Values that an element of a row holds."""
    return 2 if dtype is CODES4 else 1


def row_dim(rows: torch.Tensor) -> int:
    """Values of a row: the last dim, or twice that in codes of 4 bits."""
    return rows.shape[-1] * per_element(rows.dtype)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, 0 to 15, as uint8, a row of all channels: the low bits come first."""
    pairs = pairs.view(torch.uint8)
    return torch.cat([pairs & 15, pairs >> 4], -1)


VALUE_DTYPES = {dtype: value_dtype(name) for dtype, name in DTYPE_NAMES.items()}
"""The dtype that a hook sees, by the dtype of the tensor that it reads."""
