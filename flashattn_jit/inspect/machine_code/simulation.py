"""A simulation of a multiprocessor whose warps repeat a loop body.

A warp issues in order: not before the stall count of its previous instruction has passed, the
scoreboards that it waits for are down, and the pipe is free. Copies and loads take turns at the
load and store unit in the order of their issue, and copies then at the L2. What it leaves out: the
instruction cache, register banks, bank conflicts, misses of the L2, and power.

Products of warpgroups (wgmma) run one after another on a scheduler's tensor core, and one waits
there for it. Their tiles are taken as loaded: the producer's copies are not simulated. Where warps
take turns by named barriers, the two warps of a scheduler do.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .disassembly import Instruction
from .multiprocessor import SCHEDULERS, Multiprocessor, pipe_of, wavefronts, wgmma_columns

_WARM_UP, _MEASURED = 4, 12
_QUEUE = 8  # instructions of a scheduler that wait for the load and store unit
_LEFT = re.compile(r"SB(\d), 0x([0-9a-f]+)")
_PRODUCTS_LEFT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_PRODUCTS = 6  # where a warp keeps the groups of its wgmma, beside six scoreboards


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop costs when every resident block makes one.

    cycles: clocks of the multiprocessor. pipes: the share of the clocks that each pipe is busy.
    stalls: by cause, the share of a warp's clocks that it waits.
    """

    cycles: float
    pipes: dict[str, float]
    stalls: dict[str, float]

    @property
    def binding(self) -> str:
        """The busiest pipe."""
        return max(self.pipes, key=lambda p: self.pipes[p])


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
    ends_group: bool  # of a wgmma: the last one of its group
    takes_turn: bool
    passes_turn: bool


@dataclass(slots=True)
class _Warp:
    """A warp: its next instruction and when it may issue. Of each scoreboard: when it is down, what
    it waits for, when its groups of copies arrive. copied: when the copies so far arrive."""

    block: int
    at: int = 0
    ready: float = 0.0
    down: list[float] = field(default_factory=lambda: [0.0] * 6)
    cause: list[str] = field(default_factory=lambda: [""] * 6)
    groups: list[list[float]] = field(default_factory=lambda: [[] for _ in range(7)])
    copied: float = 0.0
    turns_given: list[float] = field(default_factory=list)
    parked: bool = False
    turns: int = 0


def simulate(body: Sequence[Instruction], machine: Multiprocessor, blocks: int, warps: int) -> Turn:
    """Repeat `body` on every warp of `blocks` thread blocks of `warps` warps.

    The blocks start apart by equal parts of a turn. Each scheduler issues the instruction that can
    go first; of several, that of the warp with the fewest turns, then of the one that issued last.
    """
    return _Simulation(body, machine, blocks, warps).run()


