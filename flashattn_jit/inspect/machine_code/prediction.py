"""What the model predicts for a kernel: the clocks of its loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from ...codegen.spec import KernelSpec
from ...jit.compilation.loops import Loop, count, loops
from .disassembly import Instruction
from .multiprocessor import Multiprocessor, flops_of
from .rows import with_rows
from .simulation import Ring, Turn, simulate

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
        return tuple(LoopCost(x, self.turn(x.common), self.turn(x.longest)) for x in found)

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

    def turn(self, body: tuple[Instruction, ...], blocks: int = 0) -> Turn:
        """The simulated turn of a loop. blocks: resident ones, if not the model's."""
        changes = self.rows is not None or (self.ring is not None and bool(self.ring.changers))
        return simulate(body, self.machine, blocks or self.blocks, self.warps, self.ring, changes)
