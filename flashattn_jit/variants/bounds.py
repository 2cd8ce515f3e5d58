"""Which tiles of an attention problem a mask leaves empty, full or partial, without visiting pairs.

The answers come from the interval form of the mask (`bounds_simplify`), here with numpy; the same
form is part of every compiled kernel (`bounds_lower`). They are sound for every mask and exact for
the usual ones, tail tiles included.

`tile_runs` is what planner and `explain` use: it refines from large boxes to tiles only where a box
is partial, so causal, window and document masks cost far less than one evaluation a tile, and its
result is runs of equal tiles. `classify_grid` is the dense form of the same, for tests and small
problems. `kv_bounds` finds the hull of the keys that a range of queries can keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bounds_eval import EMPTY, FULL, PARTIAL, Boxes, classify_boxes
from .bounds_loads import MaskParams
from .bounds_simplify import Program, simplify
from .ir import Graph
from .range_table import build_tables

__all__ = [
    "EMPTY", "FULL", "PARTIAL", "Grid", "KvBounds", "MaskParams", "TileRuns", "build_tables",
    "classify_grid", "kv_bounds", "tile_runs",
]  # fmt: skip

_FANOUT = 4  # a partial box becomes 4 x 4 smaller ones
_FIRST_BOXES = 256
_KEY_FANOUT = 8
_CHUNK = 1 << 16  # boxes evaluated at a time
_GRID_TILES = 1 << 18  # and as a grid

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of a problem: requests and heads (half-open ranges), positions, tile sizes.

    Queries ``q_begin <= q_idx < q_end`` are tiled from `q_begin`, keys from `kv_begin`; the last
    tiles end with the range.
    """

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    tile_q: int
    tile_kv: int
    b_begin: int = 0
    b_end: int = 1
    h_begin: int = 0
    h_end: int = 1

    @property
    def num_q_tiles(self) -> int:
        """Tiles along the queries."""
        return max(0, -(-(self.q_end - self.q_begin) // self.tile_q))

    @property
    def num_kv_tiles(self) -> int:
        """Tiles along the keys."""
        return max(0, -(-(self.kv_end - self.kv_begin) // self.tile_kv))


@dataclass(frozen=True, slots=True)
class TileRuns:
    """Runs of neighbouring non-empty tiles of one state, row by row.

    A row is a (request, head, query tile), in that order; `shape` is [B', H', query tiles], with
    B' or H' 1 where the mask ignores the request or the head. Row r owns the runs
    ``indptr[r] .. indptr[r + 1]``; run i covers key tiles ``begin[i] <= tile < end[i]`` and has
    ``state[i]``, PARTIAL or FULL. Runs of a row ascend; what they leave out is empty.
    """

    grid: Grid
    shape: tuple[int, int, int]
    indptr: Array
    begin: Array
    end: Array
    state: NDArray[np.uint8]

    def row(self, b: int, h: int, q_tile: int) -> Iterator[tuple[int, int, int]]:
        """The (begin, end, state) runs of one row; `b` and `h` count from the grid's begin."""
        b, h = min(b, self.shape[0] - 1), min(h, self.shape[1] - 1)
        r = (b * self.shape[1] + h) * self.shape[2] + q_tile
        for i in range(int(self.indptr[r]), int(self.indptr[r + 1])):
            yield int(self.begin[i]), int(self.end[i]), int(self.state[i])

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, partial and full, over all requests and heads."""
        repeat = (self.grid.b_end - self.grid.b_begin) // self.shape[0]
        repeat *= (self.grid.h_end - self.grid.h_begin) // self.shape[1]
        lengths = self.end - self.begin
        partial = int(lengths[self.state == PARTIAL].sum())
        full = int(lengths[self.state == FULL].sum())
        total = int(np.prod(self.shape)) * self.grid.num_kv_tiles
        return (total - partial - full) * repeat, partial * repeat, full * repeat

    def dense(self) -> NDArray[np.uint8]:
        """The states as [B', H', query tiles, key tiles]."""
        width = self.grid.num_kv_tiles
        rows = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        steps = np.zeros((len(self.indptr) - 1) * (width + 1), np.int16)
        state = self.state.astype(np.int16)
        np.add.at(steps, rows * (width + 1) + self.begin, state)
        np.add.at(steps, rows * (width + 1) + self.end, -state)
        dense = np.cumsum(steps.reshape(-1, width + 1), axis=1)[:, :width]
        return dense.astype(np.uint8).reshape(*self.shape, width)


@dataclass(frozen=True, slots=True)
class KvBounds:
    """Keys ``lo <= kv_idx < hi`` hold every key that may be kept. contiguous: no gap was found."""

    lo: int
    hi: int
    contiguous: bool


def _axis(program: Program, name: str, begin: int, end: int) -> tuple[Array, Array]:
    """Intervals along b or h: one a value, or a single one where the mask ignores it."""
    if program.uses(name):
        each = np.arange(begin, end)
        return each, each
    return np.array([begin]), np.array([max(begin, end - 1)])


def _spans(begin: int, end: int, tile: int, tiles: Array) -> tuple[Array, Array]:
    """The positions of `tiles`, both ends included."""
    low = begin + tile * tiles
    return low, np.minimum(low + tile, end) - 1


def classify_grid(graph: Graph, params: MaskParams, grid: Grid) -> NDArray[np.uint8]:
    """The state of every tile, uint8 [B', H', query tiles, key tiles]; B', H' as in `TileRuns`.

    One evaluation a tile: for tests and small problems; see `tile_runs`.
    """
    program = simplify(graph)
    b, h, q, k = (
        (low.reshape(shape), high.reshape(shape))
        for (low, high), shape in zip(
            (
                _axis(program, "b", grid.b_begin, grid.b_end),
                _axis(program, "h", grid.h_begin, grid.h_end),
                _spans(grid.q_begin, grid.q_end, grid.tile_q, np.arange(grid.num_q_tiles)),
                _spans(grid.kv_begin, grid.kv_end, grid.tile_kv, np.arange(grid.num_kv_tiles)),
            ),
            ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)),
            strict=True,
        )
    )
    return classify_boxes(program, params, Boxes(b, h, q, k))


# --- refinement -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tiles:
    """Boxes of tiles: position on the b and h axes, half-open tile ranges of q and k."""

    b: Array
    h: Array
    q0: Array
    q1: Array
    k0: Array
    k1: Array

    def take(self, which: NDArray[np.bool_] | slice) -> _Tiles:
        """Some of the boxes."""
        return _Tiles(*(x[which] for x in self.columns()))

    def columns(self) -> tuple[Array, ...]:
        """All columns, in order."""
        return self.b, self.h, self.q0, self.q1, self.k0, self.k1


class _Refiner:
    def __init__(self, graph: Graph, params: MaskParams, grid: Grid) -> None:
        self.program, self.params, self.grid = simplify(graph), params, grid
        self.b = _axis(self.program, "b", grid.b_begin, grid.b_end)
        self.h = _axis(self.program, "h", grid.h_begin, grid.h_end)
        self.shape = (len(self.b[0]), len(self.h[0]), grid.num_q_tiles)

    def boxes(self) -> Iterator[tuple[_Tiles, NDArray[np.uint8]]]:
        """Disjoint non-empty boxes that are full, or partial and one tile large, with states."""
        rows, columns = self.grid.num_q_tiles, self.grid.num_kv_tiles
        if 0 in (*self.shape, columns):
            return
        combos = self.shape[0] * self.shape[1]
        span = _FANOUT ** max(0, _ceil_log(max(rows, columns), _FANOUT))
        while span > 1 and combos * -(-rows // span) * -(-columns // span) < _FIRST_BOXES // 4:
            span //= _FANOUT
        tiles = self._cut(span)
        while True:
            states = self._states(tiles)
            done = states == FULL if span > 1 else states != EMPTY
            if done.any():
                yield tiles.take(done), states[done]
            if span == 1:
                return
            partial = tiles.take(states == PARTIAL)
            if not len(partial.b):
                return
            share = len(partial.b) * span**2 / (combos * rows * columns)
            if span <= _FANOUT**2 and share > (0.25 if span == _FANOUT else 0.9):
                yield from self._dense(partial, span)
                return
            tiles, span = self._split(partial, span), span // _FANOUT

    def _dense(self, partial: _Tiles, span: int) -> Iterator[tuple[_Tiles, NDArray[np.uint8]]]:
        """The tiles inside `partial`, evaluated as a grid: what depends on one index only is then
        computed once a row or column, which pays when most tiles are left."""
        grid, columns = self.grid, self.grid.num_kv_tiles
        coarse = np.zeros((*self.shape[:2], -(-self.shape[2] // span), -(-columns // span)), bool)
        coarse[partial.b, partial.h, partial.q0 // span, partial.k0 // span] = True
        stripe = max(1, _GRID_TILES // columns // span) * span
        k = _spans(grid.kv_begin, grid.kv_end, grid.tile_kv, np.arange(columns))
        for b, h, first in np.ndindex(*self.shape[:2], -(-self.shape[2] // stripe)):
            rows = np.arange(first * stripe, min((first + 1) * stripe, self.shape[2]))
            low, high = _spans(grid.q_begin, grid.q_end, grid.tile_q, rows)
            boxes = Boxes(
                (self.b[0][b], self.b[1][b]),
                (self.h[0][h], self.h[1][h]),
                (low[:, None], high[:, None]),
                k,
            )
            wanted = coarse[b, h, rows[0] // span : rows[-1] // span + 1]
            wanted = wanted.repeat(span, 0)[: len(rows)].repeat(span, 1)[:, :columns]
            states = classify_boxes(self.program, self.params, boxes) * wanted
            q, k0, k1 = _row_runs(states)
            one = np.ones_like(q)
            yield _Tiles(b * one, h * one, q + rows[0], q + rows[0] + 1, k0, k1), states[q, k0]

    def _cut(self, span: int) -> _Tiles:
        rows, columns = self.grid.num_q_tiles, self.grid.num_kv_tiles
        b, h, q0, k0 = (
            x.reshape(-1)
            for x in np.meshgrid(
                np.arange(self.shape[0]),
                np.arange(self.shape[1]),
                np.arange(0, rows, span),
                np.arange(0, columns, span),
                indexing="ij",
            )
        )
        return _Tiles(b, h, q0, np.minimum(q0 + span, rows), k0, np.minimum(k0 + span, columns))

    def _split(self, tiles: _Tiles, span: int) -> _Tiles:
        """Every box cut into boxes of span / _FANOUT."""
        step = span // _FANOUT
        offsets = np.arange(_FANOUT) * step
        shape = (len(tiles.b), _FANOUT, _FANOUT)
        q0 = np.broadcast_to((tiles.q0[:, None] + offsets)[:, :, None], shape).reshape(-1)
        k0 = np.broadcast_to((tiles.k0[:, None] + offsets)[:, None, :], shape).reshape(-1)
        b, h, q1, k1 = (
            np.repeat(x, _FANOUT * _FANOUT) for x in (tiles.b, tiles.h, tiles.q1, tiles.k1)
        )
        new = _Tiles(b, h, q0, np.minimum(q0 + step, q1), k0, np.minimum(k0 + step, k1))
        return new.take((q0 < q1) & (k0 < k1))

    def _states(self, tiles: _Tiles) -> NDArray[np.uint8]:
        parts = [
            self._classify(tiles.take(slice(i, i + _CHUNK))) for i in range(0, len(tiles.b), _CHUNK)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _classify(self, tiles: _Tiles) -> NDArray[np.uint8]:
        grid = self.grid
        q = (
            grid.q_begin + tiles.q0 * grid.tile_q,
            np.minimum(grid.q_begin + tiles.q1 * grid.tile_q, grid.q_end) - 1,
        )
        k = (
            grid.kv_begin + tiles.k0 * grid.tile_kv,
            np.minimum(grid.kv_begin + tiles.k1 * grid.tile_kv, grid.kv_end) - 1,
        )
        b = self.b[0][tiles.b], self.b[1][tiles.b]
        h = self.h[0][tiles.h], self.h[1][tiles.h]
        return classify_boxes(self.program, self.params, Boxes(b, h, q, k))


def _row_runs(states: NDArray[np.uint8]) -> tuple[Array, Array, Array]:
    """(row, begin, end) of the runs of equal non-zero states in every row."""
    border = np.zeros((states.shape[0], 1), np.uint8)
    differs = np.diff(np.hstack([border, states, border]), axis=1) != 0
    row, at = np.nonzero(differs)
    same = (row[1:] == row[:-1]) & (states[row[:-1], np.minimum(at[:-1], states.shape[1] - 1)] != 0)
    return row[:-1][same], at[:-1][same], at[1:][same]


def _ceil_log(n: int, base: int) -> int:
    power = 0
    while base**power < n:
        power += 1
    return power


def tile_runs(graph: Graph, params: MaskParams, grid: Grid) -> TileRuns:
    """The non-empty tiles of the mask `graph` as runs; see `TileRuns`.

    Time and memory follow the boxes that the mask's border needs, not the number of tiles.
    """
    refiner = _Refiner(graph, params, grid)
    rows, begins, ends, states = [], [], [], []
    for tiles, state in refiner.boxes():
        base = (tiles.b * refiner.shape[1] + tiles.h) * refiner.shape[2] + tiles.q0
        heights = tiles.q1 - tiles.q0
        first = np.repeat(np.cumsum(heights) - heights, heights)
        rows.append(np.repeat(base, heights) + np.arange(len(first)) - first)
        begins.append(np.repeat(tiles.k0, heights))
        ends.append(np.repeat(tiles.k1, heights))
        states.append(np.repeat(state, heights))
    empty = np.zeros(0, np.int64)
    row, begin, end = (np.concatenate(x) if x else empty for x in (rows, begins, ends))
    order = np.argsort(row * (grid.num_kv_tiles + 1) + begin, kind="stable")
    row, begin, end = (x[order] for x in (row, begin, end))
    state = (np.concatenate(states) if states else np.zeros(0, np.uint8))[order]
    joins = (row[1:] == row[:-1]) & (begin[1:] == end[:-1]) & (state[1:] == state[:-1])
    starts = np.concatenate([[True], ~joins]) if len(row) else np.zeros(0, bool)
    lasts = np.concatenate([~joins, [True]]) if len(row) else np.zeros(0, bool)
    indptr = np.zeros(int(np.prod(refiner.shape)) + 1, np.int64)
    np.cumsum(np.bincount(row[starts], minlength=len(indptr) - 1), out=indptr[1:])
    return TileRuns(grid, refiner.shape, indptr, begin[starts], end[lasts], state[starts])


def kv_bounds(
    graph: Graph,
    params: MaskParams,
    b: int,
    h: int,
    q0: int,
    q1: int,
    kv_len: int,
    tile_kv: int = 1,
) -> KvBounds:
    """The hull of the keys that queries ``q0 <= q_idx < q1`` of one request and head can keep.

    Only boxes of keys that are partial are looked into. tile_kv: the granularity of `lo` and `hi`,
    and below which gaps do not count.
    """
    program = simplify(graph)
    tiles = max(0, -(-kv_len // tile_kv)) if q1 > q0 else 0
    one, span = np.ones(1, np.int64), 1
    while span < tiles:
        span *= _KEY_FANOUT
    live, found = np.arange(min(1, tiles)), [np.zeros((0, 2), np.int64)]
    while len(live):
        keys = live * tile_kv, np.minimum((live + span) * tile_kv, kv_len) - 1
        boxes = Boxes((b * one, b * one), (h * one, h * one), (q0 * one, (q1 - 1) * one), keys)
        states = classify_boxes(program, params, boxes)
        done = states == FULL if span > 1 else states != EMPTY
        found.append(np.stack([keys[0][done], keys[1][done] + 1], 1))
        live = live[(states == PARTIAL) & (span > 1)]
        span //= _KEY_FANOUT
        live = (live[:, None] + np.arange(_KEY_FANOUT) * span).reshape(-1)
        live = live[live < tiles]
    spans = np.concatenate(found)
    if not len(spans):
        return KvBounds(0, 0, True)
    spans = spans[np.argsort(spans[:, 0])]
    contiguous = bool((spans[1:, 0] == spans[:-1, 1]).all())
    return KvBounds(int(spans[0, 0]), int(spans[-1, 1]), contiguous)
