"""Tables of the minimum and maximum of every 64 entries of a tensor along one dim.

The interval form reads these tables instead of the elements of a long tensor
(``fajit/interval/gather.h``). They are computed on the tensor's device and kept until the tensor
changes or is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ...torch_modes import is_capturing
from .simplify import RangeTableSpec

BLOCK = 64
MIN_TABLE_LENGTH = 1024
"""Shorter dims get no table: reading all elements is as fast."""

_HALF = (torch.float16, torch.bfloat16)
_READABLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
             torch.float32, torch.float64, *_HALF)  # fmt: skip

Tables: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_memo: dict[tuple[int, ...], tuple[weakref.ref[torch.Tensor], tuple[object, ...], Tables]] = {}


def _remembered(tensor: torch.Tensor, dim: int, stream: int) -> Tables:
    """The tables, computed once per version of a tensor; each time for inference tensors, which
    have no version."""
    if tensor.is_inference():
        return _block_extremes(tensor, dim)
    key = (id(tensor), dim, stream)
    # `tensor.data = ...` changes all of these except for the version.
    version = (tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    entry = _memo.get(key)
    if entry is not None and entry[0]() is tensor and entry[1] == version:
        return entry[2]
    result = _block_extremes(tensor, dim)
    _memo[key] = (weakref.ref(tensor, lambda _: _memo.pop(key, None)), version, result)
    return result


def block_extremes(tensor: torch.Tensor, dim: int) -> Tables:
    """(lo, hi): minimum and maximum of every 64 entries along `dim`, on the tensor's device.

    Both have the tensor's shape, except that `dim` counts blocks; float32 for half precision; NaN
    where a block has one. Empty for short dims and for dtypes that the interval form does not read.
    On a CUDA device there is no synchronisation; a table belongs to the stream that it was computed
    on, or to the CUDA graph being captured, which computes it at each replay.
    """
    long = tensor.ndim > 0 and tensor.shape[dim] >= MIN_TABLE_LENGTH
    if not long or tensor.dtype not in _READABLE:  # fp8 has no interval form
        empty = tensor.new_empty(0)
        return empty, empty
    stream = 0
    if tensor.is_cuda:
        if is_capturing(tensor.device):
            return _block_extremes(tensor, dim)
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return _remembered(tensor, dim, stream)


def _block_extremes(tensor: torch.Tensor, dim: int) -> Tables:
    values = tensor.detach().movedim(dim, -1)
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    if values.dtype in _HALF:
        values = values.float()
    length = values.shape[-1]
    missing = -length % BLOCK
    if missing:
        fill = values[..., -1:].expand(*values.shape[:-1], missing)
        values = torch.cat([values, fill], -1)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    return blocks.amin(-1).movedim(-1, dim), blocks.amax(-1).movedim(-1, dim)


def build_tables(
    specs: Sequence[RangeTableSpec], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The lo and hi tables of `specs`, in the order in which they follow the params."""
    return [t for spec in specs for t in block_extremes(tensors[spec.slot], spec.dim)]
