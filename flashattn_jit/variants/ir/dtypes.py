"""Torch dtypes by the names that the IR, kernel specs and messages use."""

from __future__ import annotations

import torch

from flashattn_jit.variants.ir.ir import LATENT_ROWS, STORAGE_DTYPES, value_dtype

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


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of `dim` values."""
    return LATENT_ROWS.get(dim, dim) if dtype is torch.uint8 else dim // per_element(dtype)


def dim_of(width: int, dtype: torch.dtype) -> int:
    """Values of a row of `width` elements."""
    if dtype is torch.uint8:
        return next((dim for dim, n in LATENT_ROWS.items() if n == width), width)
    return width * per_element(dtype)


def row_dim(rows: torch.Tensor) -> int:
    """Values of a row: the last dim, twice that in codes of 4 bits, and see `LATENT_ROWS`."""
    return dim_of(rows.shape[-1], rows.dtype)


def latent_values(rows: torch.Tensor) -> torch.Tensor:
    """The values of `LATENT_ROWS`, fp32."""
    codes, scales, rest = rows.split([512, 16, rows.shape[-1] - 528], -1)
    scales = scales.contiguous().view(torch.float32).repeat_interleave(128, -1)
    values = codes.view(torch.float8_e4m3fn).float() * scales
    return torch.cat([values, rest.contiguous().view(torch.bfloat16).float()], -1)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, 0 to 15, as uint8, a row of all channels: the low bits come first."""
    pairs = pairs.view(torch.uint8)
    return torch.cat([pairs & 15, pairs >> 4], -1)


VALUE_DTYPES = {dtype: value_dtype(name) for dtype, name in DTYPE_NAMES.items()}
"""The dtype that a hook sees, by the dtype of the tensor that it reads."""
