"""The parts of the interval form that read params, lengths and slots, with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from . import intervals, intervals_real
from .bounds_lower import MAX_BIT_LOADS, MAX_ROWS, scanned_dim
from .bounds_select import kind
from .bounds_simplify import Program
from .bounds_terms import INT_RANGE, MAX_POSITION
from .intervals import I, Value
from .range_table import RangeTable, range_table, readable

Lengths: TypeAlias = Sequence[int] | NDArray[Any]
Values: TypeAlias = Callable[[int], Value]
"""The value of a node under the narrowing at hand."""


@dataclass(frozen=True, slots=True)
class MaskParams:
    """What a mask reads at run time.

    tensors, scalars: the variant's params in slot order. The others have one entry a request and
    are needed only by masks that use `fa.q_len`, `fa.kv_len`, `fa.q_row` or `fa.kv_slot`; see
    ``fajit_args`` for their meaning.
    """

    tensors: Sequence[torch.Tensor] = ()
    scalars: Sequence[int | float] = ()
    q_len: Lengths = ()
    kv_len: Lengths = ()
    q_offset: Lengths = ()
    q_token0: Lengths = ()
    kv_token0: Lengths = ()


class Loads:
    """Evaluates the loading nodes of one program; methods are named as the operations."""

    def __init__(self, program: Program, params: MaskParams) -> None:
        self.program, self.params = program, params

    def input(self, term: int, value: Values) -> I:
        """An index that boxes do not bound."""
        return intervals.i_top(*INT_RANGE["int64"])

    def gather(self, term: int, value: Values) -> Value:
        """The least and the greatest element of the box of indices."""
        node = self.program.nodes[term]
        tensor = self.params.tensors[node.int_attr("slot")]
        name = kind(node.dtype)
        if not readable(tensor):  # fp8, which hooks read as float32
            return intervals_real.f_top()
        if 0 in tensor.shape[: len(node.args)]:
            zero = {"i": intervals.i_const, "t": intervals.t_const, "f": intervals_real.f_const}
            return zero[name](0)
        table = range_table(tensor, scanned_dim(self.program, term, tensor.ndim))
        low, high, nan, unknown = self._read(term, value, tensor, table, None)
        if name == "i":
            least, most = INT_RANGE[node.dtype]
            low, high = low.astype(np.int64), high.astype(np.int64)
            return np.where(unknown, least, low), np.where(unknown, most, high)
        if name == "t":
            return unknown | (high != 0), ~unknown & (low != 0)
        lost = unknown | nan
        low, high = low.astype(np.float64), high.astype(np.float64)
        return np.where(lost, -np.inf, low), np.where(lost, np.inf, high), lost

    def _read(
        self, term: int, value: Values, tensor: torch.Tensor, table: RangeTable, limit: int | None
    ) -> tuple[Any, Any, Any, Any]:
        """(low, high, has NaN, too large to read) of the box of a gather."""
        node = self.program.nodes[term]
        at = [self._index(value(a), n) for a, n in zip(node.args, tensor.shape, strict=False)]
        for dim in range(len(at), tensor.ndim):  # a row: all of the last dim
            at.append(intervals.i_range(tensor.shape[dim]))
        if not at:
            zero = np.asarray(0)
            return *table.query(zero, zero, zero), np.asarray(False)
        scan = scanned_dim(self.program, term, tensor.ndim)
        others = [d for d in range(tensor.ndim) if d != scan]
        sizes = [at[d][1] - at[d][0] + 1 for d in others]
        rows: Any = np.asarray(1)
        for size in sizes:
            rows = rows * np.minimum(size, MAX_ROWS + 1)
        unknown = rows > MAX_ROWS
        if limit is not None:
            length = np.minimum(at[scan][1] - at[scan][0] + 1, limit + 1)
            unknown = unknown | (rows * length > limit)
        strides = np.cumprod([1, *(tensor.shape[d] for d in reversed(others))])[:-1][::-1]
        row: Any = np.asarray(0)
        for d, stride in zip(others, strides, strict=True):
            row = row + at[d][0] * stride
        if np.all((rows == 1) | unknown):
            return *table.query(row, *at[scan]), unknown
        return *self._read_rows(table, row, at[scan], sizes, strides, unknown), unknown

    def _read_rows(
        self, table: RangeTable, row: Any, at: I, sizes: list[Any], strides: Any, unknown: Any
    ) -> tuple[Any, Any, Any]:
        """Joins the rows of boxes that span several, one index tuple after the other."""
        arrays = np.broadcast_arrays(row, *at, unknown, *sizes)
        shape = arrays[0].shape
        row, lo, hi, unknown, *sizes = (a.reshape(-1) for a in arrays)
        low, high, nan = (np.array(x) for x in np.broadcast_arrays(*table.query(row, lo, hi)))
        left, right = (side.function for side in table.sides)
        columns = np.stack(sizes, 1)
        for tuple_sizes in sorted({tuple(x) for x in columns[~unknown].tolist()}):
            group = ~unknown & (columns == tuple_sizes).all(1)
            for index in np.ndindex(*tuple_sizes):
                r = row[group] + int(np.dot(index, strides))
                a, b, c = table.query(r, lo[group], hi[group])
                low[group], high[group] = left(low[group], a), right(high[group], b)
                nan[group] |= c
        return low.reshape(shape), high.reshape(shape), nan.reshape(shape)

    def _index(self, x: I, size: int) -> I:
        below, wraps = x[1] < 0, (x[0] < 0) & (x[1] >= 0)
        low = np.where(below, np.maximum(x[0], -size) + size, x[0])
        high = np.where(below, np.maximum(x[1], -size) + size, x[1])
        low, high = (np.clip(e, 0, size - 1) for e in (low, high))
        return np.where(wraps, 0, low), np.where(wraps, size - 1, high)

    def bit(self, term: int, value: Values) -> I:
        """Bit number ``args[1]`` of ``args[0]``; of a gather, what all and what some rows have."""
        node = self.program.nodes[term]
        source, at = self.program.nodes[node.args[0]], value(node.args[1])
        width = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32}.get(node.dtype, 64)
        all_bits: Any
        any_bits: Any
        if source.op == "gather" and not source.shape:
            tensor = self.params.tensors[source.int_attr("slot")]
            if 0 in tensor.shape:
                all_bits = any_bits = unknown = np.asarray(0)
            else:
                dim = scanned_dim(self.program, node.args[0], tensor.ndim)
                table = range_table(tensor, dim, "bits")
                all_bits, any_bits, _, unknown = self._read(
                    node.args[0], value, tensor, table, MAX_BIT_LOADS
                )
        else:
            all_bits, any_bits = value(node.args[0])
            unknown = all_bits != any_bits
        all_bits, any_bits = (x.astype(np.int64).view(np.uint64) for x in (all_bits, any_bits))
        all_bits = np.where(unknown, np.uint64(0), all_bits)
        any_bits = np.where(unknown, np.uint64(2**64 - 1), any_bits)
        return intervals.i_bit(any_bits, all_bits, at, width)

    def searchsorted(self, term: int, value: Values) -> I:
        """The rank in a sorted integer param, which ascends with the value."""
        node = self.program.nodes[term]
        tensor = self.params.tensors[node.int_attr("slot")]
        integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if kind(self.program.nodes[node.args[0]].dtype) != "i" or not integer:
            return intervals.i_top(0, tensor.shape[0])
        array = tensor.detach().cpu().numpy()
        side: Any = "right" if node.attr("right") else "left"
        low, high = (
            np.asarray(np.searchsorted(array, x, side=side), np.int64) for x in value(node.args[0])
        )
        return low, high

    # --- requests --------------------------------------------------------------------------------

    def _per_request(self, term: int, value: Values, values: Any, top: tuple[int, int]) -> I:
        """The extremes of `values` over the requests of the node's first argument."""
        low, high = value(self.program.nodes[term].args[0])
        array = np.asarray(values, np.int64)
        unknown = (low < 0) | (high >= len(array))
        if not len(array):
            return intervals.i_top(*top)
        low, high = np.clip(low, 0, len(array) - 1), np.clip(high, 0, len(array) - 1)
        least, most, _ = RangeTable(array.reshape(1, -1)).query(np.asarray(0), low, high)
        return np.where(unknown, np.int64(top[0]), least), np.where(unknown, np.int64(top[1]), most)

    def q_len(self, term: int, value: Values) -> I:
        """`fa.q_len`."""
        return self._per_request(term, value, self.params.q_len, (0, MAX_POSITION))

    def kv_len(self, term: int, value: Values) -> I:
        """`fa.kv_len`."""
        return self._per_request(term, value, self.params.kv_len, (0, MAX_POSITION))

    def q_row(self, term: int, value: Values) -> I:
        """`fa.q_row`."""
        tokens = np.asarray(self.params.q_token0, np.int64)
        base = tokens - np.asarray(self.params.q_offset, np.int64)
        return self._slot(term, value, base)

    def kv_slot(self, term: int, value: Values) -> I:
        """`fa.kv_slot`."""
        return self._slot(term, value, self.params.kv_token0)

    def _slot(self, term: int, value: Values, base: Any) -> I:
        start = self._per_request(term, value, base, INT_RANGE["int64"])
        return intervals.i_add(start, value(self.program.nodes[term].args[1]))
