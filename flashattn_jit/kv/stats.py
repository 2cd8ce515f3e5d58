"""What a cache counts, and what `Cache.stats` reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Running sums of a cache; lists have an entry a group."""

    num_groups: int
    asked_tokens: int = 0
    hit_tokens: int = 0
    appended_tokens: int = 0
    host_bytes: int = 0
    swapped_bytes: int = 0
    evicted_pages: list[int] = field(init=False)
    reclaimed_pages: list[int] = field(init=False)
    copied_pages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.evicted_pages, self.reclaimed_pages, self.copied_pages = (
            [0] * self.num_groups for _ in range(3)
        )


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group's pages: num_pages = free + used + evictable.

    Args:
        num_pages: all pages, without the null page.
        free: pages that hold nothing.
        used: pages named by at least one sequence that is open and not suspended.
        evictable: pages of cached prefixes that no sequence uses; they go when room is needed.
        shared: used pages that more than one sequence names.
        page_bytes: bytes of a page in all layers of the group.
        evicted: pages so far whose prefix went, to make room.
        reclaimed: pages so far that a mask gave up.
        copied: pages so far that were copied before a write (forks).
    """

    num_pages: int
    free: int
    used: int
    evictable: int
    shared: int
    page_bytes: int
    evicted: int
    reclaimed: int
    copied: int

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.used * self.page_bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of a cache, and what it did so far.

    Args:
        groups: a `GroupStats` for each group of layers, then for each tail (`Spec.stores`).
        num_sequences: sequences that are open.
        num_suspended: those of them that are suspended.
        asked_tokens: tokens of opened sequences so far.
        hit_tokens: those of them that were cached.
        appended_tokens: tokens of committed steps so far.
        host_bytes: bytes of suspended sequences on the host now.
        swapped_bytes: bytes moved to and from the host so far.
    """

    groups: tuple[GroupStats, ...]
    num_sequences: int
    num_suspended: int
    asked_tokens: int
    hit_tokens: int
    appended_tokens: int
    host_bytes: int
    swapped_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were cached; 0.0 before the first."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0
