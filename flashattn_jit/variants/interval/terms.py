"""The algebra of masks: integer terms in linear normal form, and boolean formulas over them.

A mask compares integer expressions of ``b, h, q_idx, kv_idx``. Each of them becomes a `Form`: a
linear combination of *terms* with integer coefficients, where a term is an index or a non-linear
value (a gather, a quotient, a clamp). Equal terms cancel in a form, which makes interval evaluation
exact: ``q - offsets[d] >= k - offsets[d]`` is ``q - k >= 0``.

Machine integers wrap, forms do not. Sums, differences and products commute with wrapping, so only
the operands of other operations (comparisons, non-linear operations, widening casts) must fit their
dtype. Where static ranges do not prove that, a *guard* is recorded; a tile on which a guard fails
is partial.

A `Formula` joins comparisons of forms with zero by and / or, in negation normal form. There is one
kind of evaluation: *may this formula be true somewhere in the box?* For the mask it tells whether
some pair of the tile may be kept, for the negated mask whether some pair may be dropped. Within a
conjunction an equality such as ``doc[q] == doc[k]`` rewrites the other parts where that cancels
terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal, TypeAlias

from ..ir.ir import Attr, Node

_MAX_SPLITS = 4

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a tile: no pair is kept, some are or it is not known, every pair is kept. Those of the
blocks of a block mask: not visited, visited with the mask, visited without it."""

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
MOST_UNSATURATED = 2**61
"""Sums whose magnitude is below this one do not saturate."""

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
"""The largest index. `q_idx` may be negative, where a request has fewer keys than queries. A box
with an index beyond this limit is partial."""

INDEX_RANGE: Mapping[str, tuple[int, int]] = {
    "b": (0, MAX_POSITION),
    "h": (0, MAX_POSITION),
    "kv_h": (0, MAX_POSITION),
    "q_idx": (-MAX_POSITION, MAX_POSITION),
    "kv_idx": (0, MAX_POSITION),
}


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """``sum(coefficient * term) + const``. Terms ascend and no coefficient is zero.

    Forms have an order because sets of them have another one in each process.
    """

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
        """The index of the node, which is added where no equal one exists.

        bounds: its static range (default: its dtype's), which may exceed 64 bits: the evaluation
        saturates.
        """
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
                # The static range of the old node need not hold for the new one.
                new = self.add(node.op, args, node.dtype, node.shape, node.attrs)
                result = Form(((new, 1),))
        memo[term] = result
        return result


# --- formulas -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compare:
    """``form >= 0``, ``form == 0`` or ``form != 0``."""

    kind: Literal["ge", "eq", "ne"]
    form: Form


