"""What the model predicts for a kernel: the clocks of its loops, and the time of a whole call."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ...jit.compilation.loops import PRODUCTS, Loop, count, loops, once
from .disassembly import Instruction
from .multiprocessor import Multiprocessor, flops_of
from .simulation import Turn, simulate

_BLOCK_START = 1500
"""Clocks of a block that nothing of its own hides: the end of the block before it, its launch, and
the latency of device memory for its first loads. An estimate."""


@dataclass(frozen=True)
class LoopCost:
    """A loop and its simulated turns: the common way and the longest one."""

    loop: Loop[Instruction]
    common: Turn
    longest: Turn


@dataclass(frozen=True)
class KernelModel:
    """The machine code of one kernel, and the blocks and warps that share a multiprocessor."""

    code: tuple[Instruction, ...]
    machine: Multiprocessor
    blocks: int
    warps: int

    @cached_property
    def costs(self) -> tuple[LoopCost, ...]:
        """The loops with matrix instructions, in order of address, with their simulated turns."""
        return tuple(
            LoopCost(x, self._turn(x.common), self._turn(x.longest)) for x in loops(self.code)
        )

    def flops(self, cost: LoopCost) -> float:
        """Of one turn of every resident block."""
        return self.blocks * self.warps * sum(map(flops_of, cost.loop.common))

    def flops_per_s(self, cost: LoopCost) -> float:
        """The rate of one multiprocessor whose blocks repeat the loop's common turn."""
        return self.flops(cost) / cost.common.cycles * self.machine.clock_hz

    def call_clocks(self, tiles: Iterable[int], num_sms: int, partial: int = 0) -> float:
        """The clocks of a call whose blocks visit `tiles` tiles of keys each, in launch order.

        partial: how many tiles of each block take the longest way of the loop.
        """
        cost = max(self.costs, key=lambda c: c.loop.products)
        way = once(self.code)
        outside = count(way, *PRODUCTS) // cost.loop.products
        overhead = (
            self._turn(way).cycles
            - outside * cost.common.cycles
            + partial * (cost.longest.cycles - cost.common.cycles)
            + _BLOCK_START
        )
        alone = simulate(cost.loop.common, self.machine, 1, self.warps).cycles
        turns = (t + overhead / cost.common.cycles for t in tiles)
        return makespan(turns, self.blocks, num_sms, cost.common.cycles, alone)

    def _turn(self, body: tuple[Instruction, ...]) -> Turn:
        return simulate(body, self.machine, self.blocks, self.warps)


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
