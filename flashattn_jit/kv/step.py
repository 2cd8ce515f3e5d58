"""`Step`: new tokens of some sequences, from their room in the pages to the prefix index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Items
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError, SequenceError
from ..ops.append import AppendPlan, plan_append
from ..ops.arguments.checks import shown
from ..ops.batch_base import BatchBase
from ..ops.keys.level_pages import CascadeLevel
from ..ops.keys.paged import Paged
from ..ops.plan import Plan
from .copies import copy_pages
from .int_buffer import Ints
from .pages import NO_PAGES, NULL
from .sequence import Sequence
from .tails import TailAppend

if TYPE_CHECKING:
    from .cache import Cache

Tokens: TypeAlias = Items[int] | NDArray[Any] | torch.Tensor
"""Token ids: a sequence of ints, or a 1-D numpy array or cpu tensor of them."""


class Step:
    """New tokens of some sequences; `Cache.step` makes it.

    Until `commit` the sequences have their old lengths, and nobody finds the new pages. Leaving the
    ``with`` block without a commit, or `abort`, gives the pages back.

    q_indptr: int32 cpu tensor [sequences + 1], the new tokens of each. num_tokens: all of them.
    """

    def __init__(self, cache: Cache, items: Iterable[tuple[Sequence, Tokens]]) -> None:
        self._cache = cache
        self._items = _read_items(cache, items)
        counts = [len(tokens) for _, tokens in self._items]
        indptr = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        self.q_indptr = torch.from_numpy(indptr)
        self.num_tokens = int(indptr[-1])
        self._counts = counts
        self._starts = [seq.tokens.length for seq, _ in self._items]
        self._paged: dict[int, Paged] = {}
        self._appends: dict[int, AppendPlan] = {}
        self._tail_appends: dict[int, TailAppend] = {}
        self.num_levels: dict[tuple[int, int | None], int] = {}
        """Levels of the plans in force, by group and number of the attention; None for the last."""
        self.is_open = False
        self._make_room()

    def _make_room(self) -> None:
        """Give each table its pages: new ones behind its end, and a copy of a shared last one."""
        cache, size = self._cache, self._cache.spec.page_size
        grow: list[list[int]] = []
        filled: list[list[int]] = []  # in a tail: entries of pages that the step begins and fills
        shared: list[list[Sequence]] = []
        for group, pages in enumerate(cache.pools):
            refs, owner = pages.refs, pages.owner
            more, filled_here, written = [], [], []
            is_tail = group >= len(cache.spec.groups) and group in cache.reclaiming
            others: dict[int, int] = {}  # tables besides one's own that still name a shared page
            for (seq, _), count in zip(self._items, self._counts, strict=True):
                length, table = seq.tokens.length - seq.removed[group], seq.tables[group]
                new, full = -(-(length + count) // size) - table.length, 0
                if new and is_tail:  # no trim comes back to the first pages
                    kept_from = cache.first_query(length + count) // size
                    full = max(0, min(new, kept_from - table.length))
                more.append(new - full)
                filled_here.append(full)
                if count and length % size:
                    last = table.last()
                    if refs[last] > 1 or owner[last] >= 0:
                        left = others.get(last, int(refs[last]) - 1)
                        others[last] = left - 1
                        if left > 0 or owner[last] >= 0:  # the last of all may write to it
                            written.append(seq)
            grow.append(more)
            filled.append(filled_here)
            shared.append(written)
        needed = [sum(m) + len(w) for m, w in zip(grow, shared, strict=True)]
        cache.make_room(needed)
        cache.changing = "step()"
        taken = cache.take(needed)
        with cache.giving_back(taken):
            for group, (pages, own) in enumerate(zip(cache.pools, taken, strict=True)):
                old = np.array([seq.tables[group].last() for seq in shared[group]], np.int32)
                copy_pages(pages.memory, old, own[: len(old)])
        for group, (pages, own) in enumerate(zip(cache.pools, taken, strict=True)):
            for seq, page in zip(shared[group], own, strict=False):
                pages.release(seq.tables[group].view[-1:])
                seq.tables[group].view[-1] = page
            at = len(shared[group])
            cache.counters.copied_pages[group] += at
            for (seq, _), count, full in zip(self._items, grow[group], filled[group], strict=True):
                if full:
                    seq.tables[group].extend(np.full(full, NULL))
                if count:
                    seq.tables[group].extend(own[at : at + count])
                    at += count
        self.is_open = True
        for seq, _ in self._items:
            seq.step = self
        cache.changing = ""

    # --- what runs need ---------------------------------------------------------------------------

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of the step, in the order of the batch."""
        return [seq for seq, _ in self._items]

    def counts(self) -> list[tuple[Sequence, int]]:
        """The sequences, each with its number of new tokens."""
        return [(seq, count) for (seq, _), count in zip(self._items, self._counts, strict=True)]

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The new tokens of all sequences [num_tokens], in the order of q_indptr."""
        parts = [np.asarray(tokens, np.int64) for _, tokens in self._items]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @property
    def positions(self) -> torch.Tensor:
        """int64 cpu tensor [num_tokens]: the position of each new token in its sequence."""
        starts = np.array(self._starts, np.int64)
        begins = np.repeat(starts - self.q_indptr.numpy()[:-1], self._counts)
        return torch.from_numpy(begins + np.arange(self.num_tokens))

    def paged(self, group: int = 0) -> Paged:
        """The pages of each sequence in a group, new tokens counted, for plans and appends; of a
        group with a tail the full ones, for plans.
        """
        self._check("paged()")
        group = self._cache.check_group(group)
        found = self._paged.get(group)
        if found is None:
            found = self._paged[group] = self.own_pages(group, 0)
        return found

    def own_pages(self, group: int, skipped: NDArray[np.int64] | int) -> Paged:
        """`paged` without the first `skipped` pages of each sequence."""
        lengths = self._lengths(group)
        if self._cache.spec.tails[group] is not None:
            lengths -= lengths % self._cache.spec.page_size
        return self.to_paged([seq.tables[group].view for seq, _ in self._items], lengths, skipped)

    def tail_pages(self, group: int) -> Paged | None:
        """The page of each sequence in the tail of a group, without those that are full; None for
        a group without a tail."""
        tail, lengths = self._cache.spec.tails[group], self._lengths(group)
        if tail is None:
            return None
        tables = [seq.tables[tail].view for seq, _ in self._items]
        return self.to_paged(tables, lengths, lengths // self._cache.spec.page_size)

    def _lengths(self, group: int) -> NDArray[np.int64]:
        """The keys of each sequence in a group, new tokens counted."""
        lengths = np.array(self._starts, np.int64) + np.array(self._counts, np.int64)
        return lengths - np.array([seq.removed[group] for seq, _ in self._items], np.int64)

    def to_paged(
        self, tables: Items[Ints], lengths: NDArray[np.int64], skipped: NDArray[np.int64] | int = 0
    ) -> Paged:
        """Tables of so many keys, without the first `skipped` pages of each."""
        self._cache.check_memory("the page tables")
        size = self._cache.spec.page_size
        ends = -(-lengths // size)
        begins = np.zeros_like(ends) + skipped
        parts = [t[a:b] for t, a, b in zip(tables, begins.tolist(), ends.tolist(), strict=True)]
        indptr = np.zeros(len(tables) + 1, np.int32)
        np.cumsum(ends - begins, out=indptr[1:])
        last = np.where(ends > begins, (lengths - 1) % size + 1, 0).astype(np.int32)
        indices = torch.from_numpy(np.concatenate([NO_PAGES, *parts]))
        if self._cache.device.type != "cpu":
            indices = indices.pin_memory().to(self._cache.device, non_blocking=True)
        return Paged(torch.from_numpy(indptr), indices, torch.from_numpy(last), size)

    def levels(self, group: int = 0) -> list[CascadeLevel]:
        """The pages of a group as levels that sequences share, for `CascadeAttention.plan`; a tail
        is the last one.
        """
        self._check("levels()")
        group = self._cache.check_group(group)
        return self._cache.planners[group].levels(self, group)

    def plan(self, attention: BatchBase, group: int = 0, /, **mask_params: object) -> Plan:
        """Plan this step's attention in a group's layers.

        Args:
            attention: a `BatchAttention`; or a `CascadeAttention`, which then reads keys that
                sequences share once, where the planner expects that to be faster. A group with a
                tail needs a `CascadeAttention`, for levels of two formats.
            group: the number of the group.
            **mask_params: the variant's params that its mask reads; by default those of the group,
                where neither these nor the variant have a value.

        Returns:
            The plan, in force for the runs that follow.

        Raises:
            InputError: the attention has other KV heads or head dims than the group, or other
                query heads where the mask reads the head; or, where the group's mask decides which
                pages are kept, another mask; or it would apply a hook of the group's transform
                again. Tensors of params are compared when an attention is
                first planned with them.
            SequenceError: after a commit or an abort.

        Also raises what `plan` of the attention raises.
        """
        self._check("plan()")
        group = self._cache.check_group(group)
        return self._cache.planners[group].plan(self, attention, group, mask_params)

    def tensors(self, layer: int, attention: BatchBase | None = None) -> tuple[Any, ...]:
        """What `run` of an attention that is planned for a layer's group takes behind q.

        Args:
            layer: the number of the layer.
            attention: by default the one that was planned last.

        Returns:
            `Cache.tensors`; of a group with a tail a list, of one (k, v) for each level of the
            plan, those of `Cache.tails` last.

        Raises InputError for a number that no layer has, and where no plan says the levels.

        Example:
            >>> out = attention.run(q, *step.tensors(layer))
        """
        self._check("tensors()")
        full, group = self._cache.tensors(layer), self._cache.group_of(layer)
        if self._cache.spec.tails[group] is None:
            return full
        levels = self.num_levels.get((group, None if attention is None else attention.number))
        if levels is None:
            raise InputError(
                f"group {group} is not planned yet: call plan(attention, {group}) first"
            )
        return ([full] * (levels - 1) + [self._cache.tails(layer)],)

    def append(self, layer: int, /, k: torch.Tensor, v: torch.Tensor, **params: object) -> None:
        """Write the keys and values of the new tokens into a layer's pages.

        Args:
            layer: the number of the layer.
            k, v: [num_tokens, num_kv_heads, head_dim], [num_tokens, num_kv_heads, head_dim_v] in
                the cache's dtype and on its device. Of latent attention (v_in_k) the latents
                [num_tokens, 1, head_dim_v] and the rotary parts [num_tokens, 1, head_dim -
                head_dim_v].
            **params: those of the group's transform, such as the weights of the layer's norm.

        Raises InputError for tensors that do not fit, ParamError for params that do not, and then
        writes nothing.
        """
        self._check("append()")
        views, group = self._cache.tensors(layer), self._cache.group_of(layer)
        if self._cache.spec.tails[group] is not None:
            if group not in self._tail_appends:
                self._tail_appends[group] = TailAppend(self, self._cache.spec, group)
            self._tail_appends[group].run(k, v, views, self._cache.tails(layer), params)
            return
        append = self._appends.get(group)
        if append is None:
            transform = self._cache.spec.groups[group].transform
            append = self._appends[group] = plan_append(
                self.q_indptr, self.paged(group), transform=transform
            )
        k_pages, v_pages = views
        append.run(k, v, k_pages, v_pages, **params)

    # --- its end ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """The tokens belong to their sequences; full pages can be found by other sequences.

        Call it when the keys and values of all layers are written. Pages that a group's mask can
        never read again are released. A commit that was interrupted may be called again, or
        aborted: sequences that it came to keep their tokens.
        """
        self._check("commit()")
        cache, size = self._cache, self._cache.spec.page_size
        lookback = cache.lookback if cache.reclaiming else None
        for (seq, tokens), count, start in zip(
            self._items, self._counts, self._starts, strict=True
        ):
            if not count or seq.tokens.length > start:  # an interrupted commit came to it
                continue
            if count == 1:
                seq.tokens.append(tokens[0])
            else:
                seq.tokens.extend(tokens)
            length = seq.tokens.length
            if length // size > seq.place.position and seq.publishes:
                self._publish(seq)
            # Once a page, when the first query that may come enters another one.
            if lookback is not None and (length - lookback) % size < count:
                cache.changing = "commit()"
                cache.reclaim(seq)
                cache.changing = ""
        # Last, so that an interrupted commit can be aborted, when what it came to keeps its tokens,
        # or called again.
        self._end()
        cache.counters.appended_tokens += self.num_tokens

    def _publish(self, seq: Sequence) -> None:
        cache, size = self._cache, self._cache.spec.page_size
        full = seq.tokens.length // size
        groups = len(cache.spec.groups)
        tables = [table.view[:full] for table in seq.tables[:groups]]
        tables += [np.full(full, NULL, np.int32)] * (len(seq.tables) - groups)  # tails stay its own
        tokens = seq.tokens.view[: full * size]
        cache.changing = "commit()"
        seq.place = cache.tree.publish(seq.namespace, seq.place, tokens, tables)
        cache.note_growth(seq)
        cache.changing = ""

    def abort(self) -> None:
        """Give the pages of the new tokens back; the sequences are as before the step."""
        self._check("abort()")
        cache, size = self._cache, self._cache.spec.page_size
        cache.changing = "abort()"
        self._end()
        for seq, _ in self._items:
            for group, (pages, table) in enumerate(zip(cache.pools, seq.tables, strict=True)):
                count = -(-(seq.tokens.length - seq.removed[group]) // size)
                if count < table.length:
                    pages.release(table.view[count:])
                    table.truncate(count)
        cache.changing = ""

    def _end(self) -> None:
        self.is_open = False  # which ends it: `Sequence.in_step` asks here
        for seq, _ in self._items:
            seq.step = None

    def _check(self, what: str) -> None:
        self._cache.check_access()
        if not self.is_open:
            raise SequenceError(f"{what} of a step that was committed or aborted")

    def __reduce__(self) -> NoReturn:
        raise InputError("a Step cannot be copied or pickled")

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_open and not self._cache.changing:
            self.abort()


def _read_items(
    cache: Cache, items: Iterable[tuple[Sequence, Tokens]]
) -> list[tuple[Sequence, Ints | list[int]]]:
    """Sequences and tokens, checked; nothing of the cache has changed."""
    if isinstance(items, str | torch.Tensor) or not isinstance(items, Iterable):
        raise InputError(
            f"items must be a sequence of (sequence, token ids), got {type(items).__name__}"
        )
    read: list[tuple[Sequence, Ints | list[int]]] = []
    numbers: set[int] = set()
    for i, item in enumerate(list(items)):  # a generator may still change sequences
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(f"items[{i}] must be a pair (sequence, token ids), got {shown(item)}")
        seq, tokens = item
        if not isinstance(seq, Sequence):
            raise InputError(f"items[{i}][0] must be an fa.kv.Sequence, got {shown(seq)}")
        if seq.cache is not cache:
            raise SequenceError(f"sequence {seq.number} of items[{i}] belongs to another cache")
        if seq.closed or seq.step is not None or seq.saved is not None:
            seq.check_usable("step()")
        if seq.number in numbers:
            raise SequenceError(f"sequence {seq.number} is in the step twice, again as items[{i}]")
        numbers.add(seq.number)
        if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int:
            # A decoding sequence, the case that must be fast.
            new: Ints | list[int] = _one_token(i, tokens)
        else:
            new = read_tokens(f"items[{i}][1]", tokens)
        if seq.tokens.length + len(new) > cache.max_kv_len:
            raise InputError(
                f"sequence {seq.number} would have {seq.tokens.length + len(new)} tokens, but "
                f"max_kv_len={cache.max_kv_len}"
            )
        read.append((seq, new))
    return read


def _one_token(item: int, tokens: list[int]) -> list[int]:
    if not 0 <= tokens[0] < 1 << 63:
        raise InputError(f"items[{item}][1][0]={tokens[0]} must be 0 or more and fit 63 bits")
    return [tokens[0]]


def read_tokens(name: str, tokens: Any) -> Ints:
    """Token ids as an int64 array [n]. Raises InputError."""
    if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
        raise InputError(f"{name} is on {tokens.device}; tokens are read on the host")
    try:
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.detach().numpy()
        found = np.array(tokens)  # a copy: a step reads its tokens until the commit
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be 1-D ints: {error}") from None
    if isinstance(tokens, Iterator | Set):
        raise InputError(f"{name} is no sequence but a {type(tokens).__name__}: pass list({name})")
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise InputError(
            f"{name} must be 1-D ints, got {found.ndim}-D entries of dtype {found.dtype}"
        )
    if found.dtype != np.int64:
        if found.dtype == np.uint64 and found.size and int(found.max()) >= 1 << 63:
            raise InputError(f"{name} has an entry beyond 63 bits")
        found = found.astype(np.int64)
    if found.size and int(found.min()) < 0:
        at = int(found.argmin())
        raise InputError(f"{name}[{at}]={int(found[at])} is negative: tokens are 0 or more")
    return found
