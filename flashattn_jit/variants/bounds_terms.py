"""Integer terms of a mask in linear normal form: the ground floor of the interval form.

A mask compares integer expressions of ``b, h, q_idx, kv_idx``. Here each becomes a `Form`: an
integer combination of *terms*, where a term is an index or something non-linear (a gather, a
quotient, a clamp). Sums cancel by themselves in that form, which is what makes interval evaluation
exact: ``q - offsets[d] >= k - offsets[d]`` is ``q - k >= 0``.

Machine integers wrap, forms do not. Sums, differences and products commute with wrapping, so only
values that leave that ring (comparison operands, arguments of non-linear operations, widening
casts) must fit their dtype. Where static ranges do not prove it, a *guard* is recorded; a tile on
which a guard fails is partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .ir import Attr, Node

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

INT_RANGE: Mapping[str, tuple[int, int]] = {
    "bool": (0, 1),
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (I64_MIN, I64_MAX),
}
"""The values of each integer dtype."""

MAX_POSITION = 2**30
"""Indices are at most this large; `q_idx` may be negative, when a request has fewer keys than
queries. A box beyond it is partial."""

INDEX_RANGE: Mapping[str, tuple[int, int]] = {
    "b": (0, MAX_POSITION),
    "h": (0, MAX_POSITION),
    "kv_h": (0, MAX_POSITION),
    "q_idx": (-MAX_POSITION, MAX_POSITION),
    "kv_idx": (0, MAX_POSITION),
}


@dataclass(frozen=True, slots=True)
class Form:
    """``sum(coefficient * term) + const``. Terms ascend and no coefficient is zero."""

    terms: tuple[tuple[int, int], ...] = ()
    const: int = 0

    def plus(self, other: Form, factor: int = 1) -> Form:
        """``self + factor * other``."""
        total = dict(self.terms)
        for term, c in other.terms:
            total[term] = total.get(term, 0) + factor * c
        terms = tuple(sorted((t, c) for t, c in total.items() if c))
        return Form(terms, self.const + factor * other.const)

    def times(self, factor: int) -> Form:
        """``factor * self``."""
        return Form().plus(self, factor)

    def shifted(self, by: int) -> Form:
        """``self + by``."""
        return Form(self.terms, self.const + by)

    def coefficient(self, term: int) -> int:
        """The coefficient of `term`, 0 when it does not occur."""
        return dict(self.terms).get(term, 0)

    @property
    def is_const(self) -> bool:
        """Whether no term occurs."""
        return not self.terms


class Terms:
    """Hash-consed nodes of the interval form, each with its static range and what it depends on.

    Nodes are those of the IR, plus ``linear`` (attributes `coefs` and `const`), ``bit`` (bit number
    args[1] of args[0], 0 or 1) and ``top`` (any value of its dtype).
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.ranges: list[tuple[int, int]] = []
        self.inputs: list[frozenset[str]] = []
        self.parts: list[frozenset[int]] = []
        self._ids: dict[tuple[object, ...], int] = {}

    def add(
        self,
        op: str,
        args: Iterable[int] = (),
        dtype: str = "int64",
        shape: tuple[int, ...] = (),
        attrs: tuple[tuple[str, Attr], ...] = (),
        bounds: tuple[int, int] | None = None,
    ) -> int:
        """The index of the node, new or found. `bounds`: its static range (default: its dtype's),
        which may exceed 64 bits: the evaluation saturates."""
        node = Node(op, tuple(args), dtype, shape, attrs)
        key = (op, node.args, dtype, shape, repr(attrs))
        if key in self._ids:
            return self._ids[key]
        low, high = bounds or INT_RANGE.get(dtype, (I64_MIN, I64_MAX))
        own = frozenset([str(node.attr("name"))]) if op == "input" else frozenset[str]()
        self._ids[key] = len(self.nodes)
        self.nodes.append(node)
        self.ranges.append((low, high))
        self.inputs.append(own.union(*(self.inputs[a] for a in node.args)))
        self.parts.append(frozenset(node.args).union(*(self.parts[a] for a in node.args)))
        return self._ids[key]

    def input(self, name: str) -> int:
        """The term of the index `name`."""
        attrs = (("name", name),)
        return self.add("input", dtype="int32", attrs=attrs, bounds=INDEX_RANGE.get(name))

    def of_form(self, form: Form) -> int:
        """A node that evaluates `form`: a constant, a bare term or a ``linear`` node."""
        if form.is_const:
            return self.add("const", attrs=(("value", form.const),), bounds=(form.const,) * 2)
        if form.const == 0 and form.terms[0][1] == 1 and len(form.terms) == 1:
            return form.terms[0][0]
        coefs = tuple(c for _, c in form.terms)
        return self.add(
            "linear",
            (t for t, _ in form.terms),
            attrs=(("coefs", coefs), ("const", form.const)),
            bounds=self.range(form),
        )

    def to_form(self, term: int) -> Form:
        """The inverse of `of_form`."""
        node = self.nodes[term]
        if node.op == "linear":
            coefs = node.attr("coefs")
            assert isinstance(coefs, tuple)
            return Form(tuple(zip(node.args, coefs, strict=True)), node.int_attr("const"))
        if node.op == "const" and node.dtype == "int64":
            return Form((), node.int_attr("value"))
        return Form(((term, 1),))

    def range(self, form: Form) -> tuple[int, int]:
        """The static range of `form`, in unbounded integers."""
        low = high = form.const
        for term, c in form.terms:
            a, b = (c * x for x in self.ranges[term])
            low, high = low + min(a, b), high + max(a, b)
        return low, high

    def level(self, form: Form) -> int:
        """2 if `form` depends on q_idx or kv_idx, else 1 if on b or h, else 0."""
        return max((self.term_level(t) for t, _ in form.terms), default=0)

    def term_level(self, term: int) -> int:
        """`level` of a single term."""
        inputs = self.inputs[term]
        return 2 if "q_idx" in inputs or "kv_idx" in inputs else int(bool(inputs))

    def contains(self, term: int, part: int) -> bool:
        """Whether `part` is `term` or occurs in it."""
        return term == part or part in self.parts[term]

    def substitute(self, form: Form, old: int, new: Form) -> Form:
        """`form` with every occurrence of the term `old`, however deep, replaced by `new`."""
        memo: dict[int, Form] = {old: new}
        total = Form((), form.const)
        for term, c in form.terms:
            total = total.plus(self._substitute_term(term, old, memo), c)
        return total

    def _substitute_term(self, term: int, old: int, memo: dict[int, Form]) -> Form:
        if term in memo:
            return memo[term]
        node = self.nodes[term]
        result = Form(((term, 1),))
        if self.contains(term, old):
            if node.op == "linear":
                result = self.substitute(self.to_form(term), old, memo[old])
            else:
                args = [self.of_form(self._substitute_term(a, old, memo)) for a in node.args]
                # The static range of the old node holds only under the equality: not passed on.
                new = self.add(node.op, args, node.dtype, node.shape, node.attrs)
                result = Form(((new, 1),))
        memo[term] = result
        return result


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
