"""Which keys a rank needs, in pages, and the moves that bring rows to where they are computed.

The keys of a request are cut in pages of `page_size` positions. A rank needs the pages that the
interval form of the mask does not prove empty for its rows. It holds them as pages: positions stay
those of the request, and pages that it lacks are never visited.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .shares import Ints, Requests, Shares, entries_of, ranges, starts_of

PAGE_SIZE = 64
"""Keys of a page of most batches; the least that is sent."""

_MOST_PAGES = 8192
"""Pages of a batch, beyond which pages are larger."""


class Pages(NamedTuple):
    """The pages of a batch, numbered from the first request on, and which of them ranks need.

    indptr: request b has pages indptr[b] to indptr[b + 1]. bounds: page p has the packed key tokens
    bounds[p] to bounds[p + 1]. Rank rank[i] needs the pages begin[i] to end[i]; sorted by rank,
    then page, without gaps of length 0.
    """

    page_size: int
    indptr: Ints
    bounds: Ints
    rank: Ints
    begin: Ints
    end: Ints

    def of(self, rank: int) -> tuple[Ints, Ints]:
        """begin and end of the pages that one rank needs."""
        own = entries_of(self.rank, rank)
        return self.begin[own], self.end[own]


def needed_pages(tiles: NDArray[Any], requests: Requests, shares: Shares) -> Pages:
    """The pages that each rank needs for the rows that it computes."""
    tokens = int(requests.kv_indptr[-1])
    size = PAGE_SIZE * max(1, -(-tokens // (PAGE_SIZE * _MOST_PAGES)))
    count = -(-np.diff(requests.kv_indptr) // size)
    indptr = np.zeros(len(count) + 1, np.int64)
    count.cumsum(out=indptr[1:])
    first = (requests.kv_indptr[:-1] - indptr[:-1] * size).repeat(count)
    bounds = np.append(first + np.arange(indptr[-1]) * size, tokens)
    which, low, high = key_runs(tiles)
    base = indptr[tiles["request"][which]]
    low, high = base + low // size, base - (-high // size)
    rank, tile = _tiles_of(tiles, requests, shares)
    last = np.bincount(which, minlength=len(tiles)).cumsum()
    begin, end = np.append(0, last)[tile], last[tile]
    run = ranges(begin, end)
    return Pages(size, indptr, bounds, *_union(rank.repeat(end - begin), low[run], high[run]))


def _tiles_of(tiles: NDArray[Any], requests: Requests, shares: Shares) -> tuple[Ints, Ints]:
    """(rank, tile) of every tile that has a row of a rank."""
    begin = requests.q_indptr[tiles["request"]] + tiles["row_begin"]
    first = begin.searchsorted(shares.begin, "right") - 1
    last = begin.searchsorted(shares.end, "left")
    return shares.rank.repeat(last - first), ranges(first, last)


def key_runs(tiles: NDArray[Any]) -> tuple[Ints, Ints, Ints]:
    """Runs of visited keys: the tile, the first key and the last key + 1 of each, by tile."""
    some = tiles["kv_end"] > tiles["kv_begin"]
    celled = some & (tiles["cell"] > 0)
    whole = np.flatnonzero(some & ~celled)
    low, high = (tiles[n][whole].astype(np.int64) for n in ("kv_begin", "kv_end"))
    if not celled.any():
        return whole, low, high
    at = np.flatnonzero(celled)
    of = tiles[at]
    bits = np.unpackbits(of["cells"].astype("<u8").view(np.uint8).reshape(-1, 8), 1, None, "little")
    edges = np.diff(np.pad(bits.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, start = np.nonzero(edges > 0)
    _, stop = np.nonzero(edges < 0)
    base, cell = (of[n][row].astype(np.int64) for n in ("base", "cell"))
    low_cells = np.maximum(base + start * cell, of["kv_begin"][row])
    high_cells = np.minimum(base + stop * cell, of["kv_end"][row])
    which = np.concatenate([whole, at[row]])
    order = np.argsort(which, kind="stable")
    return (
        which[order],
        np.concatenate([low, low_cells])[order],
        np.concatenate([high, high_cells])[order],
    )


def _union(rank: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """The union of each rank's ranges [low, high): rank, begin and end, in order."""
    if not len(rank):
        return rank, low, high
    width = int(high.max()) + 1
    low, high = rank * width + low, rank * width + high
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    starts = np.flatnonzero(np.append(True, low[1:] > high[:-1]))
    begin, end = low[starts], high[np.append(starts[1:], len(low)) - 1]
    rank = begin // width
    return rank, begin - rank * width, end - rank * width


# --- moves ----------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Rows [begin[i], begin[i] + num_rows[i]) for rank peer[i]; sorted by peer."""

    peer: Ints
    begin: Ints
    num_rows: Ints

    def of(self, rank: int) -> tuple[Ints, Ints]:
        """begin and num_rows of one rank's."""
        own = entries_of(self.peer, rank)
        return self.begin[own], self.num_rows[own]


