"""Tile statistics of a problem's mask, from its interval form: what a kernel visits and skips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...variants.interval.terms import PARTIAL
from ...variants.interval.tile_runs import Grid, MaskParams, TileRuns, tile_runs
from ...variants.ir.ir import Graph
from ..table import table

OPAQUE_MASK = "the mask is C++ text, which is not analysed: its code runs on every tile"

_MAP_ROWS, _MAP_COLUMNS = 12, 48
_SHADES = " .:+*#"
_MAX_HEADS = 16


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of tiles by state. A visited tile is partial (runs mask code) or full (does not)."""

    empty: int
    partial: int
    full: int

    @property
    def total(self) -> int:
        """All tiles."""
        return self.empty + self.partial + self.full

    @property
    def visited_share(self) -> float:
        """Visited tiles over all; 1.0 if there are no tiles."""
        return (self.partial + self.full) / self.total if self.total else 1.0

    def cells(self) -> list[str]:
        """Text for a table: visited, full, partial, empty, each with its share."""
        total = max(1, self.total)
        visited = self.partial + self.full
        return [f"{n:,} ({n / total:.1%})" for n in (visited, self.full, self.partial, self.empty)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of all requests and heads. `str()` gives counts and a map.

    tile_q, tile_kv: query positions and keys of a tile. runs: the tiles of the mask as compact
    runs, one `TileRuns` for neighbouring requests of equal lengths; empty if the variant has no
    mask to analyse: then every tile counts as full, or as partial where the mask is C++ text.
    """

    tile_q: int
    tile_kv: int
    counts: Counts
    per_head: tuple[Counts, ...]
    runs: tuple[TileRuns, ...]
    note: str = ""

    def coverage(self, rows: int = 256, columns: int = 256) -> NDArray[np.float64]:
        """The share of visited tiles in each cell of a map of the first request and head.

        The map is at most [rows, columns]; it takes memory for rows x key tiles.
        """
        if not self.runs:
            return np.ones((1, 1))
        return _coverage(self.runs[0], rows, columns)

    def __str__(self) -> str:
        header = ["", "visited", "full", "partial", "empty"]
        lines = [["all", *self.counts.cells()]]
        lines += [[f"head {h}", *c.cells()] for h, c in enumerate(self.per_head[:_MAX_HEADS])]
        text = f"tiles of {self.tile_q} query positions x {self.tile_kv} keys\n"
        text += table(header, lines, "  ")
        hidden = len(self.per_head) - _MAX_HEADS
        if hidden > 0:
            text += f"\n  ... and {hidden} more heads"
        if self.note:
            text += f"\n  {self.note}"
        if self.runs and self.counts.empty:
            text += "\n" + _picture(self.coverage(_MAP_ROWS, _MAP_COLUMNS), self._caption())
        return text

    def _caption(self) -> str:
        several = sum((r.grid.b_end - r.grid.b_begin) for r in self.runs) > 1 or self.per_head
        where = " of request 0, head 0" if several else ""
        return f"share of tiles visited{where}: queries down, keys across"


def analyse(
    mask: Graph | None,
    params: MaskParams,
    num_q_heads: int,
    tile_q: int,
    tile_kv: int,
    opaque: bool = False,
) -> Tiles:
    """The tiles of requests of the params' lengths. Without a `mask` all tiles are full.

    opaque: the mask is C++ text, which has no graph: then all tiles are partial, as in kernels.

    Time and memory grow with the length of the mask's border, not with the number of tiles.
    """
    q_len, kv_len, q_offset = params.q_len, params.kv_len, params.q_offset
    if mask is None:
        total = sum(-(-q // tile_q) * -(-k // tile_kv) for q, k in zip(q_len, kv_len, strict=True))
        tiles = total * num_q_heads
        counts = Counts(0, tiles, 0) if opaque else Counts(0, 0, tiles)
        return Tiles(tile_q, tile_kv, counts, (), (), OPAQUE_MASK if opaque else "")
    runs = tuple(
        tile_runs(
            mask, params,
            Grid(q_offset[b0], q_offset[b0] + q_len[b0], 0, kv_len[b0], tile_q, tile_kv,
                 b_begin=b0, b_end=b1, h_begin=0, h_end=num_q_heads),
        )
        for b0, b1 in _groups(q_len, kv_len, q_offset)
    )  # fmt: skip
    columns = zip((0, 0, 0), *(r.counts() for r in runs), strict=True)  # there may be no run
    counts = Counts(*map(sum, columns))
    return Tiles(tile_q, tile_kv, counts, _per_head(runs), runs)


def _groups(*lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Half-open ranges of neighbouring requests whose lengths are all equal."""
    each = list(zip(*lengths, strict=True))
    starts = [i for i in range(len(each)) if i == 0 or each[i] != each[i - 1]]
    return list(zip(starts, [*starts, len(each)][1:], strict=True))


def _per_head(runs: Sequence[TileRuns]) -> tuple[Counts, ...]:
    """Counts of each head over all requests; empty if the mask does not depend on the head."""
    heads = max((r.shape[1] for r in runs), default=1)
    if heads == 1:
        return ()
    sums = np.zeros((heads, 3), np.int64)
    for r in runs:
        repeat = (r.grid.b_end - r.grid.b_begin) // r.shape[0]
        row = np.repeat(np.arange(len(r.indptr) - 1), np.diff(r.indptr))
        head = row // r.shape[2] % r.shape[1]
        lengths = r.end - r.begin
        for column, which in ((1, r.state == PARTIAL), (2, r.state != PARTIAL)):
            sums[:, column] += repeat * np.bincount(
                head[which], weights=lengths[which], minlength=heads
            ).astype(np.int64)
        sums[:, 0] += repeat * r.shape[0] * r.shape[2] * r.grid.num_kv_tiles
    sums[:, 0] -= sums[:, 1] + sums[:, 2]
    return tuple(Counts(*map(int, line)) for line in sums)


def _coverage(runs: TileRuns, rows: int, columns: int) -> NDArray[np.float64]:
    height, width = runs.grid.num_q_tiles, runs.grid.num_kv_tiles
    if not height or not width:
        return np.zeros((1, 1))
    rows, columns = min(rows, height), min(columns, width)
    last = int(runs.indptr[height])  # the first request's and head's rows come first
    row = np.repeat(np.arange(height), np.diff(runs.indptr[: height + 1])) * rows // height
    steps = np.zeros((rows, width + 1), np.int64)
    np.add.at(steps, (row, runs.begin[:last]), 1)
    np.add.at(steps, (row, runs.end[:last]), -1)
    visited = np.cumsum(steps, axis=1)[:, :width]
    edges = -(-np.arange(columns) * width // columns)
    cells = np.add.reduceat(visited, edges, axis=1)
    heights = np.bincount(np.arange(height) * rows // height, minlength=rows)
    widths = np.diff([*edges, width])
    share: NDArray[np.float64] = cells / (heights[:, None] * widths)
    return share


def _picture(coverage: NDArray[np.float64], caption: str) -> str:
    """The map with one character per cell; a cell with any visited tile is not blank."""
    top = len(_SHADES) - 1
    levels = np.minimum(np.ceil(coverage * top).astype(int), top)
    lines = ["".join(_SHADES[x] for x in line) for line in levels]
    return "\n".join([f"  {caption}", *(f"  |{line}|" for line in lines)])
