"""Least and greatest elements of ranges of a tensor, in constant time a query.

Entries are grouped by 64 along one dim. `RangeTable` answers many queries at once on the host, for
the numpy lowering; `build_tables` gives the per-group extremes that the C++ lowering reads beside
the tensor. Both are kept as long as the tensor lives unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 64
MIN_TABLE_LENGTH = 1024
"""Shorter dims get no table: reading them whole is as fast."""

_HALF = (torch.float16, torch.bfloat16)
_READABLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
             torch.float32, torch.float64, *_HALF)  # fmt: skip

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RangeTableSpec:
    """A lo and a hi table of param tensor `slot`: the extremes of every 64 entries along `dim`."""

    slot: int
    dim: int


class RangeTable:
    """Range queries along the last axis of `rows` [R, n].

    kind: ``"extremes"`` for (least, greatest), ``"bits"`` for (bitwise and, bitwise or). NaN is
    left out of the extremes and reported apart.
    """

    def __init__(self, rows: Array, kind: Literal["extremes", "bits"] = "extremes") -> None:
        self.length = rows.shape[1]
        functions = (np.minimum, np.maximum) if kind == "extremes" else (
            np.bitwise_and, np.bitwise_or)  # fmt: skip
        self.nan_counts: Array | None = None
        if rows.dtype.kind == "f":
            nan = np.isnan(rows)
            if nan.any():
                counts = np.zeros((rows.shape[0], self.length + 1), np.int64)
                np.cumsum(nan, axis=1, out=counts[:, 1:])
                self.nan_counts = counts
                rows = np.where(nan, 0, rows)
        self.sides = [_Side(rows, f) for f in functions]

    def query(self, row: Array, lo: Array, hi: Array) -> tuple[Array, Array, Array]:
        """(low, high, has NaN) of ``rows[row, lo..hi]``, both ends included and in range."""
        low, high = (side.query(row, lo, hi) for side in self.sides)
        if self.nan_counts is None:
            return low, high, np.asarray(False)
        return low, high, self.nan_counts[row, hi + 1] > self.nan_counts[row, lo]


class _Side:
    """One associative, idempotent function (minimum, maximum, and, or) over ranges."""

    def __init__(self, rows: Array, function: np.ufunc) -> None:
        self.function = function
        count, length = rows.shape
        self.length = -(-length // BLOCK) * BLOCK
        # The last entry fills up the last block: it changes none of these functions.
        rows = np.pad(rows, ((0, 0), (0, self.length - length)), mode="edge")
        blocks = rows.reshape(count, -1, BLOCK)
        self.rows = rows.reshape(-1)
        self.prefix = function.accumulate(blocks, axis=2).reshape(-1)
        self.suffix = function.accumulate(blocks[:, :, ::-1], axis=2)[:, :, ::-1].reshape(-1)
        self.blocks = blocks.shape[1]
        self.levels = [function.reduce(blocks, axis=2)]
        while self.levels[-1].shape[1] > 1:
            step = 1 << (len(self.levels) - 1)
            last = self.levels[-1]
            if step >= last.shape[1]:
                break
            self.levels.append(function(last[:, :-step], last[:, step:]))

    def query(self, row: Array, lo: Array, hi: Array) -> Array:
        base = row * self.length
        first, last = lo // BLOCK, hi // BLOCK
        out = self.function(self.suffix[base + lo], self.prefix[base + hi])
        out = np.asarray(out)
        inner = last - first - 1
        wide = inner > 0
        if np.any(wide):
            out = self._join_blocks(out, wide, row, first, inner)
        within = first == last
        if np.any(within):
            out = self._within(out, within, base, lo, hi)
        return out

    def _join_blocks(
        self, out: Array, wide: Array, row: Array, first: Array, inner: Array
    ) -> Array:
        row, first, inner, wide = np.broadcast_arrays(row, first, inner, wide)
        out = np.array(np.broadcast_to(out, wide.shape))
        r, f, n = row[wide], first[wide] + 1, inner[wide]
        level = np.frexp(n.astype(np.float64))[1] - 1
        values = np.empty(n.shape, out.dtype)
        for j in range(int(level.min()), int(level.max()) + 1):
            at = level == j
            table, end = self.levels[j], f[at] + n[at] - (1 << j)
            values[at] = self.function(table[r[at], f[at]], table[r[at], end])
        out[wide] = self.function(out[wide], values)
        return out

    def _within(self, out: Array, within: Array, base: Array, lo: Array, hi: Array) -> Array:
        """Ranges inside one block: whole prefixes and suffixes are known, others are read."""
        base, lo, hi, within = np.broadcast_arrays(base, lo, hi, within)
        out = np.array(np.broadcast_to(out, within.shape))
        starts, ends = within & (lo % BLOCK == 0), within & (hi % BLOCK == BLOCK - 1)
        out[starts] = self.prefix[(base + hi)[starts]]
        out[ends] = self.suffix[(base + lo)[ends]]
        rest = within & ~starts & ~ends
        if rest.any():
            a, b = (base + lo)[rest], (base + hi)[rest]
            width = np.arange(int((b - a).max()) + 1)
            values = self.rows[np.minimum(a[:, None] + width, b[:, None])]
            out[rest] = self.function.reduce(values, axis=1)
        return out


# --- tables of tensors ----------------------------------------------------------------------------

_memo: dict[tuple[int, object], tuple[weakref.ref[torch.Tensor], tuple[object, ...], Any]] = {}


def _remembered(tensor: torch.Tensor, what: object, build: Callable[[], Any]) -> Any:
    """`build()`, once per tensor and version. Inference tensors have no version: built anew."""
    if tensor.is_inference():
        return build()
    key = (id(tensor), what)
    # `tensor.data = ...` changes anything but the version.
    version = (tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    entry = _memo.get(key)
    if entry is not None and entry[0]() is tensor and entry[1] == version:
        return entry[2]
    result = build()
    _memo[key] = (weakref.ref(tensor, lambda _: _memo.pop(key, None)), version, result)
    return result


def readable(tensor: torch.Tensor) -> bool:
    """Whether elements of this dtype have an interval form (fp8 has none)."""
    return tensor.dtype in _READABLE


def host_rows(tensor: torch.Tensor, dim: int) -> Array:
    """The tensor on the host as [R, n]: `dim` last, the others flattened in order."""
    values = tensor.detach().float() if tensor.dtype in _HALF else tensor.detach()
    array = values.cpu().numpy()
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.ndim == 0:
        return array.reshape(1, 1)
    moved = np.moveaxis(array, dim, -1)
    return moved.reshape(-1, moved.shape[-1])


def range_table(
    tensor: torch.Tensor, dim: int, kind: Literal["extremes", "bits"] = "extremes"
) -> RangeTable:
    """The `RangeTable` of a tensor along `dim`; its rows are the other dims, flattened."""
    return _remembered(  # type: ignore[no-any-return]
        tensor, (dim, kind), lambda: RangeTable(host_rows(tensor, dim), kind)
    )


def block_extremes(tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lo, hi): the extremes of every 64 entries along `dim`, on the tensor's device.

    Both have the tensor's shape but for `dim`, which counts blocks; float32 for half precision; NaN
    where a block holds one. Empty where no table pays. On a CUDA device nothing is read back or
    waited for; a table belongs to the stream it was made on, and in a CUDA graph to that graph,
    which makes it anew at each replay.
    """
    if tensor.ndim == 0 or tensor.shape[dim] < MIN_TABLE_LENGTH or not readable(tensor):
        empty = tensor.new_empty(0)
        return empty, empty
    stream = 0
    if tensor.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return _block_extremes(tensor, dim)
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return _remembered(  # type: ignore[no-any-return]
        tensor, ("blocks", dim, stream), lambda: _block_extremes(tensor, dim)
    )


def _block_extremes(tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
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
