"""A simulation of a multiprocessor whose warps repeat a loop body.

A warp issues in order: not before the stall count of its previous instruction has passed, the
scoreboards that it waits for are down, and the pipe is free. Copies and loads take turns at the
load and store unit in the order of their issue, and copies then at the L2. What it leaves out: the
instruction cache, register banks, bank conflicts, misses of the L2, and power.

Products of warpgroups (wgmma) are queued as they are issued, and a scheduler's tensor core computes
its warps' part of them one after another; a warp waits for them at WARPGROUP.DEPBAR alone. Of the
warpgroup that produces, the copies by TMA are simulated (`Ring`) and the instructions are not: they
are few. Warps that change rows run beside those that multiply (`Changers`). Where warpgroups take
turns by named barriers, each passes the turn to the next one.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import InputError
from .disassembly import Instruction
from .multiprocessor import (
    SCHEDULERS,
    SHARED_BYTES,
    Multiprocessor,
    pipe_of,
    wavefronts,
    wgmma_columns,
)

_WARM_UP, _MEASURED = 4, 12
_QUEUE = 8  # instructions of a scheduler that wait for the load and store unit
_LEFT = re.compile(r"SB(\d), 0x([0-9a-f]+)")
_THREADS = re.compile(r", 0x([0-9a-f]+)$")
_PRODUCTS_LEFT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_PRODUCTS = 6  # where a warp keeps the groups of its wgmma, beside six scoreboards


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop costs when every resident block makes one.

    cycles: clocks of the multiprocessor. pipes: the share of the clocks that each pipe is busy;
    with wgmma also shared memory ("shared": operands of products, and what TMA writes) and
    "registers", by which other instructions hold up the tensor core. stalls: by cause, the share of
    a warp's clocks that it waits.
    """

    cycles: float
    pipes: dict[str, float]
    stalls: dict[str, float]

    @property
    def binding(self) -> str:
        """The busiest pipe. What other instructions take of the registers (see `Multiprocessor`)
        counts as time of the tensor core."""
        return max(self.pipes, key=self.busy)

    def busy(self, pipe: str) -> float:
        """The share of the clocks in which a pipe can take no other work."""
        held = self.pipes.get("registers", 0.0) if pipe == "tensor" else 0.0
        return self.pipes[pipe] + held

    @property
    def bound_by(self) -> str:
        """The busiest pipe with its share, in words."""
        held = self.pipes.get("registers", 0.0) if self.binding == "tensor" else 0.0
        plus = f" + {held:.0%} registers" if held >= 0.005 else ""
        return f"{self.binding} {self.pipes[self.binding]:.0%}{plus}"


@dataclass(frozen=True, slots=True)
class Changers:
    """Four warps of a block that change rows of K or V between their copy and the products.

    body: what one warp executes for a tile of K and one of V, each of which ends with a fence
    (FENCE). keys, values: which of the two are changed. coded: of keys and of values, whether their
    copies land in buffers of their own, which are free when the tile in them has been changed.
    """

    body: tuple[Instruction, ...]
    keys: bool
    values: bool
    coded: tuple[bool, bool]

    def widens(self, tile: int) -> bool:
        """Whether the n-th tile of a ring is copied to a buffer of its own before."""
        return self.coded[tile % 2]

    def changes(self, tile: int) -> bool:
        """Whether they change the n-th tile of a ring, in which K and V alternate."""
        return self.values if tile % 2 else self.keys

    def following(self, tile: int) -> int:
        """The tile that they change after this one."""
        return tile + (1 if self.keys and self.values else 2)


@dataclass(frozen=True, slots=True)
class Ring:
    """The buffers of a block that a producer fills by TMA, one tile of K or of V each.

    Products that begin (WARPGROUP.ARRIVE) wait for the next tile, and the oldest one is free when
    every warp has arrived on a barrier in shared memory (SYNCS.ARRIVE). buffers: of K and V
    together. bytes: of a tile, as the L2 delivers them to one multiprocessor. changers: the warps
    that change tiles before they are multiplied, if any.
    """

    buffers: int
    bytes: float
    changers: Changers | None = None


@dataclass(slots=True)
class _Op:
    """An instruction as the simulation needs it."""

    pipe: str
    waits: tuple[int, ...]
    write: int | None
    read: int | None
    stall: int
    words: int
    name: str
    left: tuple[int, int] | None  # of DEPBAR.LE: scoreboard, groups that may be in flight
    columns: int  # of a wgmma, else 0
    clocks: float  # of the tensor core, for a product
    operands: float  # of shared memory, for a wgmma
    ends_group: bool  # of a wgmma: the last one of its group
    meets: bool  # of a barrier: waits for others
    threads: int  # of a named barrier, else 0
    takes_turn: bool
    passes_turn: bool
    takes_tile: bool
    frees_tile: bool
    begins_change: bool = False
    ends_change: bool = False


