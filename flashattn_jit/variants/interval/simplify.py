"""Turns a mask graph into two short lists of clauses, ``keep`` and ``drop``, that classify a tile.

``keep`` is the mask in disjunctive normal form, ``drop`` its negation. A clause is a conjunction
that is evaluated (`statements`) in this order:

1. *bounds*: ``value in [max(lows), min(highs)]``, value not in excludes. Those on single indices
   and on ``q_idx - kv_idx`` come first and narrow the box, so that the rest is evaluated on the
   part of the tile that can still satisfy the clause. One pass over these three is enough (they
   form a zone of two variables), which is why and-ed causal, window and length limits are exact.
2. *tests*: boolean nodes with a wanted value.
3. *nested*: disjunctions that were too large to multiply out.

A tile is empty if no clause of ``keep`` may hold in it, full if none of ``drop`` may.

`range_tables` says which min/max tables of params the clauses read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..ir.ir import Graph, Node
from .terms import Choice, Compare, Form, Formula, Formulas, Join, Terms, Test
from .translate import OWN, Translator, kind, scalars_only, select

_MAX_CLAUSES = 24  # of a product of disjunctions
_MAX_NESTED = 96  # clauses inside them, where the product is not multiplied out
_MAX_TEXT = 512  # clauses of an answer, all levels together
_MAX_WORK = 2000  # clauses compared on the way there


@dataclass(frozen=True, slots=True)
class Bound:
    """``max(lows) <= value <= min(highs)`` and value equal to none of `excludes`; all are nodes.

    narrows: (term, coefficient 1 or -1) pairs of `value` whose intervals shrink with it.
    """

    value: int
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    excludes: tuple[int, ...]
    narrows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Clause:
    """A conjunction: bounds in evaluation order, tests, then nested disjunctions of clauses."""

    bounds: tuple[Bound, ...]
    tests: tuple[Test, ...]
    nested: tuple[tuple[Clause, ...], ...]


@dataclass(frozen=True, slots=True)
class Period:
    """The mask reads both ``(index + offset) // divisor`` and ``(index + offset) % divisor``.

    They are independent only on whole periods, such as the rows of an image. A partial box is
    therefore classified again in up to three parts along that index: the rest of its first period,
    whole periods, the start of its last one.
    """

    index: int
    offset: int
    divisor: int


@dataclass(frozen=True, slots=True)
class Program:
    """The interval form of a mask.

    nodes: topologically ordered; see `Terms` for the operations beyond the IR's. ranges: their
    static ranges. inputs, parts: the indices and the nodes that each node depends on. guards:
    (node, low, high) that must hold, else integers may wrap and the tile is partial. periods: see
    `Period`.
    """

    nodes: tuple[Node, ...]
    ranges: tuple[tuple[int, int], ...]
    inputs: tuple[frozenset[str], ...]
    parts: tuple[frozenset[int], ...]
    guards: tuple[tuple[int, int, int], ...]
    keep: tuple[Clause, ...]
    drop: tuple[Clause, ...]
    q: int
    k: int
    distance: int  # the node q_idx - kv_idx
    periods: tuple[Period, ...]

    def uses(self, name: str) -> bool:
        """Whether the classification depends on the index `name`."""
        return any(name in self.inputs[n] for n in self.roots())

    def roots(self) -> Iterator[int]:
        """The nodes that guards and clauses read directly."""
        yield from (n for n, _, _ in self.guards)
        yield from (n for side in (self.keep, self.drop) for c in side for n in clause_nodes(c))


def clause_nodes(clause: Clause) -> Iterator[int]:
    """The nodes that a clause reads directly."""
    for bound in clause.bounds:
        yield from (bound.value, *bound.lows, *bound.highs, *bound.excludes)
    yield from (t.term for t in clause.tests)
    for group in clause.nested:
        for inner in group:
            yield from clause_nodes(inner)


def count_clauses(clauses: Sequence[Clause]) -> int:
    """How many clauses there are, nested ones included."""
    return sum(1 + sum(count_clauses(group) for group in c.nested) for c in clauses)


@lru_cache(maxsize=512)
def simplify(graph: Graph) -> Program:
    """The interval form of the mask `graph` (inputs b, h, q_idx, kv_idx; result: keep or not)."""
    translator = Translator(scalars_only(graph))
    mask = translator.mask()
    terms, formulas = translator.terms, translator.formulas
    q, k = terms.input("q_idx"), terms.input("kv_idx")
    distance = terms.of_form(Form(((q, 1),)).plus(Form(((k, 1),)), -1))
    lowering = _Clauses(terms, formulas, q, k, distance)
    try:
        keep, drop = lowering.clauses(mask), lowering.clauses(formulas.negate(mask))
    except _TooLarge:
        mask = translator.whole_mask()
        keep, drop = lowering.clauses(mask), lowering.clauses(formulas.negate(mask))
    guards = tuple((terms.of_form(form), *limits) for form, limits in translator.guards.items())
    roots = [n for side in (keep, drop) for c in side for n in clause_nodes(c)]
    periods = tuple(p for index in (q, k) for p in _period(terms, index, roots))
    return Program(
        tuple(terms.nodes), tuple(terms.ranges), tuple(terms.inputs), tuple(terms.parts), guards,
        keep, drop, q, k, distance, periods,
    )  # fmt: skip


def _period(terms: Terms, index: int, roots: Sequence[int]) -> Iterator[Period]:
    """The longest period along one index, if there is one."""
    used = frozenset(roots).union(*(terms.parts[n] for n in roots))
    pairs: dict[tuple[int, ...], set[str]] = {}
    for n in used:
        node = terms.nodes[n]
        if node.op in ("floordiv", "remainder"):
            pairs.setdefault(node.args, set()).add(node.op)
    found = []
    for (value, divisor), operations in pairs.items():
        offset = terms.to_form(value).plus(Form(((index, 1),)), -1)
        if len(operations) == 2 and not terms.level(offset) and not terms.term_level(divisor):
            found.append((terms.ranges[divisor][0], offset.const, offset, divisor))
    if found:
        _, _, offset, divisor = max(found, key=lambda f: (f[0], -f[1], -f[3]))
        yield Period(index, terms.of_form(offset), divisor)


_Atom = Compare | Test


@dataclass(frozen=True, slots=True)
class _Conjunction:
    atoms: frozenset[_Atom]
    nested: frozenset[tuple[_Conjunction, ...]] = frozenset()


def _sort_key(clause: _Conjunction) -> tuple[object, ...]:
    nested = sorted(list(map(_sort_key, group)) for group in clause.nested)
    return sorted(map(repr, clause.atoms)), nested


class _Range:
    """Bounds on one value: the tightest constant for each form without its constant."""

    def __init__(self) -> None:
        self.lows: dict[Form, int] = {}
        self.highs: dict[Form, int] = {}
        self.excludes: set[Form] = set()

    def consistent(self) -> bool:
        """Tighten bounds that an exclusion touches; False if two bounds contradict."""
        for exclude in sorted(self.excludes):
            part = exclude.shifted(-exclude.const)
            while self.lows.get(part) == exclude.const or self.highs.get(part) == exclude.const:
                if self.lows.get(part) == self.highs.get(part):
                    return False
                if self.lows.get(part) == exclude.const:
                    self.lows[part] += 1
                else:
                    self.highs[part] -= 1
        self.excludes = {e for e in self.excludes if not self._outside(e)}
        return all(low <= self.highs.get(part, low) for part, low in self.lows.items())

    def _outside(self, exclude: Form) -> bool:
        part = exclude.shifted(-exclude.const)
        low, high = self.lows.get(part), self.highs.get(part)
        if low is not None and exclude.const < low:
            return True
        return high is not None and exclude.const > high


class _TooLarge(Exception):
    """A formula has too many clauses."""


class _Clauses:
    """Multiplies a formula out into clauses and orders each for evaluation."""

    def __init__(self, terms: Terms, formulas: Formulas, q: int, k: int, distance: int) -> None:
        self.terms, self.formulas = terms, formulas
        self.q, self.k, self.distance = q, k, distance
        self.work = 0

    def clauses(self, formula: Formula) -> tuple[Clause, ...]:
        """The clauses of `formula`, cheapest first."""
        self.work = 0
        made = tuple(sorted(map(self._finish, self._multiply(formula)), key=self._cost))
        if count_clauses(made) > _MAX_TEXT:
            raise _TooLarge
        return made

    # --- disjunctive normal form -----------------------------------------------------------------

    def _multiply(self, formula: Formula) -> list[_Conjunction]:
        if isinstance(formula, Choice):
            join, no = self.formulas.join, self.formulas.negate(formula.condition)
            yes = self._multiply(join("and", (formula.condition, formula.x)))
            return self._reduce(yes + self._multiply(join("and", (no, formula.y))))
        if not isinstance(formula, Join):
            return self._reduce([_Conjunction(frozenset([formula]))])
        if formula.kind == "or":
            return self._reduce([c for part in formula.parts for c in self._multiply(part)])
        atoms = frozenset(p for p in formula.parts if isinstance(p, Compare | Test))
        groups = [self._multiply(p) for p in formula.parts if isinstance(p, Join | Choice)]
        first = out = self._reduce([_Conjunction(atoms)])
        groups.sort(key=len)
        for i, group in enumerate(groups):
            if len(out) * len(group) > _MAX_CLAUSES:
                inner = sum(map(len, groups[i:]))
                if len(out) * inner > _MAX_NESTED:
                    i, out = 0, first
                rest = _Conjunction(frozenset(), frozenset(map(tuple, groups[i:])))
                return [_both(c, rest) for c in out]
            out = self._reduce([_both(a, b) for a in out for b in group])
        return out

    def _reduce(self, clauses: list[_Conjunction]) -> list[_Conjunction]:
        """Without clauses that contradict themselves or imply another one."""
        kept: list[_Conjunction] = []
        self.work += len(clauses)
        if self.work > _MAX_WORK:
            raise _TooLarge
        for clause in dict.fromkeys(clauses):
            if self._ranges(clause) is None:
                continue
            if any(_implies(clause, other) for other in kept):
                continue
            kept = [other for other in kept if not _implies(other, clause)]
            kept.append(clause)
        return kept

    def _ranges(self, clause: _Conjunction) -> dict[Form, _Range] | None:
        """The comparisons of a clause as ranges of values; None if they contradict."""
        ranges: dict[Form, _Range] = {}
        for atom in clause.atoms:
            if isinstance(atom, Test):
                if Test(atom.term, not atom.want) in clause.atoms:
                    return None
                continue
            value, sign, rest = self._isolate(atom.form)
            entry = ranges.setdefault(value, _Range())
            # sign * value + rest (>=, ==, !=) 0
            limit = rest.times(-sign)
            part = limit.shifted(-limit.const)
            if atom.kind == "ne":
                entry.excludes.add(limit)
                continue
            if atom.kind == "eq" or sign > 0:
                entry.lows[part] = max(limit.const, entry.lows.get(part, limit.const))
            if atom.kind == "eq" or sign < 0:
                entry.highs[part] = min(limit.const, entry.highs.get(part, limit.const))
        return ranges if all(r.consistent() for r in ranges.values()) else None

    def _isolate(self, form: Form) -> tuple[Form, int, Form]:
        """(value, sign, rest) with form = sign * value + rest; value has the highest level."""
        level = self.terms.level(form)
        chosen = tuple((t, c) for t, c in form.terms if self.terms.term_level(t) == level)
        rest = tuple((t, c) for t, c in form.terms if self.terms.term_level(t) != level)
        sign = 1 if chosen[0][1] > 0 else -1
        return Form(chosen).times(sign), sign, Form(rest, form.const)

    # --- evaluation order ------------------------------------------------------------------------

    def _finish(self, clause: _Conjunction) -> Clause:
        ranges = self._ranges(clause)
        assert ranges is not None
        # Nodes are numbered in this order, so it must not be that of a set.
        bounds = sorted((self._bound(v, ranges[v]) for v in sorted(ranges)), key=self._order)
        bounds = [self._only_useful(i, bounds, clause) for i in range(len(bounds))]
        nested = tuple(
            tuple(sorted((self._finish(c) for c in group), key=self._cost))
            for group in sorted(clause.nested, key=lambda group: list(map(_sort_key, group)))
        )
        tests = sorted((a for a in clause.atoms if isinstance(a, Test)), key=lambda t: t.term)
        return Clause(tuple(bounds), tuple(tests), tuple(sorted(nested, key=repr)))

    def _bound(self, value: Form, entry: _Range) -> Bound:
        def nodes(limits: dict[Form, int]) -> tuple[int, ...]:
            forms = sorted(p.shifted(c) for p, c in limits.items())
            return tuple(sorted(map(self.terms.of_form, forms)))

        unit = all(abs(c) == 1 for _, c in value.terms)
        return Bound(
            self.terms.of_form(value),
            nodes(entry.lows),
            nodes(entry.highs),
            tuple(sorted(map(self.terms.of_form, sorted(entry.excludes)))),
            value.terms if unit and len(value.terms) <= 2 else (),
        )

    def _only_useful(self, i: int, bounds: list[Bound], clause: _Conjunction) -> Bound:
        """The bound, which narrows terms only if something that is evaluated later reads them."""
        bound = bounds[i]
        readers = [n for b in bounds[i + 1 :] for n in (b.value, *b.lows, *b.highs)]
        readers += [n for b in bounds if b.excludes and b != bound for n in (b.value, *b.excludes)]
        readers += [a.term for a in clause.atoms if isinstance(a, Test)]
        useful = clause.nested or any(
            self.terms.contains(n, term) for n in readers for term, _ in bound.narrows
        )
        return bound if useful else replace(bound, narrows=())

    def _order(self, bound: Bound) -> tuple[int, int]:
        """Sorts indices first (b and h before q and k), then their distance, then single terms."""
        node, level = self.terms.nodes[bound.value], self.terms.term_level(bound.value)
        if node.op == "input":
            return level - 2, bound.value
        if bound.value == self.distance:
            return 1, bound.value
        return (2 if node.op != "linear" else 3 if bound.narrows else 4), bound.value

    def _cost(self, clause: Clause) -> tuple[int, str]:
        """Sorts clauses that only compare indices before those that read tensors."""
        loads = sum(self._loads(n) for n in clause_nodes(clause))
        return loads + len(clause.bounds), repr(clause)

    def _loads(self, term: int) -> int:
        node = self.terms.nodes[term]
        own = 10 * (node.op in ("gather", "searchsorted")) * self.terms.term_level(term)
        return own + sum(self._loads(a) for a in node.args)


def _both(a: _Conjunction, b: _Conjunction) -> _Conjunction:
    return _Conjunction(a.atoms | b.atoms, a.nested | b.nested)


def _implies(a: _Conjunction, b: _Conjunction) -> bool:
    """Whether `a` implies `b`, compared atom by atom. May be False where it does."""
    if not b.nested <= a.nested:
        return False
    return all(atom in a.atoms or any(_stronger(x, atom) for x in a.atoms) for atom in b.atoms)


def _stronger(a: _Atom, b: _Atom) -> bool:
    """Whether `a` implies `b`, such as ``x >= 0`` implies ``x + 3 >= 0``."""
    if isinstance(a, Test) or isinstance(b, Test) or b.kind != "ge" or a.kind == "ne":
        return False
    if a.form.terms == b.form.terms:
        return a.form.const <= b.form.const
    negated = a.form.times(-1)
    return a.kind == "eq" and negated.terms == b.form.terms and negated.const <= b.form.const


# --- what an evaluation reads ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeTableSpec:
    """A lo and a hi table of param tensor `slot`: the extremes of every 64 entries along `dim`."""

    slot: int
    dim: int


def scanned_dim(program: Program, term: int, rank: int) -> int:
    """The dim along which a gather reads a range: the last one whose index depends on q or k, else
    the last dim."""
    levels = [program.inputs[a] & {"q_idx", "kv_idx"} for a in program.nodes[term].args]
    moving = [d for d, level in enumerate(levels) if level]
    return moving[-1] if moving else max(rank - 1, 0)


def reads_bits(program: Program, term: int) -> bool:
    """Whether the ``bit`` node `term` is evaluated on a tensor's elements one by one."""
    source = program.nodes[program.nodes[term].args[0]]
    return source.op == "gather" and not source.shape


