"""C++ text of a mask's interval form, over ``fajit/interval*.h``.

The rendered ``Hooks::classify`` runs on the host (planning) and inside kernels (skipping), for
boxes of any size. Indices are narrowed as it goes along: a clause works on the part of the box that
can still satisfy it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from .bounds_select import OWN, Step, kind, select
from .bounds_simplify import Bound, Clause, Program, clause_nodes, format_clause, simplify
from .bounds_terms import I64_MAX, I64_MIN, INT_RANGE
from .ir import Graph, TensorParam
from .range_table import RangeTableSpec

__all__ = ["RangeTableSpec", "lower_classify", "range_tables"]

_STORAGE = {
    "bool": "Plain<uint8_t>",
    "uint8": "Plain<uint8_t>",
    "int8": "Plain<int8_t>",
    "int16": "Plain<int16_t>",
    "int32": "Plain<int32_t>",
    "int64": "Plain<int64_t>",
    "float32": "Plain<float>",
    "float64": "Plain<double>",
    "float16": "Half",
    "bfloat16": "BFloat",
}
_SAFE = 2**61

MAX_ROWS = 256
MAX_BIT_LOADS = 4096
"""How much of a tensor one box may read (``kMaxRows``, ``kMaxBitLoads`` in C++)."""


def scanned_dim(program: Program, term: int, rank: int) -> int:
    """The dim along which a gather's box is read: the last one that q or k moves, else the last.

    Shared by both lowerings, so that they give up on the same boxes.
    """
    levels = [program.inputs[a] & {"q_idx", "kv_idx"} for a in program.nodes[term].args]
    moving = [d for d, level in enumerate(levels) if level]
    return moving[-1] if moving else max(rank - 1, 0)


def operands(program: Program, term: int) -> tuple[int, ...]:
    """The nodes whose values the evaluation of node `term` needs."""
    node = program.nodes[term]
    if node.op == "bit" and program.nodes[node.args[0]].op == "gather":
        return *program.nodes[node.args[0]].args, node.args[1]
    if node.op == "searchsorted" and kind(program.nodes[node.args[0]].dtype) != "i":
        return ()
    return node.args if node.op in OWN else select(program.nodes, term).args


def reachable_nodes(program: Program) -> list[int]:
    """Every node that a classification may evaluate, ascending."""
    seen: set[int] = set()
    stack = [n for n, _, _ in program.guards]
    stack += [n for side in (program.keep, program.drop) for c in side for n in clause_nodes(c)]
    stack += [n for p in program.periods for n in (p.offset, p.divisor)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(operands(program, node))
    return sorted(seen)


def range_tables(graph: Graph) -> tuple[RangeTableSpec, ...]:
    """The tables that the mask reads, in the order in which they follow the params as lo, hi pairs.

    A param needs one when q_idx or kv_idx moves along one of its dims, other than as bit rows.
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


def lower_classify(
    graph: Graph, tensors: Sequence[TensorParam], table_base: int | None = None
) -> str:
    """The body of ``static int classify(const Context& c, Interval b, Interval h, Interval q,
    Interval k)``, indented by four spaces.

    tensors: the variant's params, whose dtypes and ranks are compiled in. table_base: the index in
    ``fajit_args.tensors`` of the first table of `range_tables` (default: after the params).
    """
    base = len(tensors) if table_base is None else table_base
    return "\n".join(_Body(simplify(graph), range_tables(graph), tensors, base).lines())


class _Scope:
    """C++ names of evaluated nodes inside one block."""

    def __init__(self, lines: list[str], indent: int, names: dict[int, str]) -> None:
        self.lines, self.indent, self.names = lines, indent, dict(names)

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text)

    def inner(self) -> _Scope:
        return _Scope(self.lines, self.indent + 2, self.names)


