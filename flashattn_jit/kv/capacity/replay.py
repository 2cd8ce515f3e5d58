"""`fa.kv.recommend`: a workload replayed through caches without memory, to choose among them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import InputError, OutOfPages
from ...formats import Format, KvFormat
from ...late_binding import upper
from ...ops.arguments.checks import INT32_MAX, check_int, shown
from ..cache import Cache
from ..int_buffer import Ints
from ..sequence import Sequence as CacheSequence
from ..spec import Spec
from .estimate import MOST_BYTES, held_pages

_MOST_TOKENS = 1 << 24
"""Of a request, so that token ids of different requests differ."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    prompt_len: tokens of the prompt, 1 or more. output_len: tokens that follow, 1 or more.
    prefix_len: the first tokens of the prompt that it has in common with all requests of the same
    prefix. arrival_step: the step of the replay from which on it waits.

    Raises InputError for numbers out of range.
    """

    prompt_len: int
    output_len: int
    prefix_len: int = 0
    prefix: int = 0
    arrival_step: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("prompt_len", 1), ("output_len", 1), ("prefix_len", 0), ("prefix", 0),
            ("arrival_step", 0),
        ):  # fmt: skip
            most = INT32_MAX if name == "arrival_step" else _MOST_TOKENS
            check_int(name, getattr(self, name), least, most)
        if self.prefix_len > self.prompt_len:
            raise InputError(
                f"prefix_len={self.prefix_len} is more than prompt_len={self.prompt_len}"
            )

    @property
    def kv_len(self) -> int:
        """Keys that the request has at its end: the last output is no key."""
        return self.prompt_len + self.output_len - 1


@dataclass(frozen=True, slots=True)
class Replay:
    """What a cache did with a workload.

    fits: whether each request alone fits the cache; without that nothing was replayed. num_steps:
    until the last output. peak_batch, mean_batch: sequences of a step. preemptions: sequences that
    were closed for room and computed again, with recomputed_tokens of their keys.
    hit_tokens: found in the prefix index. peak_bytes: of the pages that sequences named.
    """

    fits: bool
    num_steps: int = 0
    peak_batch: int = 0
    mean_batch: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    hit_tokens: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a model's keys within the budget: ``fa.kv.Cache(option.spec,
    option.num_pages, max_kv_len=...)``; and what became of the workload.

    cache_bytes: of such a cache, null pages counted.
    """

    kv_format: KvFormat | None
    spec: Spec
    num_pages: tuple[int, ...]
    cache_bytes: int
    replay: Replay

    @property
    def serves(self) -> bool:
        """Whether the whole workload was served and no sequence computed again for want of room."""
        return self.replay.fits and not self.replay.preemptions


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All options, in the order in which they were asked for; `recommend` makes it.

    best: of a format's page sizes the one with the fewest steps, of equals that of the fewest peak
    bytes; of formats the first that fits, and a later one where that saves steps, see `recommend`.
    """

    options: tuple[Option, ...]
    best: Option
    max_kv_len: int
    budget_bytes: int

    def __str__(self) -> str:
        text: str = upper("show_recommendation")(self)
        return text


def recommend(
    config: Any,
    budget_bytes: int,
    workload: Iterable[Request],
    *,
    formats: Sequence[KvFormat | None] | None = None,
    page_sizes: Sequence[int] = (16, 32, 64),
    dtype: torch.dtype = torch.bfloat16,
    max_batch: int = 256,
    max_step_tokens: int = 512,
    gain: float = 1.25,
) -> Recommendation:
    """Replay a workload through caches of each format and page size, and choose one.

    A replay is what a server does, with the real page allocator, prefix index and reclaiming, on
    device="meta": in each step every running sequence decodes one token, prompts are appended in
    chunks in the order of arrival, and where pages run out the sequence that was admitted last is
    closed, to be computed again. A group's share of the budget is what the workload's requests hold
    of it at their ends.

    Args:
        config: as for `fa.kv.Spec.from_config`.
        budget_bytes: memory for pages, the null pages counted.
        workload: the requests.
        formats: of keys and values, the most precise first. An entry None is dtype. By default
            dtype, int8, and int4 in groups of up to 64 channels.
        page_sizes: tokens of a page.
        dtype: of what is not quantised.
        max_batch: sequences that run at a time.
        max_step_tokens: tokens of a step; at least max_batch.
        gain: a format is chosen over those before it if their steps are more than this many times
            its own; 1 or more. Steps are compared, not seconds.

    Raises:
        InputError: a number is out of range, the config has no spec, the workload is empty, or no
            option has room for its longest request.

    Example:
        >>> workload = [fa.kv.Request(2048, 256, prefix_len=1024) for _ in range(64)]
        >>> best = fa.kv.recommend(config, 8 << 30, workload).best
        >>> cache = fa.kv.Cache(best.spec, best.num_pages, max_kv_len=4096)
    """
    budget_bytes = check_int("budget_bytes", budget_bytes, 1, MOST_BYTES)
    requests = list(workload)
    if not requests or not all(isinstance(r, Request) for r in requests):
        raise InputError("workload must be fa.kv.Request, one or more")
    max_batch = check_int("max_batch", max_batch, 1)
    max_step_tokens = check_int("max_step_tokens", max_step_tokens, max_batch)
    if formats is None:
        formats = _formats(Spec.from_config(config))
    if isinstance(gain, bool) or not isinstance(gain, int | float) or not gain >= 1.0:
        raise InputError(f"gain={shown(gain)} must be a number of at least 1")
    for name, given in (("formats", formats), ("page_sizes", page_sizes)):
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise InputError(f"{name} must be a sequence of at least one, got {shown(given)}")
    options = [
        _option(
            Spec.from_config(config, page_size=size, dtype=dtype, kv_format=kv_format), kv_format,
            requests, budget_bytes, max_batch, max_step_tokens,
        )
        for kv_format, size in itertools.product(formats, page_sizes)
    ]  # fmt: skip
    longest = max(r.kv_len for r in requests)
    best = None
    for i in range(0, len(options), len(page_sizes)):
        own = [x for x in options[i : i + len(page_sizes)] if x.replay.fits]
        if not own:
            continue
        found = min(own, key=lambda x: (x.replay.num_steps, x.replay.peak_bytes))
        if best is None or found.replay.num_steps * gain < best.replay.num_steps:
            best = found
    if best is None:
        raise InputError(
            f"budget_bytes={budget_bytes} has no room for the longest request, of {longest} keys, "
            "in any format: give more, or a format of fewer bytes"
        )
    return Recommendation(tuple(options), best, longest, budget_bytes)


def _formats(spec: Spec) -> list[KvFormat | None]:
    """Formats that any model can have; of int4 where its rows are of pairs of channels."""
    group = math.gcd(64, *(n for g in spec.groups for n in g.part_dims[: 1 if g.v_in_k else 2]))
    return [None, Format("int8"), *([] if group % 2 else [Format("int4", group=group)])]


def _option(
    spec: Spec, kv_format: KvFormat | None, requests: list[Request], budget_bytes: int,
    max_batch: int, max_step_tokens: int,
) -> Option:  # fmt: skip
    groups = range(len(spec.stores))
    page_bytes = [spec.page_bytes(g) for g in groups]
    lengths = [r.kv_len for r in requests]
    whole = sum(-(-n // spec.page_size) for n in lengths)
    held = [sum(held_pages(spec, g, n) for n in lengths) for g in groups]
    # A mask gives pages up when a step ends: until then the new tokens of the step have theirs.
    passing = [-(-max_step_tokens // spec.page_size) if n < whole else 0 for n in held]
    left = budget_bytes - sum((n + 1) * b for n, b in zip(passing, page_bytes, strict=True))
    scale = left / sum(n * b for n, b in zip(held, page_bytes, strict=True))
    num_pages = tuple(
        min(int(n * scale) + m, INT32_MAX - 1) for n, m in zip(held, passing, strict=True)
    )
    if scale <= 0 or min(num_pages) < 1:
        return Option(kv_format, spec, (), 0, Replay(False))
    # More pages than all requests together have are never used.
    used = [min(n, whole + len(lengths)) for n in num_pages]
    cache = Cache(spec, used, max_kv_len=max(lengths), device="meta")
    replay = _Replay(cache, requests, max_batch, max_step_tokens).run()
    num_bytes = sum((n + 1) * size for n, size in zip(num_pages, page_bytes, strict=True))
    return Option(kv_format, spec, num_pages, num_bytes, replay)


class _Running:
    """A request, and its sequence while it runs. lost: keys that it had when it was closed."""

    def __init__(self, number: int, request: Request) -> None:
        self.request, self.number = request, number
        self.seq: CacheSequence | None = None
        self.num_known = request.prompt_len  # tokens whose ids are there: prompt and outputs
        self.lost = 0

    def tokens(self, begin: int, end: int) -> Ints:
        """Ids of the tokens from begin to end: those of the prefix are shared, others are not."""
        at = np.arange(begin, end, dtype=np.int64)
        own, shared = 2 * self.number + 1, 2 * self.request.prefix
        return np.where(at < self.request.prefix_len, shared, own) * _MOST_TOKENS * 2 + at


class _Replay:
    """A workload on its way through a cache."""

    def __init__(
        self, cache: Cache, requests: list[Request], max_batch: int, max_step_tokens: int
    ) -> None:
        self._cache = cache
        numbered = [_Running(i, r) for i, r in enumerate(requests)]
        self._waiting = deque(sorted(numbered, key=lambda x: x.request.arrival_step))
        self._running: list[_Running] = []
        self._max_batch, self._max_step_tokens = max_batch, max_step_tokens
        self._step = self._batches = self._peak_batch = self._peak_bytes = 0
        self._preemptions = self._recomputed = 0
        self._is_full = False  # nobody is admitted from a preemption to the next end

    def run(self) -> Replay:
        """All requests, step by step."""
        steps = 0
        while self._waiting or self._running:
            if not self._running:
                self._step = max(self._step, self._waiting[0].request.arrival_step)
            self._admit()
            if not self._advance():
                return Replay(False)
            steps += 1
            self._step += 1
        return Replay(
            True, steps, self._peak_batch, self._batches / steps, self._preemptions,
            self._recomputed, self._cache.counters.hit_tokens, self._peak_bytes,
        )  # fmt: skip

    def _admit(self) -> None:
        room = self._max_step_tokens - len(self._running)
        while (
            self._waiting
            and room > 0
            and not (self._is_full and self._running)
            and len(self._running) < self._max_batch
            and self._waiting[0].request.arrival_step <= self._step
        ):
            new = self._waiting.popleft()
            new.seq = self._cache.open(new.tokens(0, new.num_known))
            self._recomputed += max(0, new.lost - new.seq.kv_len)
            room -= new.num_known - new.seq.kv_len
            self._running.append(new)

    def _advance(self) -> bool:
        """One step; False where a sequence does not fit though it runs alone."""
        while True:
            items = self._items()
            try:
                with self._cache.step([(seq, tokens) for _, seq, tokens in items]) as step:
                    self._note(len(items))
                    step.commit()
                break
            except OutOfPages:
                if len(self._running) == 1:
                    return False
                self._preempt()
        for x, seq, _ in items:
            if seq.kv_len == x.num_known:  # its last token's output
                x.num_known += 1
                if x.num_known == x.request.kv_len + 1:
                    seq.close()
                    self._running.remove(x)
                    self._is_full = False
        return True

    def _items(self) -> list[tuple[_Running, CacheSequence, Ints]]:
        """Decoding sequences with their token, then prompts as far as the step has room."""
        lacking = [
            (x, x.seq, x.num_known - x.seq.kv_len) for x in self._running if x.seq is not None
        ]
        room = self._max_step_tokens - sum(count == 1 for *_, count in lacking)
        items = []
        for x, seq, count in lacking:
            taken = 1 if count == 1 else min(count, room)
            room -= 0 if count == 1 else taken
            if taken:
                items.append((x, seq, x.tokens(seq.kv_len, seq.kv_len + taken)))
        return items

    def _preempt(self) -> None:
        last = self._running.pop()
        assert last.seq is not None
        self._preemptions += 1
        last.lost = last.seq.kv_len
        last.seq.close()
        last.seq = None
        self._waiting.appendleft(last)
        self._is_full = True

    def _note(self, batch: int) -> None:
        spec = self._cache.spec
        used = sum(p.num_used * spec.page_bytes(g) for g, p in enumerate(self._cache.pools))
        self._peak_bytes = max(self._peak_bytes, used)
        self._peak_batch = max(self._peak_batch, batch)
        self._batches += batch