def operands(program: Program, term: int) -> tuple[int, ...]:
    """The nodes whose values the evaluation of node `term` needs."""
    node = program.nodes[term]
    if node.op == "bit" and reads_bits(program, term):
        return *program.nodes[node.args[0]].args, node.args[1]
    if node.op == "searchsorted" and kind(program.nodes[node.args[0]].dtype) != "i":
        return ()
    return node.args if node.op in OWN else select(program.nodes, term).args


def reachable_nodes(program: Program) -> list[int]:
    """Every node that a classification may evaluate, ascending."""
    seen: set[int] = set()
    stack = [*program.roots(), *(n for p in program.periods for n in (p.offset, p.divisor))]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(operands(program, node))
    return sorted(seen)


def range_tables(graph: Graph) -> tuple[RangeTableSpec, ...]:
    """The tables that the mask reads, in the order in which they follow the params as lo, hi pairs.

    A param needs tables where one of its indices depends on q_idx or kv_idx, unless it is read as
    rows of bits.
    """
    program = simplify(graph)
    specs = set()
    for n in reachable_nodes(program):
        node = program.nodes[n]
        if node.op != "gather" or not node.args:
            continue
        dim = scanned_dim(program, n, len(node.args))
        if program.inputs[node.args[dim]] & {"q_idx", "kv_idx"}:
            specs.add((node.int_attr("slot"), dim))
    return tuple(RangeTableSpec(slot, dim) for slot, dim in sorted(specs))
