"""Which rank computes which query rows: `deal`, by the cost of the mask's interval form.

Rows stay with the rank that holds them, their home, as far as the loads allow. What a rank has
beyond the share of each goes to ranks that have less, costliest rows first, so that few rows move.
All of it depends on the lengths, the mask and the number of ranks alone: every rank finds the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ROW_KEYS = 64
"""What a row costs besides its keys (its load, its result, their transfer), in keys."""

GRANULE = 16
"""Query rows that stay together, counted from the first of their request; more where bits are the
same for every number of ranks."""

SLACK = 0.02
"""How far, relative to the mean, a rank's load may be above the mean before rows are moved."""

TILE = np.dtype({
    "names": ["request", "row_begin", "row_end", "kv_begin", "kv_end", "base", "cell", "visited",
              "cells"],
    "formats": [*["<i4"] * 8, "<u8"],
})  # fmt: skip
"""`RowTile` of csrc/scheduler/units.h."""


class Requests(NamedTuple):
    """The packed batch, and the tokens that each rank holds: its shards.

    q_indptr, kv_indptr: [num_requests + 1]. q_shards, kv_shards: [num_ranks + 1]; rank r holds the
    packed tokens q_shards[r] to q_shards[r + 1]. q_offset: position of each request's first row.
    """

    q_indptr: Ints
    kv_indptr: Ints
    q_shards: Ints
    kv_shards: Ints
    q_offset: Ints

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.q_shards) - 1


class Shares(NamedTuple):
    """Packed query rows [begin[i], end[i]) are computed by rank[i]; sorted by rank, then row.

    load: the cost of each rank's rows, in pairs of a row and a key. home_load: what it would be if
    no row moved. least: the smallest possible largest load: the mean, or the costliest granule.
    """

    rank: Ints
    begin: Ints
    end: Ints
    load: NDArray[np.float64]
    home_load: NDArray[np.float64]
    least: float

    def of(self, rank: int) -> tuple[Ints, Ints]:
        """begin and end of the rows of one rank."""
        own = entries_of(self.rank, rank)
        return self.begin[own], self.end[own]

    @property
    def balance(self) -> float:
        """The largest load over the mean; 1 without work."""
        mean = self.load.mean()
        return float(self.load.max() / mean) if mean else 1.0


