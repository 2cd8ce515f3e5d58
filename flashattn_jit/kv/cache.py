"""`Cache`: pages of keys and values for many sequences, shared by their prefixes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError, OutOfPages, SequenceError
from ..formats import Codes
from ..ops.arguments.checks import INT32_MAX, check_device, check_int, shown
from .capacity.costs import recompute_ns
from .int_buffer import Ints
from .levels import StepPlanner
from .pages import NO_PAGES, NULL, Layout, Pages
from .policy import LRU, Entry, Policy
from .reclaim import MaskPages
from .sequence import Saving, Sequence
from .spec import Spec
from .stats import Counters, GroupStats, Stats
from .step import Step, Tokens, read_tokens
from .tree import Node, PageTree

_MAX_PRIORITY = 100


class Cache:
    """Pages of keys and values for many sequences, which share the pages of common prefixes.

    A cache knows each group's mask: pages that no later query can read are released by themselves,
    and a prefix counts as cached if all pages are there that its continuation reads.

    Args:
        spec: what is stored for each token.
        num_pages: pages of each group, an int for all groups or one for each. A null page, of
            zeros, comes on top. Where groups have tails, one for each of `Spec.stores`: the groups,
            then the tails. A sequence whose last page is not full has one page of a tail, and one
            more while a step of several tokens fills that page and begins another one. `lookback`
            keeps up to ``ceil(lookback / page_size)`` more.
        max_kv_len: positions that a sequence may have.
        device: of the pages. "meta" for a cache without memory, which hands out pages, shares and
            reclaims them as any other: to count them. It takes no keys, plans or suspensions.
        layout: "page": keys and values of all layers of a token's page lie side by side, so that
            copies of pages are long; "layer": each layer has tensors of its own.
        eviction: which cached pages go first when room is needed, see `fa.kv.LRU`. It may not call
            the cache.
        lookback: how far `Sequence.trim` can go back from the longest kv_len that a sequence had:
            pages that a query at that length less lookback reads are kept.
        clock: seconds, for policies with ages.

    A cache is used by one thread, the first that calls `open`, `step` or `clear`.

    Raises:
        InputError: an argument is out of range, or the system has no memory for so many pages.
        ParamError: a group's mask reads a param that has no value.

    Source: Kwon et al. 2023, arXiv 2309.06180 (pages); Zheng et al. 2023, arXiv 2312.07104 (a
    radix tree of prefixes).

    Example:
        >>> cache = fa.kv.Cache(spec, num_pages=4096, max_kv_len=131072)
        >>> seq = cache.open(prompt)
        >>> with cache.step([(seq, prompt[seq.num_cached :])]) as step:
        ...     step.plan(attention)
        ...     for layer in range(spec.num_layers):
        ...         step.append(layer, k, v)
        ...         out = attention.run(q, *cache.tensors(layer))
        ...     step.commit()
    """

    def __init__(
        self,
        spec: Spec,
        num_pages: int | Items[int],
        *,
        max_kv_len: int,
        device: str | torch.device = "cpu",
        layout: Layout = "page",
        eviction: Policy | None = None,
        lookback: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(spec, Spec):
            raise InputError(f"spec must be an fa.kv.Spec, got {type(spec).__name__}")
        self.spec = spec
        self.max_kv_len = check_int("max_kv_len", max_kv_len, 1, INT32_MAX - spec.page_size)
        self.lookback = check_int("lookback", lookback, 0)
        counts = self._counts(num_pages)
        if layout not in ("page", "layer"):
            raise InputError(f'layout={shown(layout)} must be "page" or "layer"')
        eviction = LRU() if eviction is None else eviction
        if not callable(eviction) or isinstance(eviction, type):
            raise InputError(
                f"eviction must be a policy such as fa.kv.LRU(), got {shown(eviction)}"
            )
        self.layout: Layout = layout
        meta = isinstance(device, str | torch.device) and str(device) == "meta"
        self.device = torch.device("meta") if meta else check_device(device)
        self._eviction, self._clock = eviction, clock
        self.masks = [MaskPages(g, spec.page_size, self.max_kv_len) for g in spec.stores]
        self.pools = [
            Pages(g, n, spec.page_size, spec.dtype, self.device, layout)
            for g, n in zip(spec.stores, counts, strict=True)
        ]
        self.tree = PageTree(self.pools, spec.page_size, spec.fingerprint)
        self._layers: dict[int, tuple[Codes, Codes]] = {}
        self._rows: dict[int, Codes] = {}
        self._tails: dict[int, tuple[Codes, Codes]] = {}
        for g, pool in zip(spec.groups, self.pools, strict=False):
            self._layers.update(zip(g.layers, pool.views, strict=True))
            self._rows.update(zip(g.layers, pool.rows, strict=False))
        for g, pool in [*zip(spec.stores, self.pools, strict=True)][len(spec.groups) :]:
            self._tails.update(zip(g.layers, pool.views, strict=True))
        self._group_of = {x: i for i, g in enumerate(spec.groups) for x in g.layers}
        self._sequences: dict[int, Sequence] = {}
        self._numbers = itertools.count()
        self._order = itertools.count(1)
        self._thread: int | None = None
        self.changing = ""
        """The change that is under way, "" for none. A change sets it when all checks are done, and
        clears it at its end: an exception that leaves it half done leaves its name.
        """
        self.counters = Counters(len(counts))
        self.planners = [
            StepPlanner(g, mask) for g, mask in zip(spec.groups, self.masks, strict=False)
        ]
        self.reclaiming = [g for g, mask in enumerate(self.masks) if mask.reclaims]
        """The numbers of `Spec.stores` whose masks give up pages."""

    def _counts(self, num_pages: object) -> list[int]:
        groups, stores = len(self.spec.groups), len(self.spec.stores)
        tails = f" and {stores - groups} tails" if stores > groups else ""
        if isinstance(num_pages, Items) and not isinstance(num_pages, str):
            if len(num_pages) != stores:
                raise InputError(
                    f"num_pages has {len(num_pages)} entries, but the spec has {groups} "
                    f"groups{tails}"
                )
            return [
                check_int(f"num_pages[{i}]", n, 1, INT32_MAX - 1) for i, n in enumerate(num_pages)
            ]
        if tails:
            raise InputError(
                f"num_pages={shown(num_pages)}, but the spec has {groups} groups{tails}: pass the "
                "pages of each group, then those of each tail, of which an open sequence has one"
            )
        return [check_int("num_pages", num_pages, 1, INT32_MAX - 1)] * groups

    # --- sequences --------------------------------------------------------------------------------

    def open(
        self,
        token_ids: Tokens,
        *,
        namespace: bytes = b"",
        priority: int = 0,
        publish: bool = True,
    ) -> Sequence:
        """A new sequence, with the longest prefix of `token_ids` that the cache has.

        Append the other tokens in steps: ``token_ids[seq.num_cached :]``. At least one token is
        left, so that the last one has an output.

        Args:
            token_ids: 1-D ints: a cpu tensor, a numpy array or a sequence of ints.
            namespace: sequences share pages within a namespace alone: one for each tenant, adapter
                or kind of input that the tokens do not tell apart.
            priority: 0 to 100, for policies such as `fa.kv.Priority`.
            publish: False keeps the sequence apart from the prefix index: it finds nothing there,
                and no other sequence finds its pages. For tokens that are not known.

        Raises:
            InputError: tokens are no 1-D ints, or more than max_kv_len.
            SequenceError: another thread than the cache's calls.
        """
        self.check_access()
        tokens = read_tokens("token_ids", token_ids)
        if not isinstance(namespace, bytes):
            raise InputError(f"namespace must be bytes, got {type(namespace).__name__}")
        priority = check_int("priority", priority, 0, _MAX_PRIORITY)
        if len(tokens) > self.max_kv_len:
            raise InputError(
                f"token_ids has {len(tokens)} tokens, but max_kv_len={self.max_kv_len}"
            )
        size = self.spec.page_size
        path = self.tree.match(namespace, tokens) if publish else []
        there = self._pages_along(path)
        most = max(0, len(tokens) - 1) // size
        count = self._longest(there, min(most, sum(n for _, n in path)))
        self.changing = "open()"
        seq = self.new_sequence(namespace, priority)
        seq.publishes = publish
        self.counters.asked_tokens += len(tokens) if publish else 0
        self.counters.hit_tokens += count * size
        if count:
            self._share(seq, tokens[: count * size], [pages[:count] for pages in there])
            node = next(n for n, c in path if n.start < count <= n.start + c)
            seq.place = self.tree.place(node, count)
            self.touch(seq, uses=1)
            self.reclaim(seq)
        self.changing = ""
        return seq

    def _share(self, seq: Sequence, tokens: Ints, there: Items[Ints]) -> None:
        """Give a new sequence its prefix: tokens, and pages of each group that the index has."""
        seq.num_cached = len(tokens)
        seq.tokens.extend(tokens)
        for pool, mask, table, held in zip(self.pools, self.masks, seq.tables, there, strict=True):
            if mask.reclaims:
                held = np.where(mask.given_up(self.first_query(len(tokens)), len(held)), NULL, held)
            table.extend(held)
            pool.hold(held)

    def _longest(self, there: Items[Ints], count: int) -> int:
        """The longest prefix, in pages, whose pages are there where a continuation reads them.

        A page that one length lacks is read at every shorter length that has it, as masks only ever
        give pages up; so the lengths to try are the missing pages' own numbers.
        """
        size, last = self.spec.page_size, -1
        while count != last:
            last = count
            for group, (pages, mask) in enumerate(zip(there, self.masks, strict=True)):
                if group == len(self.spec.groups):
                    break  # tails, which no prefix has
                lacking = pages[:count] == NULL
                if mask.reclaims and lacking.any():
                    lacking &= ~mask.given_up(self.first_query(count * size), count)
                found = np.flatnonzero(lacking)
                count = int(found[0]) if len(found) else count
        return count

    def first_query(self, kv_len: int) -> int:
        """The first position that may still be asked for at a length."""
        return max(0, kv_len - self.lookback)

    def new_sequence(self, namespace: bytes, priority: int) -> Sequence:
        """An empty sequence."""
        seq = Sequence(self, next(self._numbers), namespace, priority)
        self._sequences[seq.number] = seq
        return seq

    def forget(self, seq: Sequence) -> None:
        """The sequence was closed."""
        del self._sequences[seq.number]
        self.tree.forget(seq.namespace)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are not closed, in the order in which they were opened."""
        return list(self._sequences.values())

    def touch(self, seq: Sequence, uses: int = 0) -> None:
        """Note a use of the sequence's pages in the prefix index."""
        if seq.publishes:
            self.tree.touch(seq.place, next(self._order), self._clock(), seq.priority, uses)

    def note_growth(self, seq: Sequence) -> None:
        """Note that a running sequence has published pages: cheaper than `touch`."""
        self.tree.note_growth(seq.place, next(self._order), self._clock(), seq.priority)

    def find(self, seq: Sequence) -> list[Ints]:
        """The pages of the prefix index that hold the sequence's tokens, by group; 0 for none."""
        return self._pages_along(self.tree.match(seq.namespace, seq.tokens.view))

    def _pages_along(self, path: Items[tuple[Node, int]]) -> list[Ints]:
        """The pages of each group that a match of the prefix index has."""
        return [
            np.concatenate([NO_PAGES, *(n.pages[g].view[:count] for n, count in path)])
            for g in range(len(self.pools))
        ]

    # --- steps ------------------------------------------------------------------------------------

    def step(self, items: Iterable[tuple[Sequence, Tokens]]) -> Step:
        """Room for new tokens of some sequences, all of it or none.

        Args:
            items: sequences with their new token ids, as for `open`, in the order of the batch. A
                sequence appears once; it may have no new tokens. They are read now: buffers may be
                used again.

        Returns:
            A `Step`: plan and run with it, then `Step.commit`. Left without a commit, as on an
            error, it gives its room back.

        Raises:
            OutOfPages: a group has too few pages, evictable ones counted; nothing has changed.
            InputError: tokens are no ints, or a sequence would be longer than max_kv_len.
            SequenceError: a sequence is closed, suspended, of another cache, named twice or in
                another open step.
        """
        self.check_access()
        return Step(self, items)

    def make_room(self, needed: Items[int], kept: Items[Ints] | None = None) -> None:
        """Evict what it takes until each group has so many free pages.

        kept: evictable pages of each group that stay. Raises OutOfPages, InputError for a policy
        whose keys do not compare, and what the policy raises; nothing has changed then.
        """
        short = [max(0, n - p.num_free) for n, p in zip(needed, self.pools, strict=True)]
        if not any(short):
            return
        for group, pages in enumerate(self.pools):
            evictable = pages.num_evictable
            if kept is not None:
                evictable -= pages.count_unused(kept[group])
            if short[group] > evictable:
                count, free, name = needed[group], pages.num_free, self.spec.store_name(group)
                raise OutOfPages(
                    f"{name} needs {count} more pages, but has {free} free and {evictable} "
                    f"evictable of {pages.num_pages}: close() or suspend() sequences, or make the "
                    "cache with more num_pages",
                    needed=count, free=free, evictable=evictable, group=group,
                )  # fmt: skip
        self.changing = "asking its eviction policy"
        try:
            chosen = [
                self.tree.choose(g, n, self._key(g), kept[g] if kept else None) if n else []
                for g, n in enumerate(short)
            ]
        finally:
            self.changing = ""
        self._drop(chosen)

    def _key(self, group: int) -> Callable[[Node], Any]:
        """The policy's key of a node."""
        spec, now = self.spec.groups[group], self._clock()
        num_bytes, size = self.spec.page_bytes(group), self.spec.page_size

        def key(node: Node) -> Any:
            cost = recompute_ns(spec, size, node.end * size)
            entry = Entry(
                node.order, now - node.time, node.num_uses, node.priority, node.end * size,
                num_bytes, cost,
            )  # fmt: skip
            return self._eviction(entry)

        return key

    def _drop(self, chosen: Items[Items[tuple[Node, Ints]]]) -> None:
        """Evict pages of each group."""
        self.changing = "an eviction"
        for group, nodes in enumerate(chosen):
            self.tree.drop(group, nodes)
            self.counters.evicted_pages[group] += sum(len(at) for _, at in nodes)
        self.changing = ""

    def take(self, needed: Items[int]) -> list[NDArray[np.int32]]:
        """Free pages of each group."""
        return [pages.take(count) for pages, count in zip(self.pools, needed, strict=True)]

    @contextmanager
    def giving_back(self, taken: Items[Ints]) -> Iterator[None]:
        """Pages of each group are released, and the change is undone, if the block fails."""
        try:
            yield
        except BaseException:
            for pages, own in zip(self.pools, taken, strict=True):
                pages.release(own)
            self.changing = ""
            raise

    def reclaim(self, seq: Sequence) -> None:
        """Release the pages that no later query of the sequence reads, by the groups' masks."""
        size = self.spec.page_size
        for group in self.reclaiming:
            length = seq.tokens.length - seq.removed[group]
            q_from = self.first_query(length)
            table = seq.tables[group]
            whole = length // size  # the last page, while it fills, stays
            live = table.view[:whole]
            dead = self.masks[group].given_up(q_from, whole)
            gone = np.flatnonzero(dead & (live != NULL))
            holes = self.spec.stores[group].reclaim == "holes"
            # Dead entries of a prefix that was found are null already: compaction drops them too.
            if not (len(gone) if holes else dead.any()):
                continue
            seq.version += 1
            self.pools[group].release(live[gone])
            self.counters.reclaimed_pages[group] += len(gone)
            if holes:
                live[gone] = NULL
                continue
            kept = np.concatenate([live[~dead], table.view[whole:]])
            table.truncate(0)
            table.extend(kept)
            seq.least_len[group] = max(seq.least_len[group], q_from + seq.removed[group])
            seq.removed[group] += int(dead.sum()) * size
            # Later keys depend on positions that no other sequence has.
            seq.publishes = False

    # --- memory -----------------------------------------------------------------------------------

    def tensors(self, layer: int) -> tuple[Codes, Codes]:
        """The pages of a layer's keys and of its values, for `BatchAttention.run`.

        Returns:
            k_pages [num_pages + 1, page_size, num_kv_heads, head_dim] and v_pages, views; of a
            group with a format `fa.kv.Stored`: where it has a tail, of the full pages alone; see
            `Step.tensors`. Of latent attention (v_in_k) the latents
            [num_pages + 1, page_size, 1, head_dim_v] and the rotary parts [..., head_dim -
            head_dim_v]; `latents` has both as one.

        Raises InputError for a number that no layer has.
        """
        return self._layers[check_int("layer", layer, 0, self.spec.num_layers - 1)]

    def tails(self, layer: int) -> tuple[Codes, Codes]:
        """`tensors` of the tail of the layer's group: rows that are not quantised yet.

        Raises InputError for a number that no layer has, and for a group without a tail.
        """
        layer = check_int("layer", layer, 0, self.spec.num_layers - 1)
        if layer not in self._tails:
            raise InputError(
                f"layer {layer} has no tail, as no scales of its group are of channels"
            )
        return self._tails[layer]

    def latents(self, layer: int) -> Codes:
        """The pages of a layer of latent attention: rows of a latent and its rotary part.

        Returns:
            [num_pages + 1, page_size, 1, head_dim], a view, or an `fa.kv.Stored`: the keys of
            `BatchAttention` with v_in_k. Their first head_dim_v columns are the values. Rows of
            FlashMLA's format are uint8 [..., 656], for kv_dtype=torch.uint8.

        Raises InputError for a number that no layer has, and for a layer without such rows: its
        group is without v_in_k, or its formats keep the parts apart.
        """
        layer = check_int("layer", layer, 0, self.spec.num_layers - 1)
        if layer not in self._rows:
            raise InputError(
                f"layer {layer} has no rows of both parts: its group needs v_in_k=True, and no "
                "kv_format, a pair of one format of 8 bits in groups, or of 512 and 64 columns in "
                'bfloat16 fa.kv.Format("e4m3", group=128); tensors() has the parts'
            )
        return self._rows[layer]

    def group_of(self, layer: int) -> int:
        """The number of the group that a layer belongs to. Raises as `tensors`."""
        return self._group_of[check_int("layer", layer, 0, self.spec.num_layers - 1)]

    def check_memory(self, what: str) -> None:
        """Raises InputError if the cache has none, being on the device meta."""
        if self.device.type == "meta":
            raise InputError(f'{what} of a cache on device="meta", which holds no keys: pass "cpu"')

    def check_group(self, group: int) -> int:
        """The number of a group. Raises InputError."""
        return check_int("group", group, 0, len(self.spec.groups) - 1)

    def clear(self) -> None:
        """Forget all cached prefixes that no open sequence uses."""
        self.check_access()
        self._drop(
            [
                self.tree.choose(group, pages.num_evictable, lambda node: 0)
                for group, pages in enumerate(self.pools)
            ]
        )

    def count_saved(self, saved: Items[Saving], sign: int, moved: Items[int] = ()) -> None:
        """Contents of a suspended sequence came to the host (1), or left it (-1).

        moved: pages of each group that were copied for it.
        """
        num_bytes = sum(t.nbytes for x in saved for t in x.contents)
        self.counters.host_bytes += sign * num_bytes
        self.counters.swapped_bytes += sum(n * self.spec.page_bytes(g) for g, n in enumerate(moved))

    # --- what is known of it ----------------------------------------------------------------------

    def stats(self) -> Stats:
        """Pages by state, tokens asked for and found, evictions, bytes on the host."""
        c = self.counters
        groups = tuple(
            GroupStats(
                pages.num_pages, pages.num_free, pages.num_used, pages.num_evictable,
                int((pages.refs > 1).sum()), self.spec.page_bytes(g), c.evicted_pages[g],
                c.reclaimed_pages[g], c.copied_pages[g],
            )
            for g, pages in enumerate(self.pools)
        )  # fmt: skip
        suspended = sum(seq.is_suspended for seq in self.sequences)
        return Stats(
            groups, len(self._sequences), suspended, c.asked_tokens, c.hit_tokens,
            c.appended_tokens, c.host_bytes, c.swapped_bytes,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError, with the reason, if the cache contradicts itself; see `checks`.

        For tests and for looking into a fault: it reads every page table and the whole index.
        """
        from .checks import check_cache

        check_cache(self)

    def check_access(self) -> None:
        """Raises SequenceError in another thread than the cache's first, and in the middle of a
        change.
        """
        if self.changing:
            raise SequenceError(
                f"the cache is in the middle of {self.changing}. If an exception such as "
                "KeyboardInterrupt left it there, its pages may contradict each other: make a new "
                "fa.kv.Cache. Else an eviction policy, a clock, a signal handler or a finalizer "
                "called it, which they must not"
            )
        own = threading.get_ident()
        if self._thread is None:
            self._thread = own
        if self._thread != own:
            raise SequenceError(
                "the cache was called from another thread than the one that uses it; a cache has "
                "no locks: send its calls to that thread"
            )

    def __reduce__(self) -> NoReturn:
        raise InputError("a Cache cannot be copied or pickled: its pages belong to its sequences")

    def __repr__(self) -> str:
        used = ", ".join(f"{p.num_used} of {p.num_pages} pages used" for p in self.pools)
        return f"<Cache of {len(self._sequences)} sequences: {used}>"
