"""Torch dtypes by the names that the IR, kernel specs and messages use."""

from __future__ import annotations

import torch

from flashattn_jit.variants.ir.ir import STORAGE_DTYPES, value_dtype

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE_DTYPES}
"""Dtypes that captured tensors may have, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name of each of these dtypes; tensors of other dtypes cannot be captured."""

VALUE_DTYPES = {dtype: value_dtype(name) for dtype, name in DTYPE_NAMES.items()}
"""The dtype that a hook sees, by the dtype of the tensor that it reads."""
