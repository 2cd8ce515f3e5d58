"""The loops of a kernel that multiply matrices, or that change tiles for those that do, and the
instructions that one turn issues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ...errors import InputError


class Operation(Protocol):
    """What the control flow of an instruction depends on.

    name: the opcode without modifiers. target: the index of the instruction that it jumps to.
    always: of a jump, whether every warp takes it.
    """

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> int | None: ...
    @property
    def always(self) -> bool: ...


Op = TypeVar("Op", bound=Operation)

JUMPS = ("BRA", "EXIT", "RET", "BRX", "BPT")
"""Instructions that end a basic block; BPT is a trap."""

PRODUCTS = ("HMMA", "HGMMA")
"""Matrix instructions: of a warp, and of a warpgroup (wgmma)."""

_PRODUCTS_AND_WAITS = (*PRODUCTS, "WARPGROUP")
"""Products of a warpgroup are in flight until WARPGROUP.DEPBAR."""

_SPILLS = ("LDL", "STL")

_ROWS = 8
"""Turns of a loop over the rows of a tile that a changer makes: of a quarter of 128 keys, eight at
once; or of those that are left."""


@dataclass(frozen=True, slots=True)
class Loop(Generic[Op]):
    """A loop with matrix instructions.

    common: the instructions of one turn that multiplies and copies as much as any, on the shortest
    way: no tile is masked, no maximum rises. longest: the same on the longest way.
    spills_among_products: loads and stores of local memory that a turn can reach after a matrix
    instruction and before another one, or before the wait for it, on any way.
    """

    common: tuple[Op, ...]
    longest: tuple[Op, ...]
    spills_among_products: int

    @property
    def products(self) -> int:
        """Matrix instructions of one turn."""
        return count(self.common, *PRODUCTS)

    @property
    def spills(self) -> int:
        """Loads and stores of local memory in one turn."""
        return count(self.longest, *_SPILLS)


def count(code: Iterable[Operation], *names: str) -> int:
    """How many instructions have one of the names."""
    return sum(i.name in names for i in code)


def loops(
    code: Sequence[Op],
    turn: Callable[[Flow[Op], int, frozenset[int], int], tuple[Op, ...]] | None = None,
) -> list[Loop[Op]]:
    """The innermost loops of a kernel that have matrix instructions, in order of address.

    turn: in place of `Flow.way`, as a function.
    """
    graph = Flow(code)
    found = []
    for header, body in graph.loops():
        inner = any(h != header and h in body and graph.multiplies(b) for h, b in graph.loops())
        if not inner and graph.multiplies(body):
            way = Flow.way if turn is None else turn
            shortest, longest = (way(graph, header, body, sign) for sign in (-1, 1))
            spills = graph.spills_among_products(header, body)
            found.append(Loop(shortest, longest, spills))
    return found


def spills_of_changes(code: Sequence[Operation]) -> int:
    """Loads and stores of local memory in a turn of the loop over the tiles that changers change
    (`wgmma/changer.h`), on all ways together, and of loops in it `_ROWS` times. 0 without changers.
    """
    graph = Flow(code)
    header, body = graph.changes() or (0, frozenset[int]())
    inner = [blocks for start, blocks in graph.loops() if start != header and start in body]
    return sum(
        count(graph.part(start), *_SPILLS) * (_ROWS if any(start in b for b in inner) else 1)
        for start in body
    )


def once(code: Sequence[Op], repeats: bool = False) -> tuple[Op, ...]:
    """A way from a kernel's entry to its end that makes one turn at most of each loop: the most
    matrix instructions, then the most copies, then the fewest instructions.

    repeats: the block has a loop over its work, and the way is one turn of that: of the largest
    loop with matrix instructions.
    """
    graph = Flow(code)
    found = [x for x in graph.loops() if graph.multiplies(x[1])] if repeats else []
    header, body = max(found, key=lambda x: len(x[1]), default=(0, None))
    return graph.way(header, body, -1)


@dataclass(frozen=True, slots=True)
class _Block:
    """A basic block: instructions from `start` to before `end`, and the starts of what follows."""

    end: int
    successors: tuple[int, ...]


_Score = tuple[int, int, int]


class Flow(Generic[Op]):
    """The control flow of a kernel. Blocks are named by the index of their first instruction.

    A depth-first search from the entry puts the blocks in an order; what goes back in it closes a
    loop. Without those edges there is no cycle, whatever a compiler has made of the code.
    """

    def __init__(self, code: Sequence[Op]) -> None:
        self._code = code
        self._blocks = _blocks(code)
        self._before: dict[int, list[int]] = {}
        ended, stack = [], [(0, iter(self._blocks[0].successors))]
        seen = {0}
        while stack:
            start, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                ended.append(start)
                stack.pop()
                continue
            self._before.setdefault(following, []).append(start)
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(self._blocks[following].successors)))
        self._place = {start: n for n, start in enumerate(reversed(ended))}

    def _ahead(self, start: int) -> list[int]:
        """The blocks that follow, without those that close a loop."""
        return [s for s in self._blocks[start].successors if self._place[s] > self._place[start]]

    def loops(self) -> list[tuple[int, frozenset[int]]]:
        """Each loop's header and its blocks: those on a way from the header back to it."""
        ends: dict[int, list[int]] = {}
        for start in self._place:
            for successor in self._blocks[start].successors:
                if self._place[successor] <= self._place[start]:
                    ends.setdefault(successor, []).append(start)
        return [(header, self._between(header, ends[header])) for header in sorted(ends)]

    def _between(self, header: int, tails: list[int]) -> frozenset[int]:
        after, stack = {header}, [header]
        while stack:
            for start in self._blocks[stack.pop()].successors:
                if start not in after:
                    after.add(start)
                    stack.append(start)
        body, stack = {header}, list(tails)
        while stack:
            start = stack.pop()
            if start not in body and start in after:
                body.add(start)
                stack += self._before.get(start, [])
        return frozenset(body)

    def changes(self) -> tuple[int, frozenset[int]] | None:
        """The loop over the tiles that changers change, as `loops` has it: what fences its writes
        for wgmma and neither multiplies nor copies tiles. None without changers."""
        found = (
            loop
            for loop in self.loops()
            if self._has(("FENCE",), loop[1]) and not self._has((*PRODUCTS, "UTMALDG"), loop[1])
        )
        return min(found, key=lambda loop: len(loop[1]), default=None)

    def multiplies(self, body: Iterable[int]) -> bool:
        """Whether one of the blocks has a matrix instruction."""
        return self._has(PRODUCTS, body)

    def _has(self, names: Sequence[str], body: Iterable[int]) -> bool:
        return any(count(self._code[s : self._blocks[s].end], *names) for s in body)

    def way(self, header: int, body: frozenset[int] | None, sign: int) -> tuple[Op, ...]:
        """One turn of a loop; without a body, a way to the kernel's end.

        The most matrix instructions, then the most copies; then, by the sign, the fewest or the
        most instructions.
        """
        return tuple(i for s in self.blocks_of_way(header, body, sign) for i in self.part(s))

    def part(self, start: int) -> tuple[Op, ...]:
        """The instructions of a block."""
        return tuple(self._code[start : self._blocks[start].end])

    def blocks_of_way(
        self,
        header: int,
        body: frozenset[int] | None,
        sign: int,
        copies: Mapping[int, int] | None = None,
    ) -> tuple[int, ...]:
        """The blocks of `way`. copies: of each block, if not its copies count."""
        best: dict[int, tuple[_Score, tuple[int, ...]]] = {}
        for start in reversed(self._place):
            if body is not None and start not in body:
                continue
            ways = [best[s] for s in self._ahead(start) if s in best]
            if header in self._blocks[start].successors if body else self._ends(start):
                ways.append(((0, 0, 0), ()))
            if ways:
                part = self._code[start : self._blocks[start].end]
                score, path = max(ways)
                products = score[0] + count(part, *PRODUCTS)
                copied = score[1] + (copies[start] if copies else count(part, "LDGSTS"))
                best[start] = ((products, copied, score[2] + sign * len(part)), (start, *path))
        if header not in best:
            raise InputError("the machine code of a kernel has no way to its end")
        return best[header][1]

    def spills_among_products(self, header: int, body: frozenset[int]) -> int:
        """See `Loop`: of one turn, which begins at the header."""
        inside = {s: [b for b in self._blocks[s].successors if b in body - {header}] for s in body}
        back: dict[int, list[int]] = {s: [] for s in body}
        for start, ahead in inside.items():
            for successor in ahead:
                back[successor].append(start)
        after = self._reached_from_products(inside)
        before = self._reached_from_products(back)
        found = 0
        for start in body:
            part = self._code[start : self._blocks[start].end]
            at = [n for n, i in enumerate(part) if i.name in _PRODUCTS_AND_WAITS]
            first = 0 if start in after else at[0] if at else len(part)
            last = len(part) if start in before else at[-1] if at else 0
            found += count(part[first:last], *_SPILLS)
        return found

    def _reached_from_products(self, edges: dict[int, list[int]]) -> set[int]:
        """The blocks that a way from the end of a block with a product or a wait reaches."""
        reached: set[int] = set()
        marked = (ahead for s, ahead in edges.items() if self._has(_PRODUCTS_AND_WAITS, (s,)))
        stack = [s for ahead in marked for s in ahead]
        while stack:
            start = stack.pop()
            if start not in reached:
                reached.add(start)
                stack += edges[start]
        return reached

    def _ends(self, start: int) -> bool:
        return self._code[self._blocks[start].end - 1].name == "EXIT"


def _blocks(code: Sequence[Operation]) -> dict[int, _Block]:
    starts = {0}
    for n, i in enumerate(code):
        if i.name in JUMPS:
            starts.add(n + 1)
        if i.target is not None:
            starts.add(i.target)
    ordered = sorted(s for s in starts if s < len(code))
    blocks = {}
    for start, end in zip(ordered, [*ordered[1:], len(code)], strict=True):
        last = code[end - 1]
        after = [last.target] if last.name == "BRA" and last.target is not None else []
        ends = last.name in JUMPS and last.always
        if not ends and end < len(code):
            after.append(end)
        blocks[start] = _Block(end, tuple(after))
    return blocks
