"""The interval form evaluated with numpy: many boxes at once.

A box is an interval of each of b, h, q_idx and kv_idx. Their endpoints are arrays that broadcast
against each other, so one call serves a grid (q along one axis, keys along another; what depends on
q alone is computed once per row) as well as a list of boxes of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import intervals, intervals_real
from .bounds_lower import MAX_BIT_LOADS, MAX_ROWS, scanned_dim
from .bounds_select import OWN, kind, select
from .bounds_simplify import Bound, Clause, Program
from .bounds_terms import INT_RANGE, MAX_POSITION
from .intervals import Bools, I, Value
from .range_table import RangeTable, range_table, readable

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a tile: no pair is kept, unknown or some, every pair is kept."""

Lengths = Sequence[int] | NDArray[Any]
_FUNCTIONS = {**vars(intervals_real), **vars(intervals)}
_SAFE = 2**61
_LONG_LIST = 1024


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


@dataclass(slots=True)
class Boxes:
    """Intervals of the indices, both ends included; arrays that broadcast against each other."""

    b: I
    h: I
    q: I
    k: I


def classify_boxes(program: Program, params: MaskParams, boxes: Boxes) -> NDArray[np.uint8]:
    """The state of every box, uint8, in the broadcast shape of the boxes. Empty boxes are EMPTY."""
    with np.errstate(all="ignore"):
        return _Evaluation(program, params, boxes).states()


@dataclass(slots=True)
class _Scope:
    """Values known under a clause's narrowing, and where the clause may still hold."""

    values: dict[int, Value]
    alive: Bools
    changed: set[int] = field(default_factory=set)
    index: NDArray[np.intp] | None = None  # of the outer scope's boxes, where only some are left

    def only(self, index: NDArray[np.intp]) -> _Scope:
        """The same values for some boxes of a list."""
        count = len(self.alive)

        def part(value: Value) -> Value:
            return tuple(x[index] if x.shape == (count,) else x for x in value)

        values = {node: part(value) for node, value in self.values.items()}
        return _Scope(values, self.alive[index], index=index)


