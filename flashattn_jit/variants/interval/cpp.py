"""Prints a mask's interval form: C++ for kernels, with its clauses as comments.

The rendered ``Hooks::classify`` runs on the host, for planning, and inside kernels, which skip
empty tiles. It is the code of `statements` in terms of ``fajit/interval/*.h``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.ir import Graph, Node, TensorParam
from .simplify import Clause, Program, simplify
from .statements import Code, CodeClause, Statement, code_of
from .terms import I64_MAX, I64_MIN

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
_READ_CALL = ("i_scalar", "f_scalar", "i_places", "i_ranks", "i_q_len", "i_kv_len", "i_q_row",
              "i_kv_slot")  # fmt: skip
"""Functions that take the context as their first argument."""
_INDICES = ("b", "h", "q", "k")


def lower_classify(graph: Graph, tensors: Sequence[TensorParam]) -> str:
    """The body of ``static int classify(const Context& c, Interval b, Interval h, Interval q,
    Interval k)``, indented by four spaces.

    tensors: the variant's params, whose dtypes and ranks are compiled in.
    """
    code = code_of(graph, [(t.dtype, t.rank) for t in tensors])
    return "\n".join(_Text(simplify(graph), code, tensors).lines())


class _Text:
    """Prints the statements of a `Code`. Register n is the C++ constant ``xn``."""

    def __init__(self, program: Program, code: Code, tensors: Sequence[TensorParam]) -> None:
        self.program, self.code, self.tensors = program, code, tensors

    def lines(self) -> Iterator[str]:
        """The statements of the function."""
        code = self.code
        yield "    using namespace interval;"
        if not code.periods:
            yield from self._box("    ")
            return
        yield from self._block(code.once, "    ", "")
        yield "    const auto box = [&](Interval q, Interval k) -> int {"
        yield from self._box("      ")
        yield "    };"
        for name in ("q", "k"):
            split = [p for p in code.periods if _name(p[0]) == name]
            yield f"    Interval parts_{name}[3] = {{{name}}};"
            call = "1"
            for _, offset, divisor in split:
                call = f"periods({name}, {_name(offset)}, {_name(divisor)}, parts_{name})"
            yield f"    const int count_{name} = {call};"
        yield "    return by_parts(box, q, k, parts_q, count_q, parts_k, count_k);"

    def _box(self, indent: str) -> Iterator[str]:
        """The statements that return the state of the box q, k."""
        code = self.code
        yield f"{indent}if (q.lo > q.hi || k.lo > k.hi) return FAJIT_TILE_EMPTY;"
        yield f"{indent}if (!positions(q) || !positions(k)) return FAJIT_TILE_PARTIAL;"
        if not code.periods:
            yield from self._block(code.once, indent, "")
        yield from self._block(code.guards, indent, "return FAJIT_TILE_PARTIAL")
        if code.keep and code.drop:
            yield from self._any("keep", code.keep, indent)
            yield f"{indent}if (!keep) return FAJIT_TILE_EMPTY;"
            yield from self._any("drop", code.drop, indent)
            yield f"{indent}return drop ? FAJIT_TILE_PARTIAL : FAJIT_TILE_FULL;"
        else:
            yield f"{indent}return FAJIT_TILE_{'FULL' if code.keep else 'EMPTY'};"

    def _any(self, flag: str, clauses: Sequence[CodeClause], indent: str) -> Iterator[str]:
        """Sets `flag` to whether one of the clauses holds."""
        yield f"{indent}bool {flag} = false;"
        for i, clause in enumerate(clauses):
            assert clause.source is not None
            text = format_clause(self.program, clause.source)
            yield f"{indent}// {flag} if {text if len(text) <= 88 else text[:85] + '...'}"
            yield f"{indent}{f'if (!{flag}) ' if i else ''}do {{"
            yield from self._block(clause.statements, f"{indent}  ", "break")
            yield f"{indent}  {flag} = true;"
            yield f"{indent}}} while (false);"

    def _block(self, statements: Sequence[Statement], indent: str, leave: str) -> Iterator[str]:
        """The statements; `leave` is the C++ statement for where one does not hold."""
        for i, s in enumerate(statements):
            if s.name == "any":
                flag = f"any_{len(indent)}_{i}"
                yield from self._any(flag, s.clauses, indent)
                yield f"{indent}if (!{flag}) {leave};"
            elif s.name == "meet":
                yield f"{indent}Interval {_name(s.result)} = {_name(s.operands[0])};"
                yield f"{indent}if (!meet({_name(s.result)}, {_limits(s)})) {leave};"
            elif s.result is None:
                yield f"{indent}if (!{_call(s)}) {leave};"
            elif s.name in ("i_gather", "t_gather", "f_gather", "gather_bits"):
                at = f"at{s.result}"
                names = ", ".join(map(_name, s.operands)) or "kTop"
                yield f"{indent}const Interval {at}[] = {{{names}}};"
                yield f"{indent}const auto {_name(s.result)} = {self._gather(s, at)};"
            else:
                text = self._searchsorted(s) if s.name == "i_searchsorted" else _call(s)
                yield f"{indent}const auto {_name(s.result)} = {text};"

    def _gather(self, s: Statement, at: str) -> str:
        slot, dim = int(s.numbers[0]), s.numbers[1 if s.name == "gather_bits" else 2]
        tensor = self.tensors[slot]
        function = f"{s.name}<{_STORAGE[tensor.dtype]}, {tensor.rank}, {dim}>"
        if s.name == "gather_bits":
            return f"{function}(c.tensor({slot}), {at})"
        tables = "nullptr" if s.numbers[1] == -1 else f"tables_at(c, {s.numbers[1]})"
        top = ""
        if s.name == "i_gather":
            top = f", {{{_literal(s.numbers[3])}, {_literal(s.numbers[4])}}}"
        return f"{function}(c.tensor({slot}), {tables}, {at}{top})"

    def _searchsorted(self, s: Statement) -> str:
        slot, right = int(s.numbers[0]), "true" if s.numbers[1] else "false"
        storage = _STORAGE[self.tensors[slot].dtype]
        return f"{s.name}<{storage}, {right}>(c.tensor({slot}), {_name(s.operands[0])})"


def _name(register: int | None) -> str:
    assert register is not None
    return _INDICES[register] if register < len(_INDICES) else f"x{register}"


def _call(s: Statement) -> str:
    context = ["c"] if s.name in _READ_CALL else []
    arguments = [*context, *map(_name, s.operands), *map(_literal, s.numbers)]
    return f"{s.name}({', '.join(arguments)})"


def _limits(s: Statement) -> str:
    """The low and the high limit of a ``meet``."""
    count, low, high = s.numbers
    ends = s.operands[1 : 1 + int(count)], s.operands[1 + int(count) :]
    texts = []
    for registers, end, best, function in (
        (ends[0], "lo", low, "larger"),
        (ends[1], "hi", high, "smaller"),
    ):
        parts = [f"{_name(r)}.{end}" for r in registers]
        if not parts or best not in (I64_MIN, I64_MAX):
            parts.append(_literal(best))
        text = parts[0]
        for other in parts[1:]:
            text = f"{function}({text}, {other})"
        texts.append(text)
    return ", ".join(texts)


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


# --- comments -------------------------------------------------------------------------------------


def format_clause(program: Program, clause: Clause) -> str:
    """One clause as readable text."""

    def text(node: int) -> str:
        return format_term(program.nodes, node)

    def joined(nodes: Sequence[int], function: str) -> str:
        names = [text(n) for n in nodes]
        return names[0] if len(names) == 1 else f"{function}({', '.join(names)})"

    parts = []
    for bound in clause.bounds:
        if bound.lows and bound.lows == bound.highs:
            parts.append(f"{text(bound.value)} == {joined(bound.lows, 'max')}")
        elif bound.lows or bound.highs:
            low = f"{joined(bound.lows, 'max')} <= " if bound.lows else ""
            high = f" <= {joined(bound.highs, 'min')}" if bound.highs else ""
            parts.append(f"{low}{text(bound.value)}{high}")
        parts += [f"{text(bound.value)} != {text(e)}" for e in bound.excludes]
    parts += [f"{'' if t.want else 'not '}{text(t.term)}" for t in clause.tests]
    for group in clause.nested:
        parts.append("(" + " or ".join(format_clause(program, c) for c in group) + ")")
    return " and ".join(parts) if parts else "always"


def format_term(nodes: tuple[Node, ...], term: int) -> str:
    """A term as readable text, such as ``q_idx - kv_idx + s0``."""
    node = nodes[term]
    args = [format_term(nodes, a) for a in node.args]
    if node.op == "input":
        return str(node.attr("name"))
    if node.op == "const":
        return str(node.attr("value"))
    if node.op == "scalar":
        return f"scalar{node.int_attr('slot')}"
    if node.op == "gather":
        return f"tensor{node.int_attr('slot')}[{', '.join(args)}]"
    if node.op != "linear":
        return f"{node.op}({', '.join(args)})"
    coefs = node.attr("coefs")
    assert isinstance(coefs, tuple)
    text = ""
    for arg, c in zip(args, coefs, strict=True):
        factor = "" if abs(c) == 1 else f"{abs(c)}*"
        text += f" {'-' if c < 0 else '+'} {factor}{arg}"
    const = node.int_attr("const")
    if const:
        text += f" {'-' if const < 0 else '+'} {abs(const)}"
    return text[3:] if text.startswith(" + ") else text.strip()
