"""The clocks of a whole call of a kernel: starts, turns and ends of its blocks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from flashattn_jit.inspect.machine_code.prediction import KernelModel
from flashattn_jit.jit.compilation.loops import PRODUCTS, count, once

_BLOCK_START = 1500
"""Clocks of a block that nothing of its own hides: the end of the block before it, its launch, and
the latency of device memory for its first loads. An estimate."""


def call_clocks(model: KernelModel, tiles: Iterable[int], num_sms: int, partial: int = 0) -> float:
    """The clocks of a call whose items visit `tiles` tiles of keys each, in launch order.

    partial: how many tiles of each item are partial.
    """
    cycles = model.full.common.cycles
    ends, alone = _ends_and_alone(model)
    start = _BLOCK_START if model.item_start is None else model.item_start
    overhead = ends + start + partial * (model.partial.cycles - cycles)
    turns = (t + overhead / cycles for t in tiles)
    clocks = makespan(turns, model.blocks, num_sms, cycles, alone)
    return clocks + (_BLOCK_START if model.item_start is not None else 0)


@lru_cache(maxsize=1)
def _ends_and_alone(model: KernelModel) -> tuple[float, float]:
    """Clocks of an item beside the turns of its tiles, and of a turn of a block that is alone on
    its multiprocessor."""
    way = once(model.code, model.item_start is not None)
    outside = count(way, *PRODUCTS) // model.full.loop.products
    ends = model.turn(way).cycles - outside * model.full.common.cycles
    return ends, model.turn(model.full.loop.common, 1).cycles


def makespan(turns: Iterable[float], slots: int, num_sms: int, full: float, alone: float) -> float:
    """The clocks after which all blocks have made their turns; they are launched in order.

    A multiprocessor has up to `slots` blocks. With all slots taken a turn costs each block `full`
    clocks, with one `alone`, linearly between.
    """
    waiting = iter(turns)
    cost = [0.0] + [
        full if slots == 1 else alone + (full - alone) * n / (slots - 1) for n in range(slots)
    ]
    left: list[list[float]] = [[] for _ in range(num_sms)]  # turns of each resident block
    for _, sm in product(range(slots), range(num_sms)):
        if (t := next(waiting, None)) is not None:
            left[sm].append(t)
    since = [0.0] * num_sms
    heap = [(min(here) * cost[len(here)], sm) for sm, here in enumerate(left) if here]
    heapq.heapify(heap)
    now = 0.0
    while heap:
        now, sm = heapq.heappop(heap)
        here = left[sm]
        done = (now - since[sm]) / cost[len(here)]
        here[:] = [t - done for t in here]
        since[sm] = now
        here.remove(min(here))
        if (t := next(waiting, None)) is not None:
            here.append(t)
        if here:
            heapq.heappush(heap, (now + max(0.0, min(here)) * cost[len(here)], sm))
    return now