class _Simulation:
    def __init__(
        self, body: Sequence[Instruction], machine: Multiprocessor, blocks: int, warps: int
    ) -> None:
        self._body = [_op(i, machine) for i in body]
        if not any(o.passes_turn for o in self._body):
            for o in self._body:
                o.takes_turn = False
        self._machine = machine
        self._warps_of_block = warps
        apart = max(1.0, sum(o.stall for o in self._body) / blocks)
        self._warps = [_Warp(b, ready=b * apart) for b in range(blocks) for _ in range(warps)]
        self._of = [self._warps[s::SCHEDULERS] for s in range(SCHEDULERS)]
        for first, *_ in filter(None, self._of):
            first.turns_given.append(0.0)
        pipes = {"tensor": 1, "fma": machine.fma_pipes, "alu": 1, "mufu": 1, "uniform": 1}
        self._free = [{p: [0.0] * n for p, n in pipes.items()} for _ in range(SCHEDULERS)]
        self._issued = [-1.0] * SCHEDULERS
        self._last: list[_Warp | None] = [None] * SCHEDULERS
        self._queue: list[list[float]] = [[] for _ in range(SCHEDULERS)]
        self._lsu = 0.0
        self._l2 = 0.0
        self._arrived: dict[int, list[tuple[_Warp, float]]] = {}
        self._busy: dict[str, float] = defaultdict(float)
        self._stalls: dict[str, float] = defaultdict(float)

    def run(self) -> Turn:
        begin = self._run_until(_WARM_UP, 0.0)
        self._busy.clear()
        self._stalls.clear()
        clocks = self._run_until(_WARM_UP + _MEASURED, begin) - begin
        shares = {p: n / clocks for p, n in self._busy.items()}
        waiting = {c: n / clocks / len(self._warps) for c, n in self._stalls.items()}
        return Turn(clocks / _MEASURED, shares, waiting)

    def _run_until(self, turns: int, time: float) -> float:
        """Go on until every warp has made that many turns; the clock at which the last one did."""
        left = sum(w.turns < turns for w in self._warps)
        # Each scheduler by the clock of its next issue; it may have moved on by its turn.
        heap = [(time, s) for s in range(SCHEDULERS) if self._of[s]]
        idle: list[int] = []
        while left:
            now, s = heapq.heappop(heap)
            choice = self._choose(s)
            if choice is None:  # all its warps wait at a barrier
                idle.append(s)
                continue
            time, warp, cause = choice
            if heap and time > max(now, heap[0][0]):
                heapq.heappush(heap, (time, s))
                continue
            released = self._issue(s, warp, time, cause)
            if warp.at == len(self._body):
                warp.at = 0
                warp.turns += 1
                left -= warp.turns == turns
            heapq.heappush(heap, (time, s))
            if released:
                for other in idle:
                    heapq.heappush(heap, (time, other))
                idle.clear()
        return time

    def _choose(self, s: int) -> tuple[float, _Warp, str] | None:
        """When the scheduler issues next, of which warp, and what that warp waited for."""
        best: tuple[float, int, bool, _Warp, str] | None = None
        floor = self._issued[s] + 1
        for warp in self._of[s]:
            op = self._body[warp.at]
            if warp.parked or op.takes_turn and not warp.turns_given:
                continue
            time, cause = warp.ready, "fixed latency"
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
                return free["tensor"][0] - op.clocks
            case pipe:
                return min(free[pipe])

    def _issue(self, s: int, warp: _Warp, time: float, cause: str) -> bool:
        """Issue the warp's instruction. True if it let other warps go on."""
        op, m = self._body[warp.at], self._machine
        if time > warp.ready:
            self._stalls[cause] += time - warp.ready
        self._stalls["fixed latency"] += max(0, op.stall - 1)
        self._stalls["issue"] += 1
        self._issued[s], self._last[s] = time, warp
        self._busy["issue"] += 1 / SCHEDULERS
        warp.ready = time + max(1, op.stall)
        warp.at += 1
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
            case "BAR" if op.takes_turn:
                warp.turns_given.pop(0)
            case "BAR" if op.passes_turn:
                for other in self._of[s]:
                    if other is not warp and other.block == warp.block:
                        other.turns_given.append(time + m.barrier)
                return True
            case "BAR":
                return self._arrive(warp, time)
        return False

    def _execute(self, s: int, op: _Op, time: float) -> float:
        """Occupy the pipes; the clock at which the result is written."""
        m, free, pipe = self._machine, self._free[s], op.pipe
        match pipe:
            case "tensor":
                free[pipe][0] = max(free[pipe][0], time) + op.clocks
                self._busy[pipe] += op.clocks / SCHEDULERS
                return free[pipe][0] + m.wgmma_latency if op.columns else time + 4 * m.hmma
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
                if pipe == "lsu":
                    return start + op.words + m.shared_latency
                moved = 128 * op.words / m.l2_bytes
                self._l2 = max(self._l2, start) + moved
                self._busy["l2"] += moved
                return self._l2 + m.copy_latency
            case _:
                return time

    def _arrive(self, warp: _Warp, time: float) -> bool:
        here = self._arrived.setdefault(warp.block, [])
        here.append((warp, time))
        if len(here) < self._warps_of_block:
            warp.parked = True
            return False
        release = time + self._machine.barrier
        for other, arrived in here:
            other.parked = False
            self._stalls["barrier"] += release - max(arrived, other.ready)
            other.ready = max(other.ready, release)
        here.clear()
        return True


_CAUSES = {"lsu": "shared memory", "mufu": "mufu result", "uniform": "constants"}


def _op(i: Instruction, machine: Multiprocessor) -> _Op:
    left = None
    if i.name == "DEPBAR" and (match := _LEFT.search(i.operands)):
        left = (int(match[1]), int(match[2], 16))
    elif i.name == "WARPGROUP" and (match := _PRODUCTS_LEFT.search(i.operands)):
        left = (_PRODUCTS, int(match[1], 16))
    columns = wgmma_columns(i)
    clocks = machine.hmma
    if columns:
        from_shared = "desc" in i.operands.split(",")[1]
        # Shared memory gives 128 bytes a clock: 16 columns of B, and of A in shared memory.
        clocks = max(columns * machine.wgmma, (columns + 64 * from_shared) / 4)
    return _Op(
        pipe_of(i), i.waits, i.write, i.read, i.stall, wavefronts(i), i.name, left, columns, clocks,
        "gsb0" in i.operands, i.opcode.startswith("BAR.SYNC"), i.opcode == "BAR.ARV",
    )  # fmt: skip
