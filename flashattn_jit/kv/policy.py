"""Which cached pages go first when a sequence needs room.

A policy is a function from an `Entry` to a key; the entry with the least key loses its last pages
first. An entry is a run of pages in the prefix index. Entries whose continuation could go instead
are not asked, so that a prefix outlives what follows it, whatever the keys. Keys must compare with
each other; what a policy raises leaves the pages as they were. It may not call the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..ops.arguments.checks import shown


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy knows of a run of pages.

    order: a counter of the cache at the entry's last use, unique and rising. age_s: seconds since
    then. num_uses: sequences that were opened with it. priority: the highest that a sequence of it
    was opened with, from 0 to 100. position: the first token behind it. num_bytes: of a page, in
    the group that needs room. recompute_ns: what computing a page of it again would take.
    """

    order: int
    age_s: float
    num_uses: int
    priority: int
    position: int
    num_bytes: int
    recompute_ns: float


Policy = Callable[[Entry], Any]


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InputError(f"{name}={shown(value)} must be a positive number of seconds")


@dataclass(frozen=True, slots=True)
class LRU:
    """The least recently used goes first."""

    def __call__(self, entry: Entry) -> int:
        """Its last use."""
        return entry.order


@dataclass(frozen=True, slots=True)
class LFU:
    """The least often used goes first, of equals the least recently used."""

    def __call__(self, entry: Entry) -> tuple[int, int]:
        """Its number of uses."""
        return entry.num_uses, entry.order


@dataclass(frozen=True, slots=True)
class Priority:
    """The lowest priority goes first, of equals the least recently used.

    retention_s: how many seconds after its last use an entry keeps its priority, which then falls
    to 0 within the same time again. A use restores it. None of them pins a page for good.
    """

    retention_s: float = 600.0

    def __post_init__(self) -> None:
        _check_seconds("retention_s", self.retention_s)

    def __call__(self, entry: Entry) -> tuple[float, int]:
        """The priority that is left."""
        left = 2.0 - entry.age_s / self.retention_s
        return entry.priority * min(1.0, max(0.0, left)), entry.order


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """What costs least to compute again, per byte, goes first; the cost halves with age.

    half_life_s: seconds without a use after which an entry counts half. Pages far behind in a long
    prompt cost more than those in front, as each of their tokens attends to all before it.
    """

    half_life_s: float = 60.0

    def __post_init__(self) -> None:
        _check_seconds("half_life_s", self.half_life_s)

    def __call__(self, entry: Entry) -> tuple[float, int]:
        """Nanoseconds a byte, halved once each half-life."""
        cost = entry.recompute_ns / entry.num_bytes
        return cost * 0.5 ** (entry.age_s / self.half_life_s), entry.order