@dataclass(slots=True)
class _Warp:
    """A warp: its instructions, the next one and when it may issue. Of each scoreboard: when it is
    down, what it waits for, when its groups of copies arrive. copied: when the copies so far
    arrive. taken, freed: tiles of the ring; of a warp that changes them, `taken` is the next."""

    block: int
    index: int  # in its block
    body: list[_Op]
    changes: bool = False
    at: int = 0
    ready: float = 0.0
    down: list[float] = field(default_factory=lambda: [0.0] * 6)
    cause: list[str] = field(default_factory=lambda: [""] * 6)
    groups: list[list[float]] = field(default_factory=lambda: [[] for _ in range(7)])
    copied: float = 0.0
    turns_given: list[float] = field(default_factory=list)
    parked: bool = False
    taken: int = 0
    freed: int = 0
    turns: int = 0


def simulate(
    body: Sequence[Instruction],
    machine: Multiprocessor,
    blocks: int,
    warps: int,
    ring: Ring | None = None,
    reads_tables: bool = False,
) -> Turn:
    """Repeat `body` on every warp of `blocks` thread blocks of `warps` warps.

    The blocks start apart by equal parts of a turn. Each scheduler issues the instruction that can
    go first; of several, that of the warp with the fewest turns, then of the one that issued last.

    ring: where the tiles of wgmma come from; without it, and in code that does not free as many
    tiles as it takes, they are there. reads_tables: loads from global memory are of tables that
    hooks read for each row, from the L2; else they are in the L1.

    Raises:
        InputError: no warp can go on.
    """
    return _Simulation(body, machine, blocks, warps, ring, reads_tables).run()


