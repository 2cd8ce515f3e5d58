"""`Timeline`: who owns a group's pages, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from ..late_binding import upper

if TYPE_CHECKING:
    from .cache import Cache


@dataclass(frozen=True, slots=True)
class Sample:
    """The owners of a group's pages at one time; all numbers together are the group's pages.

    own: pages that only one sequence names, by its number. shared: named by several. evictable,
    free: as in `GroupStats`.
    """

    own: dict[int, int]
    shared: int
    evictable: int
    free: int


class Timeline:
    """Samples of a group's pages by owner; call `sample` after each step.

    Example:
        >>> timeline = fa.kv.Timeline(cache)
        >>> ...  # steps, with timeline.sample() after each
        >>> timeline.plot("pages.png")
    """

    def __init__(self, cache: Cache, group: int = 0) -> None:
        self._cache = cache
        self.group = cache.check_group(group)
        self.samples: list[Sample] = []

    def sample(self) -> Sample:
        """Note the owners of now, and return them."""
        pages = self._cache.pools[self.group]
        own = {
            seq.number: int((pages.refs[seq.tables[self.group].view] == 1).sum())
            for seq in self._cache.sequences
            if not seq.is_suspended
        }
        shared = int((pages.refs > 1).sum())
        found = Sample(own, shared, pages.num_evictable, pages.num_free)
        self.samples.append(found)
        return found

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the pages of each owner over the samples; the name's suffix decides the format.

        Raises InputError if there is no sample, or matplotlib is missing or cannot write this
        format.
        """
        upper("plot_pages")(self.samples, path)