class _Body:
    def __init__(
        self,
        program: Program,
        specs: tuple[RangeTableSpec, ...],
        tensors: Sequence[TensorParam],
        table_base: int,
    ) -> None:
        self.program, self.tensors = program, tensors
        self.tables = {(s.slot, s.dim): table_base + 2 * i for i, s in enumerate(specs)}
        self.counter = 0

    def lines(self) -> Iterator[str]:
        """The statements of the function."""
        program, out = self.program, list[str]()
        scope = _Scope(out, 4, {})
        scope.line("using namespace interval;")
        if not program.periods:
            self._box_state(scope)
            return _used(out)
        self._hoist(scope)
        scope.line("const auto box = [&](Interval q, Interval k) -> int {")
        self._box_state(scope.inner())
        scope.line("};")
        for name, index in (("q", program.q), ("k", program.k)):
            periods = [p for p in program.periods if p.index == index]
            scope.line(f"Interval parts_{name}[3] = {{{name}}};")
            values = [self.value(scope, n) for p in periods for n in (p.offset, p.divisor)]
            call = f"periods({name}, {', '.join(values)}, parts_{name})" if periods else "1"
            scope.line(f"const int count_{name} = {call};")
        scope.line("return by_parts(box, q, k, parts_q, count_q, parts_k, count_k);")
        return _used(out)

    def _box_state(self, scope: _Scope) -> None:
        """The statements that return the state of the box q, k."""
        program = self.program
        for node, name in ((program.q, "q"), (program.k, "k")):
            scope.names[node] = name
        for i, n in enumerate(program.nodes):
            if n.op == "input" and n.attr("name") in ("b", "h"):
                scope.names[i] = str(n.attr("name"))
        scope.line("if (q.lo > q.hi || k.lo > k.hi) return FAJIT_TILE_EMPTY;")
        scope.line("if (!positions(q) || !positions(k)) return FAJIT_TILE_PARTIAL;")
        self._hoist(scope)
        for node, low, high in program.guards:
            limits = f"{self.value(scope, node)}, {_literal(low)}, {_literal(high)}"
            scope.line(f"if (!fits({limits})) return FAJIT_TILE_PARTIAL;")
        if program.keep and program.drop:
            self._question(scope, "keep", program.keep)
            scope.line("if (!keep) return FAJIT_TILE_EMPTY;")
            self._question(scope, "drop", program.drop)
            scope.line("return drop ? FAJIT_TILE_PARTIAL : FAJIT_TILE_FULL;")
        else:
            scope.line(f"return FAJIT_TILE_{'FULL' if program.keep else 'EMPTY'};")

    def _hoist(self, scope: _Scope) -> None:
        """Evaluate what depends on params only once, ahead of the clauses."""
        for n in reachable_nodes(self.program):
            if not self.program.inputs[n] and self.program.nodes[n].op != "const":
                self.value(scope, n)

    # --- clauses ---------------------------------------------------------------------------------

    def _question(self, scope: _Scope, flag: str, clauses: Sequence[Clause]) -> None:
        scope.line(f"bool {flag} = false;")
        for i, clause in enumerate(clauses):
            scope.line(f"// {flag} if {_comment(format_clause(self.program, clause))}")
            scope.line(f"{f'if (!{flag}) ' if i else ''}do {{")
            inner = scope.inner()
            self._clause(inner, clause)
            inner.line(f"{flag} = true;")
            scope.line("} while (false);")

    def _clause(self, scope: _Scope, clause: Clause) -> None:
        for bound in clause.bounds:
            if bound.lows or bound.highs:
                self._bound(scope, bound)
        for bound in clause.bounds:
            for exclude in bound.excludes:
                value, other = self.value(scope, bound.value), self.value(scope, exclude)
                scope.line(f"if ({other}.lo == {other}.hi && is({value}, {other}.lo)) break;")
        for test in clause.tests:
            name = self.value(scope, test.term)
            scope.line(f"if ({f'!{name}.may' if test.want else f'{name}.must'}) break;")
        for group in clause.nested:
            flag = self._fresh("any")
            self._question(scope, flag, group)
            scope.line(f"if (!{flag}) break;")

    def _bound(self, scope: _Scope, bound: Bound) -> None:
        low = self._extreme(scope, bound.lows, "lo", "larger") or "kMin"
        high = self._extreme(scope, bound.highs, "hi", "smaller") or "kMax"
        name = self._fresh("v")
        scope.line(f"Interval {name} = {self.value(scope, bound.value)};")
        scope.line(f"if (!meet({name}, {low}, {high})) break;")
        old = {t: self.value(scope, t) for t, _ in bound.narrows}
        narrowed: dict[int, str] = {}
        for i, (term, c) in enumerate(bound.narrows):
            if len(bound.narrows) == 1:
                narrowed[term] = name
                continue
            other, d = bound.narrows[1 - i]
            rest = f"i_sub({name}, {_scaled(old[other], d)})"
            new = self._fresh("n")
            scope.line(f"Interval {new} = {_scaled(rest, c)};")
            scope.line(f"if (!meet({new}, {old[term]}.lo, {old[term]}.hi)) break;")
            narrowed[term] = new
        self._forget(scope, narrowed)
        scope.names.update(narrowed)
        if bound.narrows or bound.excludes:
            scope.names[bound.value] = name

    def _extreme(self, scope: _Scope, nodes: Sequence[int], end: str, function: str) -> str:
        texts = [self._endpoint(scope, n, end) for n in nodes]
        text = texts[0] if texts else ""
        for other in texts[1:]:
            text = f"{function}({text}, {other})"
        return text

    def _endpoint(self, scope: _Scope, node: int, end: str) -> str:
        if self.program.nodes[node].op == "const":
            return _literal(self.program.nodes[node].int_attr("value"))
        return f"{self.value(scope, node)}.{end}"

    def _forget(self, scope: _Scope, changed: Mapping[int, str]) -> None:
        """Drop what was computed from the terms `changed`."""
        for node in list(scope.names):
            if not self.program.parts[node].isdisjoint(changed):
                del scope.names[node]

    # --- values ----------------------------------------------------------------------------------

    def value(self, scope: _Scope, node: int) -> str:
        """The C++ name of the node's value, computed in `scope` if it is not known there."""
        if node not in scope.names:
            text = self._own(scope, node) if self.program.nodes[node].op in OWN else ""
            text = text or self._step(scope, node, select(self.program.nodes, node))
            name = self._fresh("x")
            scope.line(f"const {_TYPE[kind(self.program.nodes[node].dtype)]} {name} = {text};")
            scope.names[node] = name
        return scope.names[node]

    def _fresh(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    def _step(self, scope: _Scope, node: int, step: Step) -> str:
        names = [self.value(scope, a) for a in step.args]
        extra = [_literal(e) for e in step.extra]
        if step.name.endswith("_hull"):
            text = names[0]
            for name in names[1:]:
                text = f"{step.name}({text}, {name})"
        elif step.name == "i_const":
            text = f"Interval{{{extra[0]}, {extra[0]}}}"
        elif step.name == "i_scalar":
            text = f"i_point(c.scalar_i64({step.extra[0]}))"
        elif step.name == "f_scalar":
            text = f"f_point(c.scalar_f64({step.extra[0]}))"
        else:
            text = f"{step.name}({', '.join([*names, *extra])})"
        if step.wrap:
            text = f"i_wrap({text}, {_literal(step.wrap[0])}, {_literal(step.wrap[1])})"
        return f"t_not({text})" if step.negate else text

    def _own(self, scope: _Scope, node: int) -> str:
        op = self.program.nodes[node].op
        if op == "linear":
            return self._linear(scope, node)
        if op == "gather":
            return self._gather(scope, node)
        if op == "bit":
            return self._bit(scope, node)
        if op == "searchsorted":
            return self._searchsorted(scope, node)
        if op == "input":
            return "kTop"
        names = [self.value(scope, a) for a in self.program.nodes[node].args]
        return f"i_{op}({', '.join(['c', *names])})"

    def _linear(self, scope: _Scope, node: int) -> str:
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
        ranges = [abs(c * x) for t, c in parts.items() for x in self.program.ranges[t]]
        if sum(ranges) + abs(const) > _SAFE:
            text = "" if not const else f"i_point({_literal(const)})"
            for name, c in values:
                text = f"i_add({text}, {_scaled(name, c)})" if text else _scaled(name, c)
            return text
        low, high = "", ""
        for name, c in values:
            sign = " - " if c < 0 else " + "
            factor = "" if abs(c) == 1 else f"{abs(c)} * "
            low += f"{sign}{factor}{name}.{'hi' if c < 0 else 'lo'}"
            high += f"{sign}{factor}{name}.{'lo' if c < 0 else 'hi'}"
        tail = f" {'-' if const < 0 else '+'} {abs(const)}" if const else ""
        return f"Interval{{{_sum(low)}{tail}, {_sum(high)}{tail}}}"

    def _box(self, scope: _Scope, node: int) -> tuple[str, int, int]:
        """The array of index intervals of a gather, its rank and its scanned dim."""
        n = self.program.nodes[node]
        rank = self.tensors[n.int_attr("slot")].rank
        names = [self.value(scope, a) for a in n.args]
        for dim in range(len(names), rank):  # a row: all of the last dim
            names.append(f"Interval{{0, c.size({n.int_attr('slot')}, {dim}) - 1}}")
        array = self._fresh("at")
        scope.line(f"const Interval {array}[] = {{{', '.join(names) or 'kTop'}}};")
        return array, rank, scanned_dim(self.program, node, rank)

    def _gather(self, scope: _Scope, node: int) -> str:
        n = self.program.nodes[node]
        slot = n.int_attr("slot")
        storage = _STORAGE.get(self.tensors[slot].dtype)
        if storage is None:
            return f"{kind(n.dtype)}_top()"
        array, rank, dim = self._box(scope, node)
        table = self.tables.get((slot, dim))
        tables = "nullptr" if table is None else f"tables_at(c, {table})"
        top = ""
        if kind(n.dtype) == "i":
            low, high = (_literal(x) for x in INT_RANGE[n.dtype])
            top = f", {{{low}, {high}}}"
        function = f"{kind(n.dtype)}_gather<{storage}, {rank}, {dim}>"
        return f"{function}(c.tensor({slot}), {tables}, {array}{top})"

    def _bit(self, scope: _Scope, node: int) -> str:
        n = self.program.nodes[node]
        source, at = self.program.nodes[n.args[0]], self.value(scope, n.args[1])
        width = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32}.get(n.dtype, 64)
        if source.op == "gather" and not source.shape:
            array, rank, dim = self._box(scope, n.args[0])
            slot = source.int_attr("slot")
            storage = _STORAGE[self.tensors[slot].dtype]
            bits = f"gather_bits<{storage}, {rank}, {dim}>(c.tensor({slot}), {array})"
        else:
            bits = f"bits_of({self.value(scope, n.args[0])})"
        return f"i_bit({bits}, {at}, {width})"

    def _searchsorted(self, scope: _Scope, node: int) -> str:
        n = self.program.nodes[node]
        slot = n.int_attr("slot")
        value = self.program.nodes[n.args[0]]
        dtype = self.tensors[slot].dtype
        if kind(value.dtype) != "i" or kind(dtype) != "i":
            return f"Interval{{0, c.size({slot}, 0)}}"
        right = "true" if n.attr("right") else "false"
        name = self.value(scope, n.args[0])
        return f"i_searchsorted<{_STORAGE[dtype]}, {right}>(c.tensor({slot}), {name})"


