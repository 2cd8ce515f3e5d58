"""An exception at any line of the bookkeeping leaves a sound cache, or one that refuses calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.kv.engine import Engine

FOLDER = str(Path(fa.kv.__file__).parent)


def made() -> tuple[Engine, list[fa.kv.Sequence]]:
    """Two groups, with a fork, a suspended sequence and evictable pages."""
    groups = (
        fa.kv.Group((0,), 1, 4, variant=fa.Causal()),
        fa.kv.Group((1,), 1, 4, variant=fa.SlidingWindow(6)),
    )
    cache = fa.kv.Cache(fa.kv.Spec(groups, 4, torch.float32), 12, max_kv_len=64)
    engine = Engine(cache, [None, lambda q, k: 0 <= q - k < 6])
    for tokens in (range(10), range(50, 59), range(70, 79)):
        seq = engine.open(list(tokens))
        engine.step([(seq, list(tokens))])
    one, away, gone = cache.sequences
    away.suspend()
    gone.close()
    return engine, [one, engine.fork(one), away]


def fill(engine: Engine, seqs: list[fa.kv.Sequence]) -> None:
    """New tokens for two sequences, which needs a copy, an eviction, and gives pages up."""
    step = engine.cache.step([(seqs[0], range(20, 39)), (seqs[1], [1, 2, 3])])
    step.commit()


def resume(engine: Engine, seqs: list[fa.kv.Sequence]) -> None:
    with engine.cache.step([(seqs[0], [1] * 18)]) as step:  # leaves no room without an eviction
        step.commit()
    seqs[2].resume()


ACTS: dict[str, Callable[[Engine, list[fa.kv.Sequence]], Any]] = {
    "step": fill,
    "abort": lambda engine, seqs: engine.cache.step([(s, [1] * 5) for s in seqs[:2]]).abort(),
    "open": lambda engine, seqs: engine.cache.open([*range(8), 60]),
    "fork": lambda engine, seqs: seqs[0].fork(),
    "trim": lambda engine, seqs: seqs[0].trim(9),
    "suspend": lambda engine, seqs: seqs[0].suspend(),
    "resume": resume,
    "close": lambda engine, seqs: seqs[0].close(),
    "clear": lambda engine, seqs: engine.cache.clear(),
}


STRIDES = {"step": 7, "resume": 7, "abort": 3, "clear": 3}
"""Of the lines that are tried, where an act runs hundreds; all lines pass."""


class Interrupt:
    """Raises KeyboardInterrupt before line number `at` of those that run in fa.kv."""

    def __init__(self, at: int) -> None:
        self.left = at

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.trace


def interrupted(at: int, act: Callable[[], Any]) -> bool:
    """Whether an act ran into an interrupt at this line."""
    before = sys.gettrace()
    sys.settrace(Interrupt(at).trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_at_any_line(name: str) -> None:
    at = sound = marked = 0
    while True:
        engine, seqs = made()
        cache = engine.cache
        if not interrupted(at, lambda: ACTS[name](engine, seqs)):  # noqa: B023  # called at once
            break
        at += STRIDES.get(name, 1)
        if cache.changing:
            marked += 1
            for call in (cache.clear, seqs[0].fork, lambda: cache.open([1])):  # noqa: B023
                with pytest.raises(fa.SequenceError, match="make a new"):
                    call()
            continue
        sound += 1
        cache.check()
        for seq in cache.sequences:
            if seq.in_step:
                seq.step.abort()
            engine.tokens[seq.number] = seq.token_ids.tolist()
            seq.close()
        cache.check()
        cache.clear()
        assert all(p.num_free == p.num_pages for p in cache.pools), "a page is lost"
    print(f"{name}: {sound} lines leave a sound cache, {marked} a marked one")
    assert sound and marked


def test_with_blocks_let_the_interrupt_through() -> None:
    at = 0
    while True:
        engine, _ = made()

        def act() -> None:
            cache = engine.cache  # noqa: B023  # called at once
            with cache.open(range(30, 44)) as seq, cache.step([(seq, range(30, 44))]) as step:
                step.commit()

        if not interrupted(at, act):
            break
        at += 7
    assert at > 50