class _Simulation:
    def __init__(
        self,
        body: Sequence[Instruction],
        machine: Multiprocessor,
        blocks: int,
        warps: int,
        ring: Ring | None,
        reads_tables: bool,
    ) -> None:
        self._reads_tables = reads_tables
        self._body = [_op(i, machine) for i in body]
        self._source = body
        takes = any(o.takes_turn for o in self._body)
        if not takes or not any(o.passes_turn for o in self._body):
            for o in self._body:
                o.takes_turn = o.passes_turn = False
        changers = None
        tiles = sum(o.takes_tile for o in self._body)
        self._queued = any(o.columns for o in self._body)
        self._ring = ring if tiles == sum(o.frees_tile for o in self._body) else None
        self._filled: dict[tuple[int, int], float] = {}  # when a block's n-th tile has arrived
        self._landed: dict[tuple[int, int], float] = {}  # the same of one that is changed first
        self._freed: dict[tuple[int, int], int] = defaultdict(int)  # by how many warps
        self._changed: dict[tuple[int, int], int] = defaultdict(int)
        self._room: dict[tuple[int, int], float] = {}  # when it may be changed, if it has landed
        if self._ring:
            changers = self._ring.changers
            for tile in ((b, n) for b in range(blocks) for n in range(self._ring.buffers)):
                first = self._landed if changers and changers.changes(tile[1]) else self._filled
                first[tile] = self._room[tile] = 0.0
        self._machine = machine
        self._warps_of_block = warps
        apart = max(1.0, sum(o.stall for o in self._body) / blocks)
        more = _changes(changers, machine) if changers else []
        self._warps = [
            _Warp(b, i, more if i >= warps else self._body, i >= warps, ready=b * apart)
            for b in range(blocks)
            for i in range(warps + (SCHEDULERS if more else 0))
        ]
        for warp in self._warps:
            warp.taken = int(warp.changes and changers is not None and not changers.keys)
        self._of = [self._warps[s::SCHEDULERS] for s in range(SCHEDULERS)]
        for warp in self._warps:
            if warp.index < SCHEDULERS:
                warp.turns_given.append(0.0)
        pipes = {"tensor": 1, "fma": machine.fma_pipes, "alu": 1, "mufu": 1, "uniform": 1}
        self._free = [{p: [0.0] * n for p, n in pipes.items()} for _ in range(SCHEDULERS)]
        self._issued = [-1.0] * SCHEDULERS
        self._last: list[_Warp | None] = [None] * SCHEDULERS
        self._queue: list[list[float]] = [[] for _ in range(SCHEDULERS)]
        self._lsu = 0.0
        self._l2 = 0.0
        self._arrived: dict[tuple[int, int], list[tuple[_Warp, float]]] = defaultdict(list)
        self._busy: dict[str, float] = defaultdict(float)
        self._stalls: dict[str, float] = defaultdict(float)

    def run(self) -> Turn:
        begin = self._run_until(_WARM_UP, 0.0)
        self._busy.clear()
        self._stalls.clear()
        clocks = self._run_until(_WARM_UP + _MEASURED, begin) - begin
        shares = {p: n / clocks for p, n in self._busy.items()}
        waits = sum(not w.changes for w in self._warps)
        waiting = {c: n / clocks / waits for c, n in self._stalls.items()}
        return Turn(clocks / _MEASURED, shares, waiting)

    def _run_until(self, turns: int, time: float) -> float:
        """Go on until every warp has made that many turns; the clock at which the last one did."""
        left = sum(w.turns < turns for w in self._warps)
        # Each scheduler by the clock of its next issue; it may have moved on by its turn.
        heap = [(time, s) for s in range(SCHEDULERS) if self._of[s]]
        idle: list[int] = []
        while left:
            if not heap:
                raise InputError(f"the model cannot simulate a kernel: {self._why_none_goes_on()}")
            now, s = heapq.heappop(heap)
            choice = self._choose(s)
            if choice is None:  # all its warps wait for others
                idle.append(s)
                continue
            time, warp, cause = choice
            if heap and time > max(now, heap[0][0]):
                heapq.heappush(heap, (time, s))
                continue
            released = self._issue(s, warp, time, cause)
            if warp.at == len(warp.body):
                warp.at = 0
                warp.turns += 1
                left -= warp.turns == turns
            heapq.heappush(heap, (time, s))
            if released:
                for other in idle:
                    heapq.heappush(heap, (time, other))
                idle.clear()
        return time

    def _why_none_goes_on(self) -> str:
        multiply = [w for w in self._warps if not w.changes]
        at = (self._source[w.at - 1 if w.parked else w.at] for w in multiply)
        where = sorted({f"{i.opcode} {i.operands}".strip() for i in at})
        return f"all its {len(multiply)} warps wait for others, at {', '.join(where)}"

    def _choose(self, s: int) -> tuple[float, _Warp, str] | None:
        """When the scheduler issues next, of which warp, and what that warp waited for."""
        best: tuple[float, int, bool, _Warp, str] | None = None
        floor = self._issued[s] + 1
        for warp in self._of[s]:
            op = warp.body[warp.at]
            if warp.parked or op.takes_turn and not warp.turns_given:
                continue
            time, cause = warp.ready, "fixed latency"
            if op.takes_tile and self._ring:
                filled = self._filled.get((warp.block, warp.taken))
                if filled is None:
                    continue
                if filled > time:
                    time, cause = filled, "tiles"
            if op.begins_change:
                tile = (warp.block, warp.taken)
                if tile not in self._landed or tile not in self._room:
                    continue
                time = max(time, self._landed[tile], self._room[tile])
            if op.takes_turn and warp.turns_given[0] > time:
                time, cause = warp.turns_given[0], "turn"
            for board in op.waits:
                if warp.down[board] > time:
                    time, cause = warp.down[board], warp.cause[board]
            if op.left is not None:
                board, kept = op.left
                groups = warp.groups[board]
                if len(groups) > kept and groups[-1 - kept] > time:
                    time = groups[-1 - kept]
                    cause = "products" if board == _PRODUCTS else "copies"
            free = self._pipe_free(s, op)
            if free > time:
                time, cause = free, f"{op.pipe} busy"
            if floor > time:
                time, cause = floor, "not selected"
            key = (time, warp.turns, warp is not self._last[s])
            if best is None or key < best[:3]:
                best = (*key, warp, cause)
        return None if best is None else (best[0], best[3], best[4])

    def _pipe_free(self, s: int, op: _Op) -> float:
        free = self._free[s]
        match op.pipe:
            case "heavy":
                return free["fma"][0]
            case "lsu" | "copy":
                queue = self._queue[s]
                return queue[-_QUEUE] if len(queue) >= _QUEUE else 0.0
            case "control":
                return 0.0
            case "mufu":
                return free["mufu"][0] - 2 * self._machine.mufu
            case "tensor" if op.columns:
                return 0.0
            case pipe:
                return min(free[pipe])

    def _issue(self, s: int, warp: _Warp, time: float, cause: str) -> bool:
        """Issue the warp's instruction. True if it let other warps go on."""
        op, m = warp.body[warp.at], self._machine
        if not warp.changes:
            if time > warp.ready:
                self._stalls[cause] += time - warp.ready
            self._stalls["fixed latency"] += max(0, op.stall - 1)
            self._stalls["issue"] += 1
        self._issued[s], self._last[s] = time, warp
        self._busy["issue"] += 1 / SCHEDULERS
        warp.ready = time + max(1, op.stall)
        warp.at += 1
        if op.pipe in _REGISTERS:
            self._delay_products(s, time)
        done = self._execute(s, op, time)
        if op.write is not None and op.name != "LDGDEPBAR" and done > warp.down[op.write]:
            warp.down[op.write], warp.cause[op.write] = done, _CAUSES.get(op.pipe, op.pipe)
        if op.read is not None:
            read = self._queue[s][-1] + 6 if op.pipe in ("lsu", "copy") else time + 6
            if read > warp.down[op.read]:
                warp.down[op.read], warp.cause[op.read] = read, "operands read"
        match op.name:
            case "LDGSTS":
                warp.copied = max(warp.copied, done)
            case "LDGDEPBAR":
                assert op.write is not None
                warp.groups[op.write] = [*warp.groups[op.write][-8:], warp.copied]
            case "BRA":
                warp.ready += m.branch
            case "HGMMA":
                if op.ends_group:
                    warp.groups[_PRODUCTS] = [*warp.groups[_PRODUCTS][-8:], done]
            case "WARPGROUP" if op.takes_tile:
                warp.taken += 1
            case "FENCE" if op.ends_change and self._ring and self._ring.changers:
                return self._hand_on(self._ring, self._ring.changers, warp, time)
            case "SYNCS" if op.frees_tile and self._ring:
                return self._free_tile(self._ring, warp, time)
            case "BAR" if op.takes_turn:
                warp.turns_given.pop(0)
            case "BAR" if op.passes_turn:
                peers = [w for w in self._of[s] if w.block == warp.block and not w.changes]
                following = peers[(peers.index(warp) + 1) % len(peers)]
                following.turns_given.append(time + m.barrier)
                return True
            case "BAR" if op.meets:
                return self._arrive(warp, op, time)
        return False

    def _delay_products(self, s: int, time: float) -> None:
        """An instruction takes a turn at the registers from the products of wgmma in flight."""
        delay, tensor = self._machine.wgmma_delay, self._free[s]["tensor"]
        if not self._queued or not delay or tensor[0] <= time:
            return
        tensor[0] += delay
        self._busy["registers"] += delay / SCHEDULERS
        for warp in self._of[s]:
            groups = warp.groups[_PRODUCTS]
            for n, done in enumerate(groups):
                if done - self._machine.wgmma_latency > time:
                    groups[n] = done + delay

    def _free_tile(self, ring: Ring, warp: _Warp, time: float) -> bool:
        """A warp has freed its next tile; the last one starts the copy of a later tile there."""
        tile = (warp.block, warp.freed)
        warp.freed += 1
        self._freed[tile] += 1
        if self._freed.get(tile) != self._warps_of_block:
            return False
        del self._freed[tile], self._filled[tile]
        there = (warp.block, tile[1] + ring.buffers)
        changers = ring.changers
        if changers is None or not changers.changes(there[1]):
            self._filled[there] = self._copied(ring, time)
            return True
        self._room[there] = time
        if not changers.widens(there[1]):
            self._landed[there] = self._copied(ring, time)
        return True

    def _copied(self, ring: Ring, time: float) -> float:
        """When a tile arrives whose copy starts now."""
        moved = ring.bytes / self._machine.l2_bytes
        self._l2 = max(self._l2, time) + moved
        self._busy["l2"] += moved
        self._busy["shared"] += ring.bytes / SHARED_BYTES
        return self._l2 + self._machine.tma_latency

    def _hand_on(self, ring: Ring, changers: Changers, warp: _Warp, time: float) -> bool:
        """A warp has changed its rows of a tile; the last one hands the tile on, and starts the
        copy of a later one to the buffer of its codes."""
        tile = (warp.block, warp.taken)
        warp.taken = changers.following(warp.taken)
        self._changed[tile] += 1
        if self._changed[tile] != SCHEDULERS:
            return False
        del self._changed[tile], self._landed[tile], self._room[tile]
        self._filled[tile] = time + self._machine.barrier
        if changers.widens(tile[1]):
            self._landed[warp.block, tile[1] + ring.buffers] = self._copied(ring, time)
        return True

    def _execute(self, s: int, op: _Op, time: float) -> float:
        """Occupy the pipes; the clock at which the result is written."""
        m, free, pipe = self._machine, self._free[s], op.pipe
        match pipe:
            case "tensor":
                free[pipe][0] = max(free[pipe][0], time) + op.clocks
                self._busy[pipe] += op.clocks / SCHEDULERS
                if not op.columns:
                    return time + 4 * m.hmma
                self._busy["shared"] += op.operands / SCHEDULERS
                return free[pipe][0] + m.wgmma_latency
            case "fma" | "heavy":
                pipes = free["fma"]
                n = 0 if pipe == "heavy" else min(range(len(pipes)), key=lambda i: (pipes[i], -i))
                pipes[n] = time + 2
                self._busy["fma"] += 2 / len(pipes) / SCHEDULERS
                return time + 5
            case "alu" | "uniform":
                free[pipe][0] = time + 2
                self._busy[pipe] += 2 / SCHEDULERS
                return time + (6 if pipe == "alu" else 24)
            case "mufu":
                start = max(free[pipe][0], time)
                free[pipe][0] = start + m.mufu
                self._busy[pipe] += m.mufu / SCHEDULERS
                return start + m.mufu_latency
            case "lsu" | "copy":
                start = max(self._lsu, time + 4)
                self._lsu = start + op.words
                self._busy["lsu"] += op.words
                self._queue[s] = [*self._queue[s][1 - _QUEUE :], start]
                if op.name == "LDG" and self._reads_tables:
                    return start + op.words + m.copy_latency
                if pipe == "lsu":
                    return start + op.words + m.shared_latency
                moved = 128 * op.words / m.l2_bytes
                self._l2 = max(self._l2, start) + moved
                self._busy["l2"] += moved
                return self._l2 + m.copy_latency
            case _:
                return time

    def _arrive(self, warp: _Warp, op: _Op, time: float) -> bool:
        """At a barrier of the block, or of as many of its neighbouring warps as have a name."""
        expected = min(op.threads // 32 or self._warps_of_block, self._warps_of_block)
        here = self._arrived[warp.block, warp.index // expected]
        here.append((warp, time))
        if len(here) < expected:
            warp.parked = True
            return False
        release = time + self._machine.barrier
        for other, arrived in here:
            other.parked = False
            self._stalls["barrier"] += release - max(arrived, other.ready)
            other.ready = max(other.ready, release)
        here.clear()
        return True


def _changes(changers: Changers, machine: Multiprocessor) -> list[_Op]:
    """The instructions of a warp that changes rows."""
    ops = [_op(i, machine) for i in changers.body]
    begins = True
    for op in ops:
        op.takes_tile = op.frees_tile = op.takes_turn = op.passes_turn = False
        op.begins_change, op.ends_change = begins, op.name == "FENCE"
        begins = op.ends_change
    # What follows the last fence belongs to the next turn.
    last = max(n for n, op in enumerate(ops) if op.ends_change)
    for op in ops[last + 1 :]:
        op.begins_change = False
    return ops


_REGISTERS = frozenset(("fma", "heavy", "alu", "mufu", "lsu"))
"""Pipes whose instructions have operands in registers of lanes."""

_CAUSES = {"lsu": "shared memory", "mufu": "mufu result", "uniform": "constants"}


def _op(i: Instruction, machine: Multiprocessor) -> _Op:
    left = None
    if i.name == "DEPBAR" and (match := _LEFT.search(i.operands)):
        left = (int(match[1]), int(match[2], 16))
    elif i.name == "WARPGROUP" and (match := _PRODUCTS_LEFT.search(i.operands)):
        left = (_PRODUCTS, int(match[1], 16))
    columns, operands = wgmma_columns(i), 0.0
    clocks = machine.hmma
    if columns:
        # 16 columns of B, and 64 rows of A if it is a descriptor too, of 32 bytes each.
        operands = 32 * (columns + 64 * ("desc" in i.operands.split(",")[1])) / SHARED_BYTES
        clocks = max(columns * machine.wgmma, operands)
    meets, threads = i.name == "BAR" and i.opcode != "BAR.ARV", 0
    if i.name == "BAR" and (match := _THREADS.search(i.operands)):
        threads = int(match[1], 16)
    # Each warpgroup has another barrier for its turn, whose number is in a register.
    of_turn = i.name == "BAR" and i.operands.startswith("R")
    return _Op(
        pipe_of(i), i.waits, i.write, i.read, i.stall, wavefronts(i), i.name, left, columns, clocks,
        operands, "gsb0" in i.operands, meets, threads, of_turn and meets, of_turn and not meets,
        i.opcode == "WARPGROUP.ARRIVE", i.opcode.startswith("SYNCS.ARRIVE"),
    )  # fmt: skip
