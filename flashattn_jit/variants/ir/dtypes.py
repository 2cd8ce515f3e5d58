"""Torch's dtypes and the names that the IR, kernel specs and messages have for them."""

from __future__ import annotations

import torch

from flashattn_jit.variants.ir.ir import STORAGE_DTYPES, value_dtype

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE_DTYPES}
"""Dtypes that tensors may be stored in, by their names."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The names by torch dtype; anything else cannot be captured."""

VALUE_DTYPES = {dtype: value_dtype(name) for dtype, name in DTYPE_NAMES.items()}
"""What a hook sees of a tensor of a dtype."""
