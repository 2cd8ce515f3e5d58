"""The interval form as code: calls of functions of ``fajit/interval/*.h`` on registers.

`code_of` turns a `Program` into statements, which `cpp` prints as C++ for kernels and
``_C.IntervalForm`` (csrc/interval) interprets for `tile_runs`. Both give the same results.

The bounds of a clause narrow the indices, so that the rest of the clause is evaluated on the part
of the box that can still satisfy it. Values that depend on a narrowed index are computed again
where they are needed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.ir import Graph
from .simplify import (
    Bound,
    Clause,
    Program,
    range_tables,
    reachable_nodes,
    reads_bits,
    scanned_dim,
    simplify,
)
from .terms import I64_MAX, I64_MIN, INT_RANGE, MOST_UNSATURATED
from .translate import OWN, kind, select

INDICES = ("b", "h", "q_idx", "kv_idx")
"""The indices that registers 0 to 3 hold."""


@dataclass(frozen=True, slots=True)
class Statement:
    """``result = name(*operands, *numbers)``; operands and the result are registers.

    name: a function of the headers. A function that returns a bool has no result: where it is
    false, the clause does not hold. These functions read a tensor, whose slot is the first number:

    * ``i_gather``, ``t_gather``, ``f_gather`` (slot, table, dim): the hull of the elements at the
      operands, one index range per dim. table: the slot of the tensor's lo and hi tables along
      `dim`, or -1. ``i_gather`` also takes the range of the dtype.
    * ``gather_bits`` (slot, dim): the bits that some of the elements have, and those that all have.
    * ``i_searchsorted`` (slot, right): ranks in a sorted tensor.

    Two statements are no calls of functions:

    * ``meet`` (n, low, high): the first operand, cut from below to low and the low ends of the next
      n operands, from above to high and the high ends of the others. The clause does not hold where
      the result is empty.
    * ``any``: the clause does not hold where none of `clauses` does.
    """

    name: str
    result: int | None = None
    operands: tuple[int, ...] = ()
    numbers: tuple[int | float, ...] = ()
    clauses: tuple[CodeClause, ...] = ()


@dataclass(frozen=True, slots=True)
class CodeClause:
    """The statements of a clause. `source` is None for the one that always holds."""

    statements: tuple[Statement, ...] = ()
    source: Clause | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """How a box is classified.

    once: statements that depend on params alone. guards: where one is false, the box is partial. A
    box is empty where no clause of `keep` holds, and full where none of `drop` does. periods:
    (index, offset, divisor) of each `simplify.Period`, all registers.
    """

    once: tuple[Statement, ...]
    guards: tuple[Statement, ...]
    keep: tuple[CodeClause, ...]
    drop: tuple[CodeClause, ...]
    periods: tuple[tuple[int, int, int], ...]


def code_of(graph: Graph, tensors: Sequence[tuple[str, int]]) -> Code:
    """The code of the mask `graph`.

    tensors: dtype and rank of the variant's params, which the tables of `range_tables` follow in
    ``fajit_args.tensors``.
    """
    tables = {
        (spec.slot, spec.dim): len(tensors) + 2 * i for i, spec in enumerate(range_tables(graph))
    }
    return _Writer(simplify(graph), tensors, tables).code()


class _Scope:
    """A list of statements under construction.

    registers: of the nodes whose values are known in it. count: the number of registers in use;
    later clauses reuse the registers of earlier ones.
    """

    def __init__(self, registers: Mapping[int, int], count: int) -> None:
        self.registers, self.count = dict(registers), count
        self.statements: list[Statement] = []


class _Writer:
    def __init__(
        self,
        program: Program,
        tensors: Sequence[tuple[str, int]],
        tables: Mapping[tuple[int, int], int],
    ) -> None:
        self.program, self.tensors, self.tables = program, tensors, tables

    def code(self) -> Code:
        """The code of the program, without statements whose result nothing reads."""
        program = self.program
        once = _Scope({}, len(INDICES))
        for i, n in enumerate(program.nodes):
            if n.op == "input":
                once.registers[i] = INDICES.index(str(n.attr("name")))
        for i in reachable_nodes(program):
            if not program.inputs[i] and program.nodes[i].op != "const":
                self.value(once, i)
        periods = tuple(
            (once.registers[p.index], self.value(once, p.offset), self.value(once, p.divisor))
            for p in program.periods
        )
        box = _Scope(once.registers, once.count)
        for node, low, high in program.guards:
            self._check(box, "fits", self.value(box, node), numbers=(low, high))
        if program.keep and program.drop:
            keep = self._clauses(box, program.keep)
            drop = self._clauses(box, program.drop)
        else:
            keep, drop = (CodeClause(),) if program.keep else (), ()
        used = {register for period in periods for register in period}
        drop = _pruned_clauses(drop, used)
        keep = _pruned_clauses(keep, used)
        guards = _pruned(box.statements, used)
        return Code(_pruned(once.statements, used), guards, keep, drop, periods)

    # --- clauses ---------------------------------------------------------------------------------

    def _clauses(self, scope: _Scope, clauses: Iterable[Clause]) -> tuple[CodeClause, ...]:
        made = []
        for clause in clauses:
            inner = _Scope(scope.registers, scope.count)
            self._clause(inner, clause)
            made.append(CodeClause(tuple(inner.statements), clause))
        return tuple(made)

    def _clause(self, scope: _Scope, clause: Clause) -> None:
        for bound in clause.bounds:
            if bound.lows or bound.highs:
                self._bound(scope, bound)
        for bound in clause.bounds:
            for exclude in bound.excludes:
                self._check(
                    scope, "differ", self.value(scope, bound.value), self.value(scope, exclude)
                )
        for test in clause.tests:
            self._check(scope, "may" if test.want else "may_fail", self.value(scope, test.term))
        for group in clause.nested:
            clauses = self._clauses(scope, group)
            scope.statements.append(Statement("any", clauses=clauses))

    def _bound(self, scope: _Scope, bound: Bound) -> None:
        lows, low = self._limits(scope, bound.lows, max, I64_MIN)
        highs, high = self._limits(scope, bound.highs, min, I64_MAX)
        value = self._meet(scope, self.value(scope, bound.value), lows, highs, low, high)
        old = {term: self.value(scope, term) for term, _ in bound.narrows}
        narrowed: dict[int, int] = {}
        for i, (term, c) in enumerate(bound.narrows):
            if len(bound.narrows) == 1:
                narrowed[term] = value
                continue
            other, d = bound.narrows[1 - i]
            rest = self._call(scope, "i_sub", value, self._scaled(scope, old[other], d))
            limit = (old[term],)
            narrowed[term] = self._meet(scope, self._scaled(scope, rest, c), limit, limit)
        for node in list(scope.registers):
            if not self.program.parts[node].isdisjoint(narrowed):
                del scope.registers[node]
        scope.registers.update(narrowed)
        if bound.narrows or bound.excludes:
            scope.registers[bound.value] = value

    def _limits(
        self, scope: _Scope, nodes: Sequence[int], join: Callable[[int, int], int], best: int
    ) -> tuple[tuple[int, ...], int]:
        """The registers of limits that are not constant, and `join` of `best` and the constants."""
        registers = []
        for n in nodes:
            node = self.program.nodes[n]
            if node.op == "const":
                best = join(best, node.int_attr("value"))
            else:
                registers.append(self.value(scope, n))
        return tuple(registers), best

    # --- values ----------------------------------------------------------------------------------

    def value(self, scope: _Scope, node: int) -> int:
        """The register of the node's value, computed in `scope` unless it is known there."""
        if node not in scope.registers:
            op = self.program.nodes[node].op
            made = self._own(scope, node, op) if op in OWN else self._step(scope, node)
            scope.registers[node] = made
        return scope.registers[node]

    def _call(
        self, scope: _Scope, name: str, *operands: int, numbers: tuple[int | float, ...] = ()
    ) -> int:
        scope.statements.append(Statement(name, scope.count, operands, numbers))
        scope.count += 1
        return scope.count - 1

    def _check(
        self, scope: _Scope, name: str, *operands: int, numbers: tuple[int, ...] = ()
    ) -> None:
        scope.statements.append(Statement(name, None, operands, numbers))

    def _meet(
        self,
        scope: _Scope,
        source: int,
        lows: tuple[int, ...],
        highs: tuple[int, ...],
        low: int = I64_MIN,
        high: int = I64_MAX,
    ) -> int:
        return self._call(scope, "meet", source, *lows, *highs, numbers=(len(lows), low, high))

    def _scaled(self, scope: _Scope, register: int, factor: int) -> int:
        if factor == 1:
            return register
        if factor == -1:
            return self._call(scope, "i_neg", register)
        return self._call(scope, "i_scale", register, numbers=(factor,))

    def _step(self, scope: _Scope, node: int) -> int:
        step = select(self.program.nodes, node)
        operands = [self.value(scope, a) for a in step.args]
        if step.name.endswith("_hull"):
            made = operands[0]
            for other in operands[1:]:
                made = self._call(scope, step.name, made, other)
        else:
            made = self._call(scope, step.name, *operands, numbers=step.extra)
        if step.wrap:
            made = self._call(scope, "i_wrap", made, numbers=step.wrap)
        return self._call(scope, "t_not", made) if step.negate else made

    def _own(self, scope: _Scope, node: int, op: str) -> int:
        if op == "linear":
            return self._linear(scope, node)
        if op == "gather":
            return self._gather(scope, node)
        return self._bit(scope, node) if op == "bit" else self._searchsorted(scope, node)

    def _linear(self, scope: _Scope, node: int) -> int:
        n = self.program.nodes[node]
        coefs = n.attr("coefs")
        assert isinstance(coefs, tuple)
        parts = dict(zip(n.args, coefs, strict=True))
        q, k = self.program.q, self.program.k
        if node != self.program.distance and q in parts and parts[q] == -parts.get(k, 0):
            parts[self.program.distance] = parts.pop(q)
            del parts[k]
        values = [(self.value(scope, t), c) for t, c in parts.items()]
        const = n.int_attr("const")
        size = sum(abs(c * x) for t, c in parts.items() for x in self.program.ranges[t])
        if size + abs(const) > MOST_UNSATURATED:
            scaled = [self._scaled(scope, x, c) for x, c in values]
            if const:
                scaled.insert(0, self._call(scope, "i_point", numbers=(const,)))
            made = scaled[0]
            for other in scaled[1:]:
                made = self._call(scope, "i_add", made, other)
            return made
        if const == 0 and values[0][1] == 1:
            made = values.pop(0)[0]
        else:
            made = self._call(scope, "i_point", numbers=(const,))
        for other, c in values:
            made = self._call(scope, "i_add_scaled", made, other, numbers=(c,))
        return made

    def _box(self, scope: _Scope, node: int) -> list[int]:
        """The registers of a gather's indices, one a dim of the tensor."""
        n = self.program.nodes[node]
        slot = n.int_attr("slot")
        at = [self.value(scope, a) for a in n.args]
        for dim in range(len(at), self.tensors[slot][1]):  # the whole last dim, for a gathered row
            at.append(self._call(scope, "i_places", numbers=(slot, dim)))
        return at

    def _gather(self, scope: _Scope, node: int) -> int:
        n = self.program.nodes[node]
        slot = n.int_attr("slot")
        dtype, rank = self.tensors[slot]
        if dtype.startswith("float8"):  # hooks read it as float32
            return self._call(scope, f"{kind(n.dtype)}_top")
        dim = scanned_dim(self.program, node, rank)
        numbers: tuple[int, ...] = (slot, self.tables.get((slot, dim), -1), dim)
        if kind(n.dtype) == "i":
            numbers += INT_RANGE[n.dtype]
        at = self._box(scope, node)
        return self._call(scope, f"{kind(n.dtype)}_gather", *at, numbers=numbers)

    def _bit(self, scope: _Scope, node: int) -> int:
        n = self.program.nodes[node]
        source, at = n.args[0], self.value(scope, n.args[1])
        if reads_bits(self.program, node):
            slot = self.program.nodes[source].int_attr("slot")
            dim = scanned_dim(self.program, source, self.tensors[slot][1])
            bits = self._call(scope, "gather_bits", *self._box(scope, source), numbers=(slot, dim))
        else:
            bits = self._call(scope, "bits_of", self.value(scope, source))
        # Elements are sign-extended: any position below 64 is right for narrower dtypes as well.
        return self._call(scope, "i_bit", bits, at, numbers=(64,))

    def _searchsorted(self, scope: _Scope, node: int) -> int:
        n = self.program.nodes[node]
        slot = n.int_attr("slot")
        value = n.args[0]
        if kind(self.program.nodes[value].dtype) != "i" or kind(self.tensors[slot][0]) != "i":
            return self._call(scope, "i_ranks", numbers=(slot,))
        right = int(bool(n.attr("right")))
        return self._call(scope, "i_searchsorted", self.value(scope, value), numbers=(slot, right))


def _pruned(statements: Sequence[Statement], used: set[int]) -> tuple[Statement, ...]:
    """The statements without those whose result nothing reads.

    used: the registers that later statements read; those that these statements read are added.
    """
    kept = []
    for statement in reversed(statements):
        decides = statement.result is None or statement.name == "meet"
        if decides or statement.result in used:
            clauses = _pruned_clauses(statement.clauses, used)
            used.discard(statement.result)
            used.update(statement.operands)
            kept.append(replace(statement, clauses=clauses) if clauses else statement)
    return tuple(reversed(kept))


def _pruned_clauses(clauses: Sequence[CodeClause], used: set[int]) -> tuple[CodeClause, ...]:
    return tuple(replace(c, statements=_pruned(c.statements, used)) for c in clauses)