@dataclass(frozen=True, slots=True)
class Test:
    """The boolean node `term` has the value `want`."""

    term: int
    want: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Conjunction or disjunction. Empty: true, respectively false."""

    kind: Literal["and", "or"]
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """`x` where `condition`, else `y`. Its negation is one choice as well, not two cases."""

    condition: Formula
    x: Formula
    y: Formula


Formula: TypeAlias = "Compare | Test | Join | Choice"

TRUE: Formula = Join("and", ())
FALSE: Formula = Join("or", ())


@dataclass(frozen=True, slots=True)
class Split:
    """The value of a term by cases: `x` where `condition`, else `y`."""

    condition: Formula
    x: Form
    y: Form


def size(formula: Formula) -> tuple[int, int]:
    """The number of literals and of choices in the formula."""
    if isinstance(formula, Compare | Test):
        return 1, 0
    if isinstance(formula, Choice):
        parts: tuple[Formula, ...] = (formula.condition, formula.x, formula.y)
        own = 1
    else:
        parts, own = formula.parts, 0
    literals, choices = zip((0, own), *map(size, parts), strict=True)
    return sum(literals), sum(choices)


class Formulas:
    """Builds simplified formulas over one `Terms` store.

    splits: terms that are a choice (``where``, a boolean read as a number); a comparison of such a
    term becomes two cases, each exact. absolutes: ``|form|`` terms and the form inside.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.splits: dict[int, Split] = {}
        self.absolutes: dict[int, Form] = {}

    def compare(self, kind: Literal["ge", "eq", "ne"], form: Form, depth: int = 0) -> Formula:
        """The simplified formula ``form (>=, ==, !=) 0``."""
        low, high = self.terms.range(form)
        if kind == "ge" and (low >= 0 or high < 0):
            return TRUE if low >= 0 else FALSE
        if kind != "ge" and (low > 0 or high < 0 or low == high == 0):
            return TRUE if (low == high == 0) == (kind == "eq") else FALSE
        if depth < _MAX_SPLITS:
            cases = self._cases(kind, form, depth)
            if cases is not None:
                return cases
        divisor = gcd(*(c for _, c in form.terms))
        if kind != "ge":
            if form.const % divisor:
                return FALSE if kind == "eq" else TRUE
            if form.terms[0][1] < 0:
                divisor = -divisor
        # For `ge` the constant rounds down: 2x + 1 >= 0 is x + 0 >= 0.
        terms = tuple((t, c // divisor) for t, c in form.terms)
        return Compare(kind, Form(terms, form.const // divisor))

    def _cases(self, kind: Literal["ge", "eq", "ne"], form: Form, depth: int) -> Formula | None:
        for term, c in form.terms:
            if term in self.absolutes:
                inner, rest = self.absolutes[term], form.plus(Form(((term, c),)), -1)
                plus = self.compare(kind, rest.plus(inner, c), depth + 1)
                minus = self.compare(kind, rest.plus(inner, -c), depth + 1)
                if kind == "ge":  # c > 0: max(x, -x) reaches the bound, c < 0: both stay below it
                    return self.join("or" if c > 0 else "and", (plus, minus))
                return self.choose(self.compare("ge", inner, depth + 1), plus, minus)
            if term in self.splits:
                split, x, y = self.splits[term], form, form
                for other, factor in form.terms:
                    also = self.splits.get(other)
                    if also is not None and also.condition == split.condition:
                        x = x.plus(Form(((other, 1),)), -factor).plus(also.x, factor)
                        y = y.plus(Form(((other, 1),)), -factor).plus(also.y, factor)
                return self.choose(
                    split.condition,
                    self.compare(kind, x, depth + 1),
                    self.compare(kind, y, depth + 1),
                )
        return None

    def choose(self, condition: Formula, x: Formula, y: Formula) -> Formula:
        """`x` where `condition`, else `y`."""
        if condition in (TRUE, FALSE) or x == y:
            return x if condition == TRUE or x == y else y
        if x == TRUE or y == TRUE:
            other, case = (y, condition) if x == TRUE else (x, self.negate(condition))
            return self.join("or", (case, other))
        if x == FALSE or y == FALSE:
            other, case = (y, self.negate(condition)) if x == FALSE else (x, condition)
            return self.join("and", (case, other))
        return Choice(condition, x, y)

    def join(self, kind: Literal["and", "or"], parts: Iterable[Formula]) -> Formula:
        """The flattened conjunction or disjunction, constants absorbed."""
        flat: dict[Formula, None] = {}
        for part in parts:
            if isinstance(part, Join) and part.kind == kind:
                flat.update(dict.fromkeys(part.parts))
            else:
                flat[part] = None
        absorbing = FALSE if kind == "and" else TRUE
        if absorbing in flat:
            return absorbing
        neutral = TRUE if kind == "and" else FALSE
        flat.pop(neutral, None)
        if kind == "and":
            return self._conjunction(list(flat))
        if any(_is_atom(p) and self.negate(p) in flat for p in flat):
            return TRUE
        return next(iter(flat)) if len(flat) == 1 else Join(kind, tuple(flat))

    def negate(self, formula: Formula) -> Formula:
        """The negation, pushed to the literals."""
        if isinstance(formula, Test):
            return Test(formula.term, not formula.want)
        if isinstance(formula, Choice):
            return self.choose(formula.condition, self.negate(formula.x), self.negate(formula.y))
        if isinstance(formula, Join):
            kind: Literal["and", "or"] = "or" if formula.kind == "and" else "and"
            return self.join(kind, [self.negate(p) for p in formula.parts])
        if formula.kind == "ge":
            return self.compare("ge", formula.form.times(-1).shifted(-1), _MAX_SPLITS)
        return Compare("ne" if formula.kind == "eq" else "eq", formula.form)

    # --- equalities in a conjunction -------------------------------------------------------------

    def _conjunction(self, parts: list[Formula]) -> Formula:
        for i, part in enumerate(parts):
            for old, new in self._equalities(part):
                rewritten = [
                    p if j == i else self._rewrite(p, old, new) for j, p in enumerate(parts)
                ]
                if rewritten != parts:
                    return self.join("and", rewritten)
        for part in parts:
            if _is_atom(part) and self.negate(part) in parts:
                return FALSE
        return parts[0] if len(parts) == 1 else Join("and", tuple(parts))

    def _equalities(self, part: Formula) -> list[tuple[int, Form]]:
        """``x - y + c == 0`` as the substitutions y = x + c and x = y - c."""
        if not isinstance(part, Compare) or part.kind != "eq" or len(part.form.terms) != 2:
            return []
        (x, cx), (y, cy) = part.form.terms
        if cx != 1 or cy != -1:
            return []
        return [
            (y, Form(((x, 1),), part.form.const)),
            (x, Form(((y, 1),), -part.form.const)),
        ]

    def _rewrite(self, formula: Formula, old: int, new: Form) -> Formula:
        """`formula` with `old` replaced in the comparisons that have fewer terms then."""
        if isinstance(formula, Join):
            parts = tuple(self._rewrite(p, old, new) for p in formula.parts)
            return formula if parts == formula.parts else self.join(formula.kind, parts)
        if isinstance(formula, Choice):
            parts = (formula.condition, formula.x, formula.y)
            c, x, y = (self._rewrite(p, old, new) for p in parts)
            return formula if (c, x, y) == parts else self.choose(c, x, y)
        if isinstance(formula, Compare):
            form = self.terms.substitute(formula.form, old, new)
            if len(form.terms) < len(formula.form.terms):
                return self.compare(formula.kind, form)
        return formula


def _is_atom(formula: Formula) -> bool:
    return isinstance(formula, Compare | Test)