_TYPE = {"i": "Interval", "f": "FInterval", "t": "Tri"}


_NAME = re.compile(r"\b[a-z]+\d+\b")
_DEFINITION = re.compile(r" *const \w+ ([a-z]+\d+)(\[\])? = ")


def _used(lines: Sequence[str]) -> Iterator[str]:
    """The lines without definitions that no later line reads."""
    used: set[str] = set()
    kept: list[str] = []
    for line in reversed(lines):
        definition = _DEFINITION.match(line)
        if definition is None or definition[1] in used:
            used.update(_NAME.findall(line))
            kept.append(line)
    return reversed(kept)


def _scaled(name: str, factor: int) -> str:
    if factor == 1:
        return name
    return f"i_neg({name})" if factor == -1 else f"i_scale({name}, {_literal(factor)})"


def _sum(text: str) -> str:
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}"


def _comment(text: str) -> str:
    return text if len(text) <= 88 else text[:85] + "..."


def _literal(value: int | float) -> str:
    if isinstance(value, float):
        if value != value:
            return '__builtin_nan("")'
        if value in (float("inf"), float("-inf")):
            return f"{'-' if value < 0 else ''}__builtin_inf()"
        return value.hex() if value != int(value) or abs(value) > 1e6 else repr(value)
    if value == I64_MIN:
        return "kMin"
    if value == I64_MAX:
        return "kMax"
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"
