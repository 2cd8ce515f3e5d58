"""How many pages a mask leaves of a sequence that grows token by token."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

import numpy as np

from ..int_buffer import Ints
from ..reclaim import MaskPages
from ..spec import Group

_LAST_QUERY = 1 << 20
"""Pages that are read again by a query before this one are held, however short the sequence is."""


@dataclass(frozen=True, slots=True)
class Left:
    """Pages that are left of n full ones: table[n], and behind its end those of n - period and
    growth more."""

    table: Ints
    period: int = 1
    growth: int = 0

    def at(self, n: int) -> int:
        """Those that are left of n full ones."""
        periods = max(0, -((len(self.table) - 1 - n) // self.period))
        return int(self.table[n - periods * self.period]) + periods * self.growth

    def most(self, n: int) -> int:
        """The most that are left of fewer than n full ones; n is 1 or more."""
        found = int(self.table[:n].max())
        if self.growth:  # else the table has a whole period
            found = max(found, *map(self.at, range(max(0, n - self.period), n)))
        return found


def pages_left(group: Group, size: int, whole: int) -> Left | None:
    """Of up to `whole` full pages; None where all are left.

    A commit looks for dead pages whenever the next query enters another page.
    """
    return _left(group, size, 1 << max(0, whole - 1).bit_length()) if whole else None


@functools.lru_cache(maxsize=64)
def _left(group: Group, size: int, most: int) -> Left | None:
    mask = MaskPages(group, size, max(2 * most * size, _LAST_QUERY))
    if not mask.reclaims:
        return None
    left = _compacted(mask, size, most) if group.reclaim == "compact" else _holes(mask, size, most)
    left.table.flags.writeable = False
    return left


def _compacted(mask: MaskPages, size: int, most: int) -> Left:
    """What is left of n pages depends on what was left of n - 1 alone: from the first number that
    comes again, all do."""

    def read(pages: int) -> int:
        return mask.count_read(pages * size, pages)

    # What is dead stays so: before the first number of pages with a dead one, all are left.
    begin = bisect.bisect_left(range(most + 1), True, key=lambda n: read(n) < n)
    later: dict[int, int] = {}  # what is left, in order, and where it was so first
    last, n = begin - 1, begin
    while n <= most:
        last = read(last + 1)
        if last < begin or last in later:
            table = np.concatenate((np.arange(begin), np.fromiter(later, np.int64)))
            return Left(table, n - later.get(last, last))
        later[last] = n
        n += 1
    return Left(np.concatenate((np.arange(begin), np.fromiter(later, np.int64))))


def _holes(mask: MaskPages, size: int, most: int) -> Left:
    shift = mask.shift()
    if shift is not None:
        first, period = -(-shift.first // size), math.lcm(shift.period, size) // size
        if first + period < most:
            ends = _ends(mask, size, first + period, most)
            if _is_periodic(mask, size, first, ends, most):
                return _periodic(first, ends, most)
    return _table(_ends(mask, size, most, most), most)


def _ends(mask: MaskPages, size: int, pages: int, most: int) -> Ints:
    """[pages]: the number of full pages from which on each one is dead; most + 1 if it is not.

    What is dead stays so, which bisection needs.
    """
    ends = np.empty(pages, np.int64)
    parts = [(0, most + 1, np.arange(pages))]  # pages that are left of `low` and dead of `high`
    while parts:
        low, high, own = parts.pop()
        if high - low == 1:
            ends[own] = high
        elif len(own):
            n, start = (low + high) // 2, int(own[0])
            read = mask.read(n * size, start, int(own[-1]) + 1)[own - start] | (own >= n)
            parts += [(low, n, own[~read]), (n, high, own[read])]
    return ends


def _is_periodic(mask: MaskPages, size: int, first: int, ends: Ints, most: int) -> bool:
    """Whether the pages behind those of `ends` die as late as those a multiple of the period before
    them, which are the ones from `first` on.

    Page p at n full ones is judged for the queries from n * size to the last one of the mask. With
    p and n moved by s pages, this box is one of fewer queries for p and n: up to s * size fewer.
    So a page cannot die later than its period says, nor earlier if it is read in a part of all
    those boxes: with the queries from the last n at which it is left, to the end for s = most - 1.
    """
    end = mask.max_kv_len - (most - 1) * size
    pages = np.arange(len(ends))
    is_judged = (pages >= first) & (ends > pages + 1)
    for n in np.unique(ends[is_judged]).tolist():
        own = pages[is_judged & (ends == n)]
        start = int(own[0])
        if not mask.read((n - 1) * size, start, int(own[-1]) + 1, end)[own - start].all():
            return False
    return True


def _periodic(first: int, ends: Ints, most: int) -> Left:
    """The table up to where all of the pages of `ends` that die are dead, and a period more."""
    period = len(ends) - first
    stays = ends > most
    settled = int(ends[~stays].max(initial=len(ends)))
    size = min(settled + period - 1, most)
    pages = np.arange(size)
    periods = np.maximum(0, -((len(ends) - 1 - pages) // period))
    source = pages - periods * period
    later = np.where(stays[source], most + 1, ends[source] + periods * period)
    return Left(_table(later, size).table, period, int(stays[first:].sum()))


def _table(ends: Ints, most: int) -> Left:
    dead = np.bincount(np.minimum(ends, most + 1), minlength=most + 2)[: most + 1]
    return Left(np.arange(most + 1) - np.cumsum(dead))
