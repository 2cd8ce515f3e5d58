"""What the model predicts for a kernel: the clocks of its loops, and the time of a whole call."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from ...codegen.spec import KernelSpec
from ...jit.compilation.loops import PRODUCTS, Loop, count, loops, once
from .disassembly import Instruction
from .multiprocessor import Multiprocessor, flops_of
from .rows import with_rows
from .simulation import Ring, Turn, simulate

_BLOCK_START = 1500
"""Clocks of a block that nothing of its own hides: the end of the block before it, its launch, and
the latency of device memory for its first loads. An estimate."""

QUERY_START = 800
"""Clocks of an item of a resident block that nothing hides, where its queries are loaded when the
item before it has ended: the latency of device memory. An estimate."""


@dataclass(frozen=True)
class LoopCost:
    """A loop and its simulated turns: the common way and the longest one."""

    loop: Loop[Instruction]
    common: Turn
    longest: Turn


@dataclass(frozen=True)
class KernelModel:
    """The machine code of one kernel, and the blocks and warps that share a multiprocessor.

    warps: those of a block that multiply. ring: where the tiles of wgmma come from. item_start: of
    blocks that stay and process one item after another, the clocks of an item's start that nothing
    hides; None if each block has one item. rows: of kernels whose warps change rows before they
    multiply, what has them (`with_rows`).
    """

    code: tuple[Instruction, ...]
    machine: Multiprocessor
    blocks: int
    warps: int
    ring: Ring | None = None
    item_start: int | None = None
    rows: KernelSpec | None = None

    @property
    def clock_hz(self) -> float:
        """The clock under the load of the kernel's products."""
        wgmma = count(self.code, "HGMMA")
        return self.machine.wgmma_clock_hz if wgmma else self.machine.clock_hz

    @cached_property
    def costs(self) -> tuple[LoopCost, ...]:
        """The loops with matrix instructions, in order of address, with their simulated turns."""
        turn = None
        if self.rows is not None:
            turn = partial(with_rows, spec=self.rows, warps=self.warps)
        found = loops(self.code, turn)
        return tuple(LoopCost(x, self._turn(x.common), self._turn(x.longest)) for x in found)

    @cached_property
    def full(self) -> LoopCost:
        """The loop of full tiles: of those with the most products the first one; where partial
        tiles have a loop of their own and blocks stay, the cheapest."""
        most = max(x.loop.products for x in self.costs)
        found = [x for x in self.costs if x.loop.products == most]
        return found[0] if self.item_start is None else min(found, key=lambda x: x.common.cycles)

    @cached_property
    def partial(self) -> Turn:
        """A turn with a partial tile: of their own loop, or the longest one."""
        if self.item_start is None or len(self.costs) < 2:
            return self.full.longest
        return max((x.common for x in self.costs), key=lambda t: t.cycles)

    def flops(self, cost: LoopCost) -> float:
        """Of one turn of every resident block."""
        return self.blocks * self.warps * sum(map(flops_of, cost.loop.common))

    def flops_per_s(self, cost: LoopCost) -> float:
        """The rate of one multiprocessor whose blocks repeat the loop's common turn."""
        return self.flops(cost) / cost.common.cycles * self.clock_hz

    def call_clocks(self, tiles: Iterable[int], num_sms: int, partial: int = 0) -> float:
        """The clocks of a call whose items visit `tiles` tiles of keys each, in launch order.

        partial: how many tiles of each item are partial.
        """
        cycles = self.full.common.cycles
        start = _BLOCK_START if self.item_start is None else self.item_start
        overhead = self._ends + start + partial * (self.partial.cycles - cycles)
        turns = (t + overhead / cycles for t in tiles)
        clocks = makespan(turns, self.blocks, num_sms, cycles, self._alone)
        return clocks + (_BLOCK_START if self.item_start is not None else 0)

    @cached_property
    def _ends(self) -> float:
        """Clocks of an item beside the turns of its tiles."""
        way = once(self.code, self.item_start is not None)
        outside = count(way, *PRODUCTS) // self.full.loop.products
        return self._turn(way).cycles - outside * self.full.common.cycles

    @cached_property
    def _alone(self) -> float:
        """Clocks of a turn of a block that is alone on its multiprocessor."""
        return self._turn(self.full.loop.common, 1).cycles

    def _turn(self, body: tuple[Instruction, ...], blocks: int = 0) -> Turn:
        changes = self.rows is not None or (self.ring is not None and bool(self.ring.changers))
        return simulate(body, self.machine, blocks or self.blocks, self.warps, self.ring, changes)


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
