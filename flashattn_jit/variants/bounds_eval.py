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
from numpy.typing import NDArray

from . import intervals, intervals_real
from .bounds_loads import Loads, MaskParams
from .bounds_select import OWN, select
from .bounds_simplify import Bound, Clause, Program
from .bounds_terms import MAX_POSITION
from .intervals import Bools, I, Value

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a tile: no pair is kept, unknown or some, every pair is kept."""

Lengths = Sequence[int] | NDArray[Any]
_FUNCTIONS = {**vars(intervals_real), **vars(intervals)}
_SAFE = 2**61
_LONG_LIST = 1024


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
        states = _Evaluation(program, params, boxes).states()
        return _by_parts(program, params, boxes, states) if program.periods else states


def _by_parts(
    program: Program, params: MaskParams, boxes: Boxes, states: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The states, where partial boxes were looked at again period by period; see `Period`."""
    partial = np.nonzero(states == PARTIAL)
    count = len(partial[0])

    def flat(pair: I) -> I:
        low, high = (np.broadcast_to(x, states.shape)[partial] for x in pair)
        return low, high

    b, h, q, k = (flat(pair) for pair in (boxes.b, boxes.h, boxes.q, boxes.k))
    scalars = _Evaluation(program, params, Boxes(*(intervals.point(0),) * 4))
    parts: dict[int, list[tuple[I, Bools]]] = {
        index: [(x, np.ones(count, bool))] for index, x in ((program.q, q), (program.k, k))
    }
    for period in program.periods:
        offset, divisor = (scalars.value(scalars.base, n) for n in (period.offset, period.divisor))
        x = q if period.index == program.q else k
        parts[period.index] = _period_parts(x, offset, divisor)
    pieces = [sum(real.astype(int) for _, real in p) for p in parts.values()]
    keep = pieces[0] * pieces[1] == 1  # one part only: it stays partial
    drop = keep.copy()
    for part_q, real_q in parts[program.q]:
        for part_k, real_k in parts[program.k]:
            at = np.flatnonzero(real_q & real_k & ~(keep & drop))
            if not len(at):
                continue
            picked = Boxes(*((x[0][at], x[1][at]) for x in (b, h, part_q, part_k)))
            found = _Evaluation(program, params, picked).states()
            keep[at] |= found != EMPTY
            drop[at] |= found != FULL
    states[partial] = np.where(keep, np.where(drop, PARTIAL, FULL), EMPTY)
    return states


