"""Random opens, steps, forks, trims, suspends and failures over the fake engine.

Sequences draw their tokens from a small alphabet and often continue each other, so that prefixes
are shared, split and evicted all the time. After every operation all live rows of some sequence
are read again, and the cache is checked.
"""

from __future__ import annotations

import random

import pytest
import torch

import flashattn_jit as fa
from tests.harness.rotation import some
from tests.kv.engine import Engine, contents, same

WINDOW, CHUNK, SINKS = 11, 12, 3
MAX_LEN = 120
STEPS_A_SEED = 500


def spec(page_size: int) -> tuple[fa.kv.Spec, list]:
    groups = (
        fa.kv.Group((0, 3), 2, 4, variant=fa.Causal()),
        fa.kv.Group((1,), 1, 8, head_dim_v=4, variant=fa.SlidingWindow(WINDOW)),
        fa.kv.Group((2,), 2, 4, variant=fa.StreamingLLM(window=WINDOW, num_sinks=SINKS)),
        fa.kv.Group((4,), 1, 4, variant=fa.Chunked(CHUNK)),
    )
    keeps = [
        None,
        lambda q, k: 0 <= q - k < WINDOW,
        lambda q, k: k <= q and (q - k < WINDOW or k < SINKS),
        lambda q, k: k <= q and q // CHUNK == k // CHUNK,
    ]
    return fa.kv.Spec(groups, page_size, torch.float32), keeps


class Machine:
    """One run of random operations; `log` tells what was done, for failures."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([1, 4, 16])
        made, keeps = spec(self.size)
        pages = 4 + 160 // self.size
        self.now = 0.0
        policy = self.random.choice(
            [fa.kv.LRU(), fa.kv.LFU(), fa.kv.Priority(50.0), fa.kv.RecomputeCost(30.0)]
        )
        cache = fa.kv.Cache(
            made, [pages, pages, 2 * pages, pages], max_kv_len=MAX_LEN,
            layout=self.random.choice(["page", "layer"]), eviction=policy,
            lookback=self.random.choice([0, 0, 5]), clock=lambda: self.now,
        )  # fmt: skip
        self.engine = Engine(cache, keeps)
        self.cache = cache
        self.log: list[str] = [f"page_size {self.size}, {policy}, lookback {cache.lookback}"]

    def run(self, steps: int) -> None:
        operations = [
            (self.open, 4), (self.step, 12), (self.fork, 2), (self.trim, 2), (self.close, 3),
            (self.suspend, 1), (self.resume, 2), (self.fail, 2), (self.abort, 1), (self.wrong, 1),
            (self.clear, 0.1),
        ]  # fmt: skip
        for _ in range(steps):
            self.now += self.random.random() * 10
            act = self.random.choices(*zip(*operations, strict=True))[0]
            self.log.append(act.__name__)
            act()
            self.cache.check()
            if live := self.live():
                self.engine.verify(self.random.choice(live))
        self.engine.verify_all()
        for seq in self.cache.sequences:
            seq.close()
        self.cache.clear()
        self.cache.check()
        assert all(p.num_free == p.num_pages for p in self.cache.pools), "a page is lost"

    def live(self) -> list[fa.kv.Sequence]:
        return [s for s in self.cache.sequences if not s.is_suspended]

    def new_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(count)]

    # --- operations -------------------------------------------------------------------------------

    def open(self) -> None:
        if len(self.cache.sequences) > 8:
            return
        known = list(self.engine.tokens.values())
        prompt = list(self.random.choice(known)) if known else []
        prompt = prompt[: self.random.randrange(len(prompt) + 1)]
        prompt += self.new_tokens(self.random.randrange(20))
        self.engine.open(
            prompt[:MAX_LEN], namespace=self.random.choice([b"", b"", b"other"]),
            priority=self.random.choice([0, 50]),
        )  # fmt: skip

    def items(self) -> list[tuple[fa.kv.Sequence, list[int]]]:
        live = self.live()
        chosen = self.random.sample(live, self.random.randrange(len(live) + 1))
        return [
            (s, self.new_tokens(min(MAX_LEN - s.kv_len, self.random.choice([0, 1, 1, 3, 17, 40]))))
            for s in chosen
        ]

    def step(self) -> None:
        items, before = self.items(), contents(self.cache)
        try:
            self.engine.step(items)
        except fa.OutOfPages as error:
            assert error.needed > error.free + error.evictable
            assert same(before, contents(self.cache))

    def fork(self) -> None:
        if (live := self.live()) and len(self.cache.sequences) <= 8:
            self.engine.fork(self.random.choice(live))

    def trim(self) -> None:
        if not (live := self.live()):
            return
        seq = self.random.choice(live)
        back = self.random.choice([0, 1, 3, self.cache.lookback, 20])
        kv_len, before = max(0, seq.kv_len - back), contents(self.cache)
        try:
            seq.trim(kv_len)
        except fa.InputError:
            kept = self.engine.longest[seq.number] - self.cache.lookback
            assert kv_len < kept, "lookback did not bound what was given up"
            assert same(before, contents(self.cache))
        else:
            del self.engine.tokens[seq.number][kv_len:]

    def close(self) -> None:
        if self.cache.sequences:
            self.random.choice(self.cache.sequences).close()

    def suspend(self) -> None:
        if live := self.live():
            self.random.choice(live).suspend()

    def resume(self) -> None:
        suspended = [s for s in self.cache.sequences if s.is_suspended]
        if not suspended:
            return
        seq = self.random.choice(suspended)
        try:
            seq.resume()
        except fa.OutOfPages:
            assert seq.is_suspended
        else:
            self.engine.verify(seq)

    def fail(self) -> None:
        """The model fails in the middle of a step, after some layers were written."""
        items = self.items()
        try:
            with self.cache.step(items) as step:
                self.engine.write(step, layers=self.random.randrange(5))
                raise ZeroDivisionError
        except (ZeroDivisionError, fa.OutOfPages):
            pass

    def abort(self) -> None:
        try:
            step = self.cache.step(self.items())
        except fa.OutOfPages:
            return
        for seq, _ in step.counts():
            with pytest.raises(fa.SequenceError):
                self.random.choice([seq.close, seq.fork, seq.suspend, lambda s=seq: s.trim(0)])()
        step.abort()
        with pytest.raises(fa.SequenceError):
            self.random.choice([step.commit, step.abort, step.paged])()

    def wrong(self) -> None:
        """Calls that must raise and change nothing."""
        before = contents(self.cache)
        live = self.live()
        calls = [
            lambda: self.cache.open([1, -1]),
            lambda: self.cache.open([0] * (MAX_LEN + 1)),
            lambda: self.cache.step([(None, [1])]),
        ]
        if live:
            seq = self.random.choice(live)
            calls += [
                lambda: self.cache.step([(seq, [1]), (seq, [1])]),
                lambda: self.cache.step([(seq, [0] * MAX_LEN), (live[0], [0] * MAX_LEN)]),
                lambda: seq.trim(seq.kv_len + 1),
                seq.resume,
            ]
        with pytest.raises(fa.FlashAttnJitError):
            self.random.choice(calls)()
        assert same(before, contents(self.cache))

    def clear(self) -> None:
        self.cache.clear()


@pytest.mark.parametrize("seed", some(range(60), 10))
def test_random_operations(seed: int) -> None:
    machine = Machine(seed)
    try:
        machine.run(STEPS_A_SEED)
    except BaseException:
        print("\n".join(machine.log[:1] + machine.log[-30:]))
        raise