class _Costs:
    """The cost of packed rows as a sum: linear inside a tile."""

    def __init__(self, tiles: NDArray[Any], q_indptr: Ints, granules: Ints) -> None:
        rows = (tiles["row_end"] - tiles["row_begin"]).astype(np.int64)
        self.slopes = tiles["visited"] + np.float64(ROW_KEYS)
        self.rows = np.zeros(len(tiles) + 1)
        rows.cumsum(out=self.rows[1:])
        self.sums = np.zeros(len(tiles) + 1)
        (rows * self.slopes).cumsum(out=self.sums[1:])
        self.starts, self.granules = q_indptr.tolist(), granules.tolist()
        # Their entries are Python's floats, which entries of arrays are not.
        self._rows, self._sums, self._slopes = (
            cast("Sequence[float]", x.data) for x in (self.rows, self.sums, self.slopes)
        )

    def at(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """The cost of all rows before each of these."""
        costs: NDArray[np.float64] = np.interp(rows, self.rows, self.sums)
        return costs

    def until(self, row: float) -> float:
        """As `at`, of one row."""
        at = min(bisect_right(self._rows, row), len(self._slopes)) - 1
        return self._sums[at] + (row - self._rows[at]) * self._slopes[at]

    def row_at(self, cost: float) -> float:
        """The row at which `until` reaches a cost."""
        at = max(0, min(bisect_right(self._sums, cost), len(self._slopes)) - 1)
        return self._rows[at] + (cost - self._sums[at]) / self._slopes[at]

    def cut_at(self, cost: float, begin: int, end: int) -> int:
        """The nearest row to `row_at` where rows may be cut, from begin to end."""
        row = self.row_at(cost)
        after = bisect_right(self.starts, row, hi=len(self.starts) - 1)
        start, granule = self.starts[after - 1], self.granules[after - 1]
        cut = start + round((row - start) / granule) * granule
        return max(begin, min(cut, end, self.starts[after]))  # type: ignore[no-any-return]


def deal(tiles: NDArray[Any], requests: Requests, granules: Ints, always: bool = False) -> Shares:
    """The rows of each rank.

    tiles: of all requests, in order, as `TILE`. granules: for each request, the rows that stay
    together. always: also where shards divide them.
    """
    shards, world = requests.q_shards, requests.num_ranks
    if always:
        shards = _rounded(shards, requests.q_indptr, granules)
    if not len(tiles):
        none, zero = np.zeros(0, np.int64), np.zeros(world)
        return Shares(none, none, none, zero, zero, 0.0)
    costs = _Costs(tiles, requests.q_indptr, granules)
    ends = costs.at(shards)
    home_load = np.diff(ends)
    mean = float(ends[-1]) / world
    most = mean * (1 + SLACK)
    kept = np.stack([shards[:-1], shards[1:]], 1)
    pieces: list[tuple[int, int, int]] = []
    if home_load.max() > most:
        pieces = _moved(costs, kept, home_load, most)
    parts = [(r, a, b) for r, (a, b) in enumerate(kept.tolist()) if b > a]
    rank, begin, end = np.array(sorted([*parts, *pieces]), np.int64).reshape(-1, 3).T
    cost = costs.at(end) - costs.at(begin)
    load = np.bincount(rank, cost, world).astype(np.float64)
    rows = np.minimum(np.diff(requests.q_indptr), granules)[tiles["request"]]
    longest = rows * costs.slopes
    return Shares(rank, begin, end, load, home_load, max(mean, float(longest.max())))


def _rounded(rows: Ints, q_indptr: Ints, granules: Ints) -> Ints:
    """Packed rows, each moved to the nearest one where a request may be cut."""
    if len(q_indptr) < 2:
        return rows
    request = np.minimum(q_indptr.searchsorted(rows, "right"), len(q_indptr) - 1) - 1
    start, granule = q_indptr[request], granules[request]
    cut = start + (rows - start + granule // 2) // granule * granule
    return np.minimum(cut, q_indptr[request + 1])  # type: ignore[no-any-return]


def _moved(
    costs: _Costs, kept: Ints, home_load: NDArray[np.float64], most: float
) -> list[tuple[int, int, int]]:
    """(rank, begin, end) of rows that leave their home; shortens `kept`, the rows of each home."""
    room = [(r, float(most - load)) for r, load in enumerate(home_load) if load < most]
    room.sort(key=lambda x: (-x[1], x[0]))
    pieces: list[tuple[int, int, int]] = []
    at, free = 0, room[0][1]
    donors = np.flatnonzero(home_load > most)
    low, high = kept[donors].T
    costs_at = (costs.at(x).tolist() for x in (low, (low + high) / 2, high))
    for donor, first, last, before_first, before_middle, before_last in zip(
        donors.tolist(), low.tolist(), high.tolist(), *costs_at, strict=True
    ):
        excess = float(home_load[donor]) - most
        if before_last - before_middle >= before_middle - before_first:
            begin, end = costs.cut_at(before_last - excess, first, last), last
        else:
            begin, end = first, costs.cut_at(before_first + excess, first, last)
        moved, before, after = begin, costs.until(begin), costs.until(end)
        while moved < end and at < len(room):
            whole = after - before <= free
            to = end if whole else costs.cut_at(before + free, moved, end)
            if to > moved:
                pieces.append((room[at][0], moved, to))
                spent = costs.until(to)
                free -= spent - before
                moved, before = to, spent
            if moved < end:
                at += 1
                free = room[at][1] if at < len(room) else 0.0
        # Rows that no rank has room for, for lack of a finer cut, stay at the side of the home.
        if begin == first and end < last:
            kept[donor, 0] = moved
        else:
            kept[donor, 1] = begin
            if moved < end:
                pieces.append((donor, moved, end))
    return pieces


def entries_of(ranks: Ints, rank: int) -> slice:
    """The entries of one rank in `ranks`, which ascend."""
    return slice(*ranks.searchsorted([rank, rank + 1]))


def starts_of(counts: Ints) -> Ints:
    """0, counts[0], counts[0] + counts[1], ...: where each of some adjacent ranges begins."""
    return counts.cumsum() - counts


def within(counts: Ints) -> Ints:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return ranges(np.zeros_like(counts), counts)


def ranges(begin: Ints, end: Ints) -> Ints:
    """The members of ranges, one range after another."""
    counts = end - begin
    ends = counts.cumsum()
    members: Ints = np.arange(ends[-1] if len(ends) else 0)
    members += (begin - ends + counts).repeat(counts)
    return members


def even_shards(tokens: int, num_ranks: int) -> Ints:
    """Shards as `torch.chunk` and `Shard(0)` of a DTensor divide a dim: the last may be shorter."""
    size = -(-tokens // num_ranks)
    return np.minimum(np.arange(num_ranks + 1, dtype=np.int64) * size, tokens)
