"""`Sequence`: the tokens of one request, and the pages that hold their keys and values."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from ..errors import InputError, SequenceError
from ..ops.arguments.checks import check_int
from .copies import Saved, load_pages, save_pages
from .int_buffer import IntBuffer, Ints
from .pages import NULL
from .tree import Place

if TYPE_CHECKING:
    from .cache import Cache
    from .step import Step


class Saving(NamedTuple):
    """A suspended group: which entries of the table had pages, and their contents."""

    entries: Ints
    contents: Saved


class Sequence:
    """The tokens of one request, and the pages of each group that hold their keys and values.

    `Cache.open` and `fork` make sequences. A sequence is a context manager that closes it.

    Example:
        >>> with cache.open(prompt) as seq:
        ...     with cache.step([(seq, prompt[seq.num_cached :])]) as step:
        ...         ...
    """

    def __init__(self, cache: Cache, number: int, namespace: bytes, priority: int) -> None:
        self.cache = cache
        self.number = number
        self.namespace = namespace
        self.priority = priority
        self.num_cached = 0
        """Tokens whose keys and values were in the cache when the sequence was opened.

        `trim` leaves it, so it may be larger than kv_len then; a fork has that of its sequence.
        """
        num_groups = len(cache.spec.stores)
        self.tokens = IntBuffer(dtype=np.int64)
        self.tables = [IntBuffer() for _ in range(num_groups)]
        self.removed = [0] * num_groups  # keys that compaction has removed, by group
        self.least_len = [0] * num_groups  # of kv_len, where no query reads what was compacted
        self.place: Place = cache.tree.place(cache.tree.root(namespace), 0)
        self.publishes = True
        self.version = 0  # of the tables: changes before their ends, growth apart
        self.step: Step | None = None
        self.saved: list[Saving] | None = None
        self.closed = False

    # --- what is known of it ----------------------------------------------------------------------

    @property
    def kv_len(self) -> int:
        """Tokens of the sequence: its next token has this position."""
        return self.tokens.length

    @property
    def token_ids(self) -> Ints:
        """The tokens, a copy [kv_len], int64."""
        found: Ints = self.tokens.view.copy()
        return found

    def pages(self, group: int = 0) -> Ints:
        """The page table of a group, a copy, int32; 0 for pages that the group's mask gave up."""
        self.check_usable("pages()")
        found: Ints = self.tables[self.cache.check_group(group)].view.copy()
        return found

    def group_len(self, group: int) -> int:
        """Keys that the table of a group counts: kv_len less those that compaction removed.

        Raises InputError for a number that no group has.
        """
        return self.tokens.length - self.removed[self.cache.check_group(group)]

    @property
    def is_suspended(self) -> bool:
        """Whether its pages are in host memory."""
        return self.saved is not None

    @property
    def in_step(self) -> bool:
        """Whether it is in an open step."""
        return self.step is not None and self.step.is_open

    # --- what can be done with it -----------------------------------------------------------------

    def fork(self) -> Sequence:
        """A sequence with the same tokens and pages, which the two share from now on.

        The last page, where it is not full, is copied when one of the two appends to it.

        Raises SequenceError if the sequence is closed, suspended or in an open step.
        """
        self.check_usable("fork()")
        self.cache.changing = "fork()"
        child = self.cache.new_sequence(self.namespace, self.priority)
        child.num_cached = self.num_cached
        child.tokens = self.tokens.copy()
        for group, (pages, table) in enumerate(zip(self.cache.pools, self.tables, strict=True)):
            pages.hold(table.view)
            child.tables[group] = table.copy()
        child.removed, child.least_len = list(self.removed), list(self.least_len)
        child.place, child.publishes = self.place, self.publishes
        self.cache.changing = ""
        return child

    def trim(self, kv_len: int) -> None:
        """Forget the tokens from position kv_len on, such as drafts that were not accepted.

        Raises:
            InputError: kv_len is not in 0 to the sequence's; or a query at kv_len reads pages that
                the mask of a group has given up, or kv_len is in a page of which a tail has no rows
                any more, as it was quantised: keep them by the cache's `lookback`.
            SequenceError: the sequence is closed, suspended or in an open step.
        """
        kv_len = self.check_trim(kv_len)
        size = self.cache.spec.page_size
        self.cache.changing = "trim()"
        self.version += 1
        self.tokens.truncate(kv_len)
        for group, (pages, table) in enumerate(zip(self.cache.pools, self.tables, strict=True)):
            count = -(-(kv_len - self.removed[group]) // size)
            if count < table.length:
                pages.release(table.view[count:])
                table.truncate(count)
        full = kv_len // size
        if full < self.place.position:
            # Behind a page in the middle of a path, whose digest is not at hand: the tree looks
            # from its root on when the next page is full.
            self.place = self.cache.tree.place(self.cache.tree.root(self.namespace), 0)
        self.cache.changing = ""

    def check_trim(self, kv_len: int) -> int:
        """kv_len as an int. Raises what ``trim(kv_len)`` raises, and changes nothing."""
        self.check_usable("trim()")
        kv_len = check_int("kv_len", kv_len, 0, self.kv_len)
        for group, removed in enumerate(self.removed):
            self._check_trim(group, removed, kv_len)
        return kv_len

    def _check_trim(self, group: int, removed: int, kv_len: int) -> None:
        mask, table = self.cache.masks[group], self.tables[group].view
        if not mask.reclaims or kv_len == self.kv_len:
            return
        left = max(0, kv_len - removed)
        dead = mask.dead(left, left)
        if left % self.cache.spec.page_size:
            dead[-1] = False  # new tokens go to its last page
        lost = (table[: len(dead)] == NULL) & ~dead
        if not lost.any() and kv_len >= self.least_len[group]:
            return
        spec = self.cache.spec
        if group >= len(spec.groups):
            raise InputError(
                f"kv_len={kv_len} is in a page that was quantised, whose rows "
                f"{spec.store_name(group)} has not kept: trim to a multiple of page_size="
                f"{spec.page_size}, or make the cache with a larger lookback than "
                f"{self.cache.lookback}; of pages that open() found there are no rows"
            )
        raise InputError(
            f"kv_len={kv_len} is too far back: a query there reads keys of group {group} that "
            f"its mask has given up at kv_len={self.kv_len}; make the cache with a larger "
            f"lookback than {self.cache.lookback}"
        )

    def suspend(self) -> None:
        """Move the contents of the sequence's pages to host memory, in one copy, and release them.

        Raises SequenceError if it is closed, suspended or in an open step.
        """
        self.check_usable("suspend()")
        cache = self.cache
        cache.check_memory("suspend()")
        saved = []
        for pages, table in zip(cache.pools, self.tables, strict=True):
            entries = np.flatnonzero(table.view)
            saved.append(Saving(entries, save_pages(pages.memory, table.view[entries])))
        cache.changing = "suspend()"
        self.saved = saved
        cache.count_saved(saved, 1, [len(x.entries) for x in saved])
        self._release()
        cache.changing = ""

    def resume(self) -> None:
        """Bring a suspended sequence back: pages that the prefix index still has are shared again,
        the others are copied.

        Raises:
            OutOfPages: the cache has too few pages; the sequence stays suspended.
            SequenceError: it is closed or not suspended.
        """
        self.check_usable("resume()", suspended=True)
        assert self.saved is not None
        cache, full = self.cache, self.kv_len // self.cache.spec.page_size
        found = cache.find(self) if self.publishes else [np.zeros(0, np.int32)] * len(self.saved)
        shared, needed = [], []
        for table, (entries, _), known in zip(self.tables, self.saved, found, strict=True):
            there = np.zeros(table.length, np.int32)
            reach = min(full, len(known))
            there[:reach] = known[:reach]
            there[np.setdiff1d(np.arange(table.length), entries)] = NULL
            shared.append(there)
            needed.append(len(entries) - int((there != NULL).sum()))
        cache.make_room(needed, shared)
        missing = [
            np.flatnonzero(there[saving.entries] == NULL)
            for there, saving in zip(shared, self.saved, strict=True)
        ]
        cache.changing = "resume()"
        for pages, there in zip(cache.pools, shared, strict=True):
            pages.hold(there)
        taken = cache.take(needed)
        for there, saving, rows, new in zip(shared, self.saved, missing, taken, strict=True):
            there[saving.entries[rows]] = new
        with cache.giving_back(shared):
            for pages, saving, rows, new in zip(
                cache.pools, self.saved, missing, taken, strict=True
            ):
                load_pages(pages.memory, new, saving.contents, rows)
        for table, own in zip(self.tables, shared, strict=True):
            table.view[:] = own
        cache.count_saved(self.saved, -1, needed)
        self.saved = None
        self.version += 1
        cache.changing = ""

    def close(self) -> None:
        """Release its pages. Full ones stay in the prefix index until their room is needed.

        Raises SequenceError if it is closed already or in an open step.
        """
        self.check_usable("close()", suspended=None)
        self.cache.changing = "close()"
        if self.saved is not None:
            self.cache.count_saved(self.saved, -1)
            self.saved = None
        else:
            self._release()
        self.closed = True
        self.cache.forget(self)
        self.cache.changing = ""

    def _release(self) -> None:
        self.cache.touch(self)
        for pages, table in zip(self.cache.pools, self.tables, strict=True):
            pages.release(table.view)

    # --- checks -----------------------------------------------------------------------------------

    def check_usable(self, what: str, suspended: bool | None = False) -> None:
        """Raises SequenceError unless the sequence is open, and suspended or not as wanted."""
        self.cache.check_access()
        if self.closed:
            raise SequenceError(f"{what} of sequence {self.number}, which is closed")
        if self.in_step:
            raise SequenceError(
                f"{what} of sequence {self.number}, which is in an open step: commit() or abort() "
                "the step first"
            )
        if suspended is not None and suspended != self.is_suspended:
            state = "is suspended: resume() it first" if self.is_suspended else "is not suspended"
            raise SequenceError(f"{what} of sequence {self.number}, which {state}")

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.closed or self.cache.changing:
            return
        if self.step is not None and self.step.is_open:
            self.step.abort()
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InputError("a Sequence cannot be copied or pickled; fork() it")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "suspended" if self.is_suspended else "open"
        return f"<Sequence {self.number}: kv_len {self.kv_len}, {state}>"