class Moves(NamedTuple):
    """What a rank sends and receives, itself included, in the order of the receiver's tokens.

    sent: rows of its shard. received: places in its buffer, of num_rows rows.
    """

    sent: Spans
    received: Spans
    num_rows: int


def query_moves(shares: Shares, requests: Requests, rank: int) -> Moves:
    """Query rows, from their homes to the ranks that compute them."""
    begin, end = shares.of(rank)
    place = starts_of(end - begin)
    received = _by_home(begin, end, place, requests.q_shards)
    sent = clipped(shares.rank, shares.begin, shares.end, requests.q_shards, rank)
    return Moves(sent, received, int((end - begin).sum()))


def key_moves(pages: Pages, requests: Requests, rank: int) -> Moves:
    """Keys, from their homes to the ranks that need them: whole pages, and an empty one."""
    begin, end = pages.of(rank)
    size = pages.page_size
    place = starts_of(end - begin) * size
    # The last page of a request may be shorter: its slots are not a run with those of the next.
    which, low, high = cut(begin, end, pages.indptr)
    place = place[which] + (low - begin[which]) * size
    received = _by_home(pages.bounds[low], pages.bounds[high], place, requests.kv_shards)
    sent = clipped(
        pages.rank, pages.bounds[pages.begin], pages.bounds[pages.end], requests.kv_shards, rank
    )
    return Moves(sent, received, (int((end - begin).sum()) + 1) * size)


def _by_home(begin: Ints, end: Ints, place: Ints, shards: Ints) -> Spans:
    """Ascending packed tokens, which are wanted at `place`, by the rank that holds them."""
    which, low, high = cut(begin, end, shards)
    home = shards.searchsorted(low, "right") - 1
    return Spans(home, place[which] + low - begin[which], high - low)


def clipped(rank: Ints, begin: Ints, end: Ints, shards: Ints, own: int) -> Spans:
    """The part of each rank's packed tokens that one shard holds."""
    low, high = np.maximum(begin, shards[own]), np.minimum(end, shards[own + 1])
    some = high > low
    return Spans(rank[some], low[some] - shards[own], (high - low)[some])


def cut(begin: Ints, end: Ints, bounds: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges cut at `bounds`, which ascend: the number of the range, begin and end of each part."""
    first = bounds.searchsorted(begin, "right") - 1
    count = np.maximum(bounds.searchsorted(end, "left") - first, 0) * (end > begin)
    which = np.arange(len(begin)).repeat(count)
    at = ranges(first, first + count)
    low, high = np.maximum(begin[which], bounds[at]), np.minimum(end[which], bounds[at + 1])
    some = high > low
    return which[some], low[some], high[some]


def rows_without_others(
    tiles: NDArray[Any], requests: Requests, shares: Shares, pages: Pages, rank: int
) -> tuple[Ints, Ints]:
    """The rows of a rank that need only what it holds: begin and end of runs, ascending."""
    first_row = requests.q_indptr[tiles["request"]] + tiles["row_begin"]
    at = first_row.searchsorted(requests.q_shards[rank : rank + 2])
    tiles = tiles[max(0, at[0] - 1) : at[1]]  # those of the rows that the rank holds
    which, low, high = key_runs(tiles)
    base = pages.indptr[tiles["request"][which]]
    size, shard = pages.page_size, requests.kv_shards[rank : rank + 2]
    first, last = pages.bounds[base + low // size], pages.bounds[base - (-high // size)]
    foreign = np.zeros(len(tiles), bool)
    foreign[which[(first < shard[0]) | (last > shard[1])]] = True
    begin = requests.q_indptr[tiles["request"]] + tiles["row_begin"]
    end = requests.q_indptr[tiles["request"]] + tiles["row_end"]
    edges = np.flatnonzero(np.diff(np.pad(~foreign, 1).astype(np.int8)))
    begin, end = begin[edges[::2]], end[edges[1::2] - 1]
    own_begin, own_end = (np.clip(x, *requests.q_shards[rank : rank + 2]) for x in shares.of(rank))
    # Both are ascending and disjoint: a run of one may overlap several of the other.
    first_of = end.searchsorted(own_begin, "right")
    count = np.maximum(begin.searchsorted(own_end, "left") - first_of, 0)
    part = np.arange(len(own_begin)).repeat(count)
    at = ranges(first_of, first_of + count)
    low, high = np.maximum(own_begin[part], begin[at]), np.minimum(own_end[part], end[at])
    return low[high > low], high[high > low]


def moved_tokens(pages: Pages, requests: Requests) -> Ints:
    """Of each rank, the key tokens that it receives from others."""
    begin, end = pages.bounds[pages.begin], pages.bounds[pages.end]
    low, high = requests.kv_shards[pages.rank], requests.kv_shards[pages.rank + 1]
    own = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
    foreign = np.bincount(pages.rank, end - begin - own, requests.num_ranks)
    return foreign.astype(np.int64)
