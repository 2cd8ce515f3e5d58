"""Random opens, steps, forks, trims, suspends and failures over the fake engine.

Sequences draw their tokens from a small alphabet and often continue each other, so that prefixes
are shared, split and evicted all the time. After every operation all live rows of some sequence
are read again, and the cache is checked.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import flashattn_jit as fa
from tests.harness.rotation import some
from tests.kv.engine import Engine, contents, same
from tests.kv.machine import Items, Machine

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


class StateMachine(Machine):
    """All masks, pages, policies and layouts over the fake engine."""

    weights: ClassVar = {
        "open": 4, "step": 12, "fork": 2, "trim": 2, "close": 3, "suspend": 1, "resume": 2,
        "fail": 2, "abort": 1, "wrong": 1, "clear": 0.1,
    }  # fmt: skip
    sizes, max_len, most = (0, 1, 1, 3, 17, 40), MAX_LEN, 8

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
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
        self.tokens, self.longest = self.engine.tokens, self.engine.longest
        self.cache = cache
        self.log = [f"page_size {self.size}, {policy}, lookback {cache.lookback}"]

    def pass_time(self) -> None:
        self.now += self.random.random() * 10

    def verify(self, seq: fa.kv.Sequence) -> None:
        self.engine.verify(seq)

    def write(self, step: fa.kv.Step, items: Items) -> None:
        self.engine.write(step)

    def write_some(self, step: fa.kv.Step, items: Items) -> None:
        self.engine.write(step, layers=self.random.randrange(5))

    def backs(self, seq: fa.kv.Sequence) -> list[int]:
        return [0, 1, 3, self.cache.lookback, 20]

    # --- operations -------------------------------------------------------------------------------

    def open(self) -> None:
        if len(self.cache.sequences) > self.most:
            return
        known = list(self.engine.tokens.values())
        prompt = list(self.random.choice(known)) if known else []
        prompt = prompt[: self.random.randrange(len(prompt) + 1)]
        prompt += self.new_tokens(self.random.randrange(20))
        self.engine.open(
            prompt[:MAX_LEN], namespace=self.random.choice([b"", b"", b"other"]),
            priority=self.random.choice([0, 50]),
        )  # fmt: skip

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


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("seed", some(range(60), 10))
def test_random_operations(seed: int) -> None:
    StateMachine(seed).run(STEPS_A_SEED)