class _Evaluation:
    def __init__(self, program: Program, params: MaskParams, boxes: Boxes) -> None:
        self.program, self.params = program, params
        arrays = (*boxes.b, *boxes.h, *boxes.q, *boxes.k)
        self.shape = np.broadcast_shapes(*(np.shape(x) for x in arrays))
        real = np.asarray((boxes.q[0] <= boxes.q[1]) & (boxes.k[0] <= boxes.k[1]))
        self.real = real
        inputs = {"b": boxes.b, "h": boxes.h, "q_idx": boxes.q, "kv_idx": boxes.k}
        values: dict[int, Value] = {}
        for i, node in enumerate(program.nodes):
            if node.op == "input":
                low, high = (np.asarray(x, np.int64) for x in inputs[str(node.attr("name"))])
                values[i] = low, np.maximum(low, high)
        self.base = _Scope(values, real)

    def states(self) -> NDArray[np.uint8]:
        program, scope = self.program, self.base
        unsure = np.asarray(False)
        for node in (program.q, program.k):
            low, high = scope.values[node]
            unsure = unsure | (low < -MAX_POSITION) | (high > MAX_POSITION)
        for node, low, high in program.guards:
            unsure = unsure | ~intervals.fits(self.value(scope, node), low, high)
        keep = self._any(scope, program.keep) | unsure
        scope.alive = np.broadcast_to(scope.alive & keep, self.shape)
        states = np.where(self._any(scope, program.drop) | unsure, PARTIAL, FULL)
        states = np.where(self.real & keep, states, EMPTY)
        return np.broadcast_to(states, self.shape).astype(np.uint8)

    # --- clauses ---------------------------------------------------------------------------------

    def _any(self, scope: _Scope, clauses: Sequence[Clause]) -> Bools:
        result = np.asarray(False)
        for clause in clauses:
            result = result | self._clause(scope, clause)
        return result

    def _clause(self, outer: _Scope, clause: Clause) -> Bools:
        scope = self._thinned(_Scope(dict(outer.values), outer.alive))
        for bound in clause.bounds:
            if bound.lows or bound.highs:
                self._bound(scope, bound)
                if not scope.alive.any():
                    return np.asarray(False)
                scope = self._thinned(scope)
        for bound in clause.bounds:
            for exclude in bound.excludes:
                value, other = self.value(scope, bound.value), self.value(scope, exclude)
                always = (value[0] == value[1]) & (other[0] == other[1]) & (value[0] == other[0])
                scope.alive = scope.alive & ~always
        for test in clause.tests:
            may, must = self.value(scope, test.term)
            scope.alive = scope.alive & (may if test.want else ~must)
        for group in clause.nested:
            if scope.alive.any():
                scope.alive = scope.alive & self._any(scope, group)
        if scope.index is not None:
            alive = np.zeros(outer.alive.shape, bool)
            alive[scope.index] = scope.alive
            return alive
        # Values first computed here without narrowing serve the clauses that follow.
        for node, value in scope.values.items():
            known = node in outer.values or node in scope.changed
            if not known and self.program.parts[node].isdisjoint(scope.changed):
                outer.values[node] = value
        return scope.alive

    def _thinned(self, scope: _Scope) -> _Scope:
        """The scope of only those boxes of a long list that may still hold, if they are few."""
        if scope.index is not None or scope.alive.ndim != 1 or len(scope.alive) < _LONG_LIST:
            return scope
        index = np.flatnonzero(scope.alive)
        return scope if 2 * len(index) > len(scope.alive) else scope.only(index)

    def _bound(self, scope: _Scope, bound: Bound) -> None:
        low, high = self.value(scope, bound.value)
        for node in bound.lows:
            low = np.maximum(low, self.value(scope, node)[0])
        for node in bound.highs:
            high = np.minimum(high, self.value(scope, node)[1])
        value = self._met(scope, low, high)
        if not bound.narrows and not bound.excludes:
            return
        scope.changed |= {bound.value, *(t for t, _ in bound.narrows)}
        narrowed: dict[int, Value] = {}
        for i, (term, c) in enumerate(bound.narrows):
            if len(bound.narrows) == 1:
                narrowed[term] = value
                continue
            other, d = bound.narrows[1 - i]
            part = self._add(value, self.value(scope, other), -d)
            new = part if c == 1 else intervals.i_neg(part)
            old = self.value(scope, term)
            narrowed[term] = self._met(
                scope, np.maximum(new[0], old[0]), np.minimum(new[1], old[1])
            )
        for node in list(scope.values):
            if not self.program.parts[node].isdisjoint(narrowed):
                del scope.values[node]
        scope.values.update(narrowed)
        scope.values[bound.value] = value

    def _met(self, scope: _Scope, low: Any, high: Any) -> I:
        scope.alive = scope.alive & (low <= high)
        return low, np.maximum(low, high)

    def _add(self, a: I, b: I, sign: int) -> I:
        return intervals.i_add(a, b) if sign == 1 else intervals.i_sub(a, b)

    # --- values ----------------------------------------------------------------------------------

    def value(self, scope: _Scope, term: int) -> Value:
        """The value of a node in `scope`, remembered there."""
        if term not in scope.values:
            node = self.program.nodes[term]
            if node.op in OWN:
                scope.values[term] = getattr(self, f"_{node.op}")(scope, term)
            else:
                scope.values[term] = self._step(scope, term)
        return scope.values[term]

    def _step(self, scope: _Scope, term: int) -> Value:
        step = select(self.program.nodes, term)
        if step.name.endswith("_scalar"):
            number = self.params.scalars[int(step.extra[0])]
            whole = step.name == "i_scalar"
            return intervals.point(int(number)) if whole else intervals_real.f_const(float(number))
        args = [self.value(scope, a) for a in step.args]
        value: Value = _FUNCTIONS[step.name](*args, *step.extra)
        if step.wrap:
            value = intervals.i_wrap(value, *step.wrap)
        return intervals.t_not(value) if step.negate else value

    def _input(self, scope: _Scope, term: int) -> Value:
        return intervals.i_top(*INT_RANGE["int64"])

    def _linear(self, scope: _Scope, term: int) -> I:
        program, node = self.program, self.program.nodes[term]
        coefs = node.attr("coefs")
        assert isinstance(coefs, tuple)
        parts = dict(zip(node.args, coefs, strict=True))
        q, k = program.q, program.k
        if term != program.distance and q in parts and parts[q] == -parts.get(k, 0):
            parts[program.distance] = parts.pop(q)
            del parts[k]
        const = node.int_attr("const")
        size = sum(abs(c * x) for t, c in parts.items() for x in program.ranges[t]) + abs(const)
        if size > _SAFE:  # not by its type: look at the values
            values = [(c, x) for t, c in parts.items() for x in self.value(scope, t)]
            ends = [(c, int(f(x))) for c, x in values for f in (np.min, np.max) if x.size]
            size = sum(abs(c * x) for c, x in ends) + abs(const)
        if size > _SAFE:
            total = intervals.point(const)
            for t, c in parts.items():
                value = self.value(scope, t)
                scaled = value if c == 1 else intervals.i_scale(value, c)
                total = intervals.i_add(total, scaled)
            return total
        low: Any = const
        high: Any = const
        for t, c in parts.items():
            a, b = self.value(scope, t)
            if abs(c) != 1:
                a, b = a * c, b * c
            elif c == -1:
                a, b = -a, -b
            low, high = (low + a, high + b) if c > 0 else (low + b, high + a)
        return low, high

    # --- loads -----------------------------------------------------------------------------------

    def _gather(self, scope: _Scope, term: int) -> Value:
        node = self.program.nodes[term]
        tensor = self.params.tensors[node.int_attr("slot")]
        name = kind(node.dtype)
        if not readable(tensor):
            return _FUNCTIONS[f"{name}_top"](*(INT_RANGE[node.dtype] if name == "i" else ()))
        if 0 in tensor.shape[: len(node.args)]:
            return _FUNCTIONS[f"{name}_const"](0)
        table = range_table(tensor, scanned_dim(self.program, term, tensor.ndim))
        low, high, nan, unknown = self._read(scope, term, tensor, table, None)
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
        self, scope: _Scope, term: int, tensor: torch.Tensor, table: RangeTable, limit: int | None
    ) -> tuple[Any, Any, Any, Any]:
        """(low, high, has NaN, too large to read) of the box of a gather."""
        node = self.program.nodes[term]
        at = [
            self._index(self.value(scope, a), n)
            for a, n in zip(node.args, tensor.shape, strict=False)
        ]
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

    def _bit(self, scope: _Scope, term: int) -> I:
        node = self.program.nodes[term]
        source, at = self.program.nodes[node.args[0]], self.value(scope, node.args[1])
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
                    scope, node.args[0], tensor, table, MAX_BIT_LOADS
                )
        else:
            all_bits, any_bits = self.value(scope, node.args[0])
            unknown = all_bits != any_bits
        all_bits, any_bits = (x.astype(np.int64).view(np.uint64) for x in (all_bits, any_bits))
        all_bits = np.where(unknown, np.uint64(0), all_bits)
        any_bits = np.where(unknown, np.uint64(2**64 - 1), any_bits)
        return intervals.i_bit(any_bits, all_bits, at, width)

    def _searchsorted(self, scope: _Scope, term: int) -> I:
        node = self.program.nodes[term]
        tensor = self.params.tensors[node.int_attr("slot")]
        value = self.program.nodes[node.args[0]]
        integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if kind(value.dtype) != "i" or not integer:
            return intervals.i_top(0, tensor.shape[0])
        array = tensor.detach().cpu().numpy()
        side: Any = "right" if node.attr("right") else "left"
        low, high = (
            np.asarray(np.searchsorted(array, x, side=side), np.int64)
            for x in self.value(scope, node.args[0])
        )
        return low, high

    # --- requests --------------------------------------------------------------------------------

    def _per_request(self, scope: _Scope, term: int, values: Any, top: tuple[int, int]) -> I:
        """The extremes of `values` over the requests of the node's first argument."""
        low, high = self.value(scope, self.program.nodes[term].args[0])
        array = np.asarray(values, np.int64)
        unknown = (low < 0) | (high >= len(array))
        if not len(array):
            return intervals.i_top(*top)
        low, high = np.clip(low, 0, len(array) - 1), np.clip(high, 0, len(array) - 1)
        least, most, _ = RangeTable(array.reshape(1, -1)).query(np.asarray(0), low, high)
        return np.where(unknown, np.int64(top[0]), least), np.where(unknown, np.int64(top[1]), most)

    def _q_len(self, scope: _Scope, term: int) -> I:
        return self._per_request(scope, term, self.params.q_len, (0, MAX_POSITION))

    def _kv_len(self, scope: _Scope, term: int) -> I:
        return self._per_request(scope, term, self.params.kv_len, (0, MAX_POSITION))

    def _q_row(self, scope: _Scope, term: int) -> I:
        tokens = np.asarray(self.params.q_token0, np.int64)
        base = tokens - np.asarray(self.params.q_offset, np.int64)
        return self._slot(scope, term, base)

    def _kv_slot(self, scope: _Scope, term: int) -> I:
        return self._slot(scope, term, self.params.kv_token0)

    def _slot(self, scope: _Scope, term: int, base: Any) -> I:
        start = self._per_request(scope, term, base, INT_RANGE["int64"])
        return intervals.i_add(start, self.value(scope, self.program.nodes[term].args[1]))