def _period_parts(x: I, offset: I, divisor: I) -> list[tuple[I, Bools]]:
    """Up to three (interval, where it exists) parts: first period, whole ones, last one."""
    d, o = int(divisor[0]), int(offset[0])
    if not (1 < d == divisor[1] <= MAX_POSITION and o == offset[1] and abs(o) <= MAX_POSITION):
        return [(x, np.ones(len(x[0]), bool))]
    low, high = x
    first, last = -(-(low + o) // d) * d - o, (high + o + 1) // d * d - o
    inside = (np.abs(low) <= MAX_POSITION) & (np.abs(high) <= MAX_POSITION)
    splits = inside & (first <= high) & (last > low)
    return [
        (
            (np.where(splits, first, low), np.where(splits, last - 1, high)),
            ~splits | (last > first),
        ),
        ((low, first - 1), splits & (first > low)),
        ((last, high), splits & (last <= high)),
    ]


@dataclass(slots=True)
class _Scope:
    """Values known under a clause's narrowing, and where the clause may still hold."""

    values: dict[int, Value]
    alive: Bools
    changed: set[int] = field(default_factory=set)
    index: NDArray[np.intp] | None = None  # of the outer scope's boxes, where only some are left
    touched: Bools | None = None  # boxes of a grid that still have to be narrowed

    def only(self, index: NDArray[np.intp]) -> _Scope:
        """The same values for some boxes of a list."""
        count = len(self.alive)

        def part(value: Value) -> Value:
            return tuple(x[index] if x.shape == (count,) else x for x in value)

        values = {node: part(value) for node, value in self.values.items()}
        return _Scope(values, self.alive[index], index=index)


class _Evaluation:
    def __init__(self, program: Program, params: MaskParams, boxes: Boxes) -> None:
        self.program, self.loads = program, Loads(program, params)
        self.params = params
        arrays = (*boxes.b, *boxes.h, *boxes.q, *boxes.k)
        self.shape = np.broadcast_shapes(*(np.shape(x) for x in arrays))
        real = np.asarray((boxes.q[0] <= boxes.q[1]) & (boxes.k[0] <= boxes.k[1]))
        self.real = real
        inputs = {"b": boxes.b, "h": boxes.h, "q_idx": boxes.q, "kv_idx": boxes.k}
        values: dict[int, Value] = {}
        self.input_nodes: dict[str, int] = {}
        for i, node in enumerate(program.nodes):
            if node.op == "input":
                self.input_nodes[str(node.attr("name"))] = i
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
        if scope.touched is not None:
            return self._narrowly(clause, scope)
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

    def _narrowly(self, clause: Clause, scope: _Scope) -> Bools:
        """The clause on a grid, where narrowing was put off: done now for the boxes it touches."""
        alive = np.array(np.broadcast_to(scope.alive, self.shape))
        at = np.nonzero(alive & scope.touched)
        if len(at[0]):

            def flat(name: str) -> I:
                low, high = self.base.values[self.input_nodes[name]]
                low, high = (np.broadcast_to(x, self.shape)[at] for x in (low, high))
                return low, high

            boxes = Boxes(flat("b"), flat("h"), flat("q_idx"), flat("kv_idx"))
            inner = _Evaluation(self.program, self.params, boxes)
            alive[at] = inner._clause(inner.base, clause)
        return alive

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
            new = self._rest(value, bound.value, self.value(scope, other), other, d, c)
            old = self.value(scope, term)
            narrowed[term] = self._met(
                scope, np.maximum(new[0], old[0]), np.minimum(new[1], old[1])
            )
        if scope.alive.ndim > 1 and self._spreads(scope, narrowed):
            for term, (low, high) in narrowed.items():
                old = self.value(scope, term)
                touched = (low != old[0]) | (high != old[1])
                scope.touched = touched if scope.touched is None else scope.touched | touched
            scope.values[bound.value] = value
            return
        for node in list(scope.values):
            if not self.program.parts[node].isdisjoint(narrowed):
                del scope.values[node]
        scope.values.update(narrowed)
        scope.values[bound.value] = value

    def _spreads(self, scope: _Scope, narrowed: dict[int, Value]) -> bool:
        """Whether an index that varies along one axis of a grid would come to vary along two."""
        inputs = (t for t in narrowed if self.program.nodes[t].op == "input")
        return any(narrowed[t][0].size > scope.values[t][0].size for t in inputs)

    def _met(self, scope: _Scope, low: Any, high: Any) -> I:
        scope.alive = scope.alive & (low <= high)
        return low, np.maximum(low, high)

    def _rest(self, value: I, total: int, other: I, term: int, d: int, c: int) -> I:
        """The x of ``c * x + d * other = value``, where c and d are 1 or -1."""
        sizes = [abs(x) for n in (total, term) for x in self.program.ranges[n]]
        if sum(sizes) > _SAFE:
            rest = (intervals.i_sub if d == 1 else intervals.i_add)(value, other)
            return rest if c == 1 else intervals.i_neg(rest)
        low, high = (other[1], other[0]) if d == 1 else (-other[0], -other[1])
        low, high = value[0] - low, value[1] - high
        return (low, high) if c == 1 else (-high, -low)

    # --- values ----------------------------------------------------------------------------------

    def value(self, scope: _Scope, term: int) -> Value:
        """The value of a node in `scope`, remembered there."""
        if term not in scope.values:
            node = self.program.nodes[term]
            if node.op == "linear":
                scope.values[term] = self._linear(scope, term)
            elif node.op in OWN:
                load = getattr(self.loads, node.op)
                scope.values[term] = load(term, lambda n: self.value(scope, n))
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
