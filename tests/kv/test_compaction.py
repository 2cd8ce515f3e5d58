"""Compacted tables under random operations: each row is the one that the model of positions says.

The model is, for each sequence, the list of original positions that its table still has. A second
group of the same cache keeps holes, a third everything.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from tests.harness.rotation import some
from tests.kv.engine import Engine, prefixes

WINDOW, SINKS, SIZE, MAX_LEN = 13, 3, 4, 300


def keep(q: int, k: int) -> bool:
    return k <= q and (q - k < WINDOW or k < SINKS)


def compacted(kept: list[int], lookback: int) -> list[int]:
    """`kept` without the pages that no query from the length less lookback on reads."""
    length = len(kept)
    out: list[int] = []
    for begin in range(0, length, SIZE):
        page = range(begin, begin + SIZE)
        queries = range(max(0, length - lookback), length + WINDOW + SIZE)
        whole = begin + SIZE <= length
        if not whole or any(keep(q, k) for q in queries for k in page):
            out += kept[begin : begin + SIZE]
    return out


@pytest.mark.parametrize("seed", some(range(8), 3))
def test_random_operations(seed: int) -> None:
    pick = random.Random(seed)
    lookback = pick.choice([0, 3])
    variant = fa.StreamingLLM(window=WINDOW, num_sinks=SINKS)
    groups = (
        fa.kv.Group((0,), 1, 4, variant=variant, reclaim="compact"),
        fa.kv.Group((1,), 1, 4, variant=variant),
        fa.kv.Group((2,), 1, 4, variant=variant, reclaim="never"),
    )
    spec = fa.kv.Spec(groups, SIZE, torch.float32)
    cache = fa.kv.Cache(spec, [160, 160, 600], max_kv_len=MAX_LEN, lookback=lookback)
    engine = Engine(cache, [keep, keep, None])
    kept: dict[int, list[int]] = {}
    shortened = 0  # hits with pages that the mask gives up

    def check(seq: fa.kv.Sequence) -> None:
        engine.verify(seq)
        own, table = kept[seq.number], seq.pages(0)
        assert seq.group_len(0) == len(own)
        hashes = prefixes(engine.tokens[seq.number])
        k, _ = cache.tensors(0)
        at = np.arange(len(own))
        rows = k[torch.from_numpy(table[at // SIZE]).long(), torch.from_numpy(at % SIZE), 0]
        live = table[at // SIZE] != 0
        assert live.all(), "a compacted table has holes"
        assert rows[:, 1].tolist() == own
        assert rows[:, 0].tolist() == [hashes[x] for x in own]

    for _ in range(250):
        live = [s for s in cache.sequences if not s.is_suspended]
        act = pick.random()
        if act < 0.12 and len(cache.sequences) < 6:
            known = [[], *engine.tokens.values()]
            prompt = pick.choice(known)[: pick.randrange(1, 80)]
            prompt = prompt + [pick.randrange(2) for _ in range(pick.randrange(1, 30))]
            seq = engine.open(prompt[:MAX_LEN])
            kept[seq.number] = compacted(list(range(seq.num_cached)), lookback)
            shortened += len(kept[seq.number]) < seq.num_cached
        elif act < 0.2 and live and len(cache.sequences) < 6:
            seq = pick.choice(live)
            kept[engine.fork(seq).number] = list(kept[seq.number])
        elif act < 0.28 and live:
            seq = pick.choice(live)
            kv_len = max(0, seq.kv_len - pick.choice([1, 2, 3, 9]))
            try:
                seq.trim(kv_len)
            except fa.InputError:
                assert kv_len < engine.longest[seq.number] - lookback
            else:
                del engine.tokens[seq.number][kv_len:]
                kept[seq.number] = [x for x in kept[seq.number] if x < kv_len]
        elif act < 0.34 and live:
            pick.choice(live).suspend()
        elif act < 0.42 and len(live) < len(cache.sequences):
            pick.choice([s for s in cache.sequences if s.is_suspended]).resume()
        elif act < 0.46 and cache.sequences:
            pick.choice(cache.sequences).close()
        elif live:
            items = [
                (s, [pick.randrange(2) for _ in range(min(MAX_LEN - s.kv_len, n))])
                for s in pick.sample(live, pick.randrange(1, len(live) + 1))
                for n in [pick.choice([1, 1, 2, 7, 30, 60])]
            ]
            before = {s.number: s.kv_len for s, _ in items}
            engine.step(items)
            for seq, new in items:
                own = kept[seq.number]
                own += range(before[seq.number], before[seq.number] + len(new))
                first, last = (n - lookback for n in (before[seq.number], seq.kv_len))
                if new and first // SIZE != last // SIZE:  # the mask is asked once a page
                    kept[seq.number] = compacted(own, lookback)
        cache.check()
        for seq in cache.sequences:
            if not seq.is_suspended:
                check(seq)
    assert shortened, "no prefix was long enough to be compacted when it was found"
    stats = cache.stats()
    assert stats.groups[0].reclaimed > 20 and stats.groups[2].reclaimed == 0
