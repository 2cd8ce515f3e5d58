"""Inputs of torch's attention functions: they support autocast and any stride of the last dim."""

from __future__ import annotations

import torch

from .calls import in_order_of
from .checks import check_readable


def prepare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, direct: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs in autocast's dtype, with contiguous last dims; q keeps the order of its strides.

    direct: whether they are plain tensors (`is_direct`). Raises InputError for unreadable ones.
    """
    named = () if direct else (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        check_readable(name, tensor)
    query, key, value = autocast(query, key, value)
    if not _has_contiguous_rows(query) and query.dim() == 4:
        strides = in_order_of(query.shape, query.stride(), query.shape[-1])
        query = query.new_empty_strided(query.shape, strides).copy_(query)
    return _with_contiguous_rows(query), _with_contiguous_rows(key), _with_contiguous_rows(value)


def autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs in autocast's dtype if autocast is on, as torch's attention functions do."""
    device = query.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.dtype == torch.float32 else t for t in (query, key, value))
    return q, k, v


def _with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dim is not contiguous."""
    return tensor if _has_contiguous_rows(tensor) else tensor.contiguous()


def _has_contiguous_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
