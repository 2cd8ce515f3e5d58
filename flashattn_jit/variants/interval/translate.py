"""Translates each operation of the IR into the interval form.

`Translator` turns a mask's graph into terms and formulas (`terms`), where sums cancel and cases are
separate. Bit operations become arithmetic, which has exact interval rules: ``x & 127`` is
``x % 128``, ``x >> 3`` is ``x // 8``, and ``(bits >> j) & 1`` is the operation ``bit``. Short
vectors are unrolled before (`scalars_only`). The other operations become nodes; `select` gives the
function of ``fajit/interval/*.h`` that evaluates a node from the intervals of its arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..ir.ir import BUILTINS, INT_BITS, REDUCTIONS, Graph, GraphBuilder, Node, rearranged
from .terms import (
    FALSE,
    INT_RANGE,
    MAX_POSITION,
    TRUE,
    Choice,
    Form,
    Formula,
    Formulas,
    Join,
    Split,
    Terms,
    Test,
    size,
)

_COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")
_MAX_CONST = 2**62
_MAX_SLOT = 2**40
_MAX_LITERALS = 1024
_MAX_CHOICES = 48


class Translator:
    """Translates the nodes of `graph` on demand.

    guards: the range that each form must fit. Where a form leaves it, machine integers wrap and the
    translation is not valid.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.terms = Terms()
        for name in ("b", "h", "q_idx", "kv_idx"):  # in this order a distance is always q - k
            self.terms.input(name)
        self.formulas = Formulas(self.terms)
        self.guards: dict[Form, tuple[int, int]] = {}
        self._forms: dict[int, Form] = {}
        self._values: dict[int, int] = {}
        self._formulas: dict[int, Formula] = {}

    def mask(self) -> Formula:
        """The formula of the graph's result; a number counts as true where it is not zero."""
        return self._truth(self.graph.output)

    # --- booleans --------------------------------------------------------------------------------

    def formula(self, index: int) -> Formula:
        """The formula of the boolean scalar node `index`."""
        if index not in self._formulas:
            formula = self._formula(index)
            literals, choices = size(formula)
            if literals > _MAX_LITERALS or choices > _MAX_CHOICES:
                formula = self._whole(index)
            self._formulas[index] = formula
        return self._formulas[index]

    def _whole(self, index: int) -> Formula:
        """The node as one literal, which is evaluated operation by operation."""
        return Test(self._raw(self.graph.nodes[index]), True)

    def whole_mask(self) -> Formula:
        """The mask as one literal, for masks whose clauses would be too many."""
        node = self.graph.result
        if node.dtype == "bool" and node.args and not node.shape:
            return self._whole(self.graph.output)
        return self.mask()

    def _truth(self, index: int) -> Formula:
        node = self.graph.nodes[index]
        if node.shape:
            return Test(self._raw(node), True)
        if node.dtype == "bool":
            return self.formula(index)
        if node.dtype in INT_RANGE:
            return self.formulas.compare("ne", self.fitted(index))
        zero = self.terms.add("const", dtype=node.dtype, attrs=(("value", 0.0),))
        return Test(self.terms.add("ne", (self.value(index), zero), "bool"), True)

    def _formula(self, index: int) -> Formula:
        node, join = self.graph.nodes[index], self.formulas.join
        if node.shape:
            return Test(self._raw(node), True)
        if node.op == "const":
            return TRUE if node.attr("value") else FALSE
        if node.op == "cast":
            return self._truth(node.args[0])
        if node.op == "not":
            return self.formulas.negate(self.formula(node.args[0]))
        dtypes = {self.graph.nodes[a].dtype for a in node.args}
        shapes = {self.graph.nodes[a].shape for a in node.args}
        if node.op == "where" and shapes == {()}:
            condition, x, y = (self.formula(a) for a in node.args)
            return self.formulas.choose(condition, x, y)
        if dtypes == {"bool"} and shapes == {()} and len(node.args) == 2:
            a, b = (self.formula(x) for x in node.args)
            if node.op in ("and", "mul", "minimum"):
                return join("and", (a, b))
            if node.op in ("or", "add", "maximum"):
                return join("or", (a, b))
            if node.op in ("xor", "ne"):
                return self.formulas.choose(a, self.formulas.negate(b), b)
            if node.op == "eq":
                return self.formulas.choose(a, b, self.formulas.negate(b))
            if node.op in ("le", "gt"):  # a <= b: a implies b
                implied = join("or", (self.formulas.negate(a), b))
                return implied if node.op == "le" else self.formulas.negate(implied)
            if node.op in ("ge", "lt"):
                implied = join("or", (a, self.formulas.negate(b)))
                return implied if node.op == "ge" else self.formulas.negate(implied)
        if node.op in _COMPARISONS and dtypes <= set(INT_RANGE) and shapes == {()}:
            return self._compare(node)
        if node.op in ("isnan", "isinf") and dtypes <= set(INT_RANGE):
            return FALSE
        return Test(self._raw(node), True)

    def _compare(self, node: Node) -> Formula:
        x, y = (self.fitted(a) for a in node.args)
        difference = x.plus(y, -1)
        if max(abs(difference.const), *(abs(c) for _, c in difference.terms), 0) > _MAX_CONST:
            return Test(self._opaque(node), True)
        if node.op in ("eq", "ne"):
            return self.formulas.compare("eq" if node.op == "eq" else "ne", difference)
        if node.op in ("le", "lt"):
            difference = difference.times(-1)
        strict = node.op in ("gt", "lt")
        return self.formulas.compare("ge", difference.shifted(-1) if strict else difference)

    # --- integers --------------------------------------------------------------------------------

    def fitted(self, index: int) -> Form:
        """The integer node's value as the machine computes it, with a guard where it might wrap."""
        form, dtype = self.form(index), self.graph.nodes[index].dtype
        low, high = INT_RANGE[dtype]
        least, most = self.terms.range(form)
        if least < low or most > high:
            known = self.guards.get(form, (low, high))
            self.guards[form] = max(low, known[0]), min(high, known[1])
        return form

    def form(self, index: int) -> Form:
        """The integer (or boolean) node's value, modulo the range of its dtype."""
        if index not in self._forms:
            form = self._form(index)
            parts = [form.const, *(c for _, c in form.terms)]
            if max(map(abs, parts)) > _MAX_CONST:  # might overflow the 64-bit evaluation
                form = Form(((self._opaque(self.graph.nodes[index]), 1),))
            self._forms[index] = form
        return self._forms[index]

    def _opaque(self, node: Node) -> int:
        """A term that may be any value of the node's dtype."""
        return self.terms.add("top", dtype=node.dtype, shape=node.shape)

    def _form(self, index: int) -> Form:
        node = self.graph.nodes[index]
        if node.shape:
            return self._term(node)
        if node.dtype == "bool":
            return self._choice(self.formula(index), Form((), 1), Form((), 0))
        if node.op == "const":
            return Form((), int(node.attr("value")))  # type: ignore[arg-type]
        if node.op == "input":
            return Form(((self.terms.input(str(node.attr("name"))), 1),))
        if node.op == "cast":
            return self._cast(node)
        if node.op == "add":
            return self.form(node.args[0]).plus(self.form(node.args[1]))
        if node.op == "sub":
            return self.form(node.args[0]).plus(self.form(node.args[1]), -1)
        if node.op == "neg":
            return self.form(node.args[0]).times(-1)
        if node.op == "not":
            return self.form(node.args[0]).times(-1).shifted(-1)
        if node.op == "mul":
            return self._product(node)
        if node.op == "where" and self.graph.nodes[node.args[0]].shape == ():
            x, y = self.form(node.args[1]), self.form(node.args[2])
            return self._choice(self.formula(node.args[0]), x, y)
        if node.op in ("floor", "ceil", "round", "trunc"):
            return self.fitted(node.args[0])
        if node.op in ("abs", "minimum", "maximum"):
            return self._extreme(node)
        if node.op in ("floordiv", "truncdiv", "remainder", "fmod"):
            return self._quotient(node)
        if node.op in ("and", "shl", "shr"):
            return self._bits(node)
        return self._term(node)

    def _cast(self, node: Node) -> Form:
        (arg,) = node.args
        source = self.graph.nodes[arg].dtype
        if source not in INT_RANGE:
            return self._term(node)
        low, high = INT_RANGE[source]
        wide = INT_RANGE[node.dtype]
        # Narrowing commutes with wrapping; widening needs the value after wrapping.
        narrows = wide[1] <= high and wide[0] >= low
        return self.form(arg) if narrows else self.fitted(arg)

    def _choice(self, condition: Formula, x: Form, y: Form) -> Form:
        if condition in (TRUE, FALSE) or x == y:
            return x if condition == TRUE or x == y else y
        ranges = (*self.terms.range(x), *self.terms.range(y))
        nodes = (self._of_formula(condition), self.terms.of_form(x), self.terms.of_form(y))
        term = self.terms.add("where", nodes, "int64", bounds=(min(ranges), max(ranges)))
        self.formulas.splits[term] = Split(condition, x, y)
        return Form(((term, 1),))

    def _of_formula(self, formula: Formula) -> int:
        """A boolean node that evaluates `formula` part by part."""
        add = self.terms.add
        if isinstance(formula, Test):
            return formula.term if formula.want else add("not", (formula.term,), "bool")
        if formula in (TRUE, FALSE):
            return add("const", dtype="bool", attrs=(("value", formula == TRUE),))
        if isinstance(formula, Join):
            nodes = [self._of_formula(p) for p in formula.parts]
            total = nodes[0]
            for node in nodes[1:]:
                total = add(formula.kind, (total, node), "bool")
            return total
        if isinstance(formula, Choice):
            parts = (formula.condition, formula.x, formula.y)
            return add("where", [self._of_formula(p) for p in parts], "bool")
        value = self.terms.of_form(formula.form.shifted(-formula.form.const))
        bound = self.terms.of_form(Form((), -formula.form.const))
        return add(formula.kind, (value, bound), "bool")

    def _product(self, node: Node) -> Form:
        x, y = (self.form(a) for a in node.args)
        if y.is_const:
            return x.times(y.const)
        if x.is_const:
            return y.times(x.const)
        (a, b), (c, d) = self.terms.range(x), self.terms.range(y)
        corners = (a * c, a * d, b * c, b * d)
        args = (self.terms.of_form(x), self.terms.of_form(y))
        term = self.terms.add("mul", args, "int64", bounds=(min(corners), max(corners)))
        return Form(((term, 1),))

    def _extreme(self, node: Node) -> Form:
        forms = [self.fitted(a) for a in node.args]
        args = [self.terms.of_form(f) for f in forms]
        ranges = [self.terms.range(f) for f in forms]
        if node.op == "abs":
            ((low, high),) = ranges
            if low >= 0 or high <= 0:
                return forms[0].times(1 if low >= 0 else -1)
            term = self.terms.add("abs", args, "int64", bounds=(0, max(-low, high)))
            self.formulas.absolutes[term] = forms[0]
            return Form(((term, 1),))
        least = node.op == "minimum"
        (a, b), (c, d) = ranges
        if forms[0] == forms[1] or b <= c or d <= a:
            return forms[0] if (b <= c) == least or forms[0] == forms[1] else forms[1]
        bounds = (min(a, c), min(b, d)) if least else (max(a, c), max(b, d))
        return Form(((self.terms.add(node.op, sorted(args), "int64", bounds=bounds), 1),))

    def _quotient(self, node: Node) -> Form:
        x, y = (self.fitted(a) for a in node.args)
        op, low = node.op, self.terms.range(x)[0]
        if low >= 0 and self.terms.range(y)[0] > 0:
            op = {"truncdiv": "floordiv", "fmod": "remainder"}.get(op, op)
        if y.is_const and y.const > 0 and op in ("floordiv", "remainder"):
            return self._divided(op, x, y.const)
        bounds = None
        if op == "remainder" and self.terms.range(y)[0] > 0:
            bounds = (0, self.terms.range(y)[1] - 1)
        args = (self.terms.of_form(x), self.terms.of_form(y))
        return Form(((self.terms.add(op, args, node.dtype, bounds=bounds), 1),))

    def _divided(self, op: str, x: Form, divisor: int) -> Form:
        """``x // divisor`` or ``x % divisor``, with multiples of `divisor` taken out of it."""
        whole = tuple((t, c // divisor) for t, c in x.terms if c % divisor == 0)
        rest = Form(tuple((t, c) for t, c in x.terms if c % divisor), x.const % divisor)
        out = Form(whole, x.const // divisor) if op == "floordiv" else Form()
        low, high = self.terms.range(rest)
        if low // divisor == high // divisor:
            quotient = low // divisor
            return out.shifted(quotient) if op == "floordiv" else rest.shifted(-quotient * divisor)
        bounds = (low // divisor, high // divisor) if op == "floordiv" else (0, divisor - 1)
        args = (self.terms.of_form(rest), self.terms.of_form(Form((), divisor)))
        return out.plus(Form(((self.terms.add(op, args, "int64", bounds=bounds), 1),)))

    def _bits(self, node: Node) -> Form:
        x, y = (self.fitted(a) for a in node.args)
        if node.op == "and":
            if x.is_const:
                x, y = y, x
            if y.is_const and y.const == 1:
                bit = self._bit(x)
                if bit is not None:
                    return bit
            if y.is_const and y.const >= 0 and (y.const & (y.const + 1)) == 0:
                return self._divided("remainder", x, y.const + 1)
        elif y.is_const and 0 <= y.const < min(INT_BITS[node.dtype], 62):
            if node.op == "shl":
                return x.times(1 << y.const)
            return self._divided("floordiv", x, 1 << y.const)
        args = (self.terms.of_form(x), self.terms.of_form(y))
        return Form(((self.terms.add(node.op, args, node.dtype), 1),))

    def _bit(self, x: Form) -> Form | None:
        """``(bits >> j) & 1``, when `x` is such a shift."""
        if x.const or len(x.terms) != 1 or x.terms[0][1] != 1:
            return None
        node = self.terms.nodes[x.terms[0][0]]
        if node.op != "shr":
            return None
        return Form(((self.terms.add("bit", node.args, "int64", bounds=(0, 1)), 1),))

    # --- anything else ---------------------------------------------------------------------------

    def value(self, index: int) -> int:
        """A node that evaluates node `index` of the graph, whatever its dtype and shape."""
        if index not in self._values:
            node = self.graph.nodes[index]
            if node.dtype in INT_RANGE and node.dtype != "bool" and not node.shape:
                self._values[index] = self.terms.of_form(self.fitted(index))
            elif node.dtype == "bool" and not node.shape:
                self._values[index] = self._of_formula(self.formula(index))
            else:
                self._values[index] = self._raw(node)
        return self._values[index]

    def _term(self, node: Node) -> Form:
        return Form(((self._raw(node), 1),))

    def _raw(self, node: Node) -> int:
        bounds = {
            "searchsorted": (0, _MAX_SLOT),
            "q_len": (0, MAX_POSITION),
            "kv_len": (0, MAX_POSITION),
            "sign": (-1, 1),
            "iota": (0, _MAX_SLOT),
        }.get(node.op)
        args = [self.value(a) for a in node.args]
        return self.terms.add(node.op, args, node.dtype, node.shape, node.attrs, bounds)


# --- vectors --------------------------------------------------------------------------------------

_MAX_ELEMENTS = 64


def scalars_only(graph: Graph) -> Graph:
    """The same mask with its vectors unrolled to scalars.

    It is returned unchanged where there are none, where one is long, or where floats are summed,
    because the kernel chooses the order of that sum.
    """
    if not any(n.shape for n in graph.nodes) or any(_keeps_vector(graph, n) for n in graph.nodes):
        return graph
    builder = GraphBuilder(graph.inputs)
    parts: list[list[int]] = []
    for node in graph.nodes:
        parts.append(_elements(builder, node, [parts[a] for a in node.args]))
    return builder.finish(parts[graph.output][0])


def _keeps_vector(graph: Graph, node: Node) -> bool:
    if node.shape and node.shape[0] > _MAX_ELEMENTS:
        return True
    return node.op in ("sum", "prod") and node.dtype not in INT_RANGE


def _elements(builder: GraphBuilder, node: Node, args: list[list[int]]) -> list[int]:
    """The nodes of a value's elements; one for a scalar."""
    length, attrs = (node.shape[0] if node.shape else 1), dict(node.attrs)

    def add(*operands: int, op: str = node.op) -> int:
        return builder.add(op, operands, node.dtype, (), **attrs)

    if node.op == "iota":
        return [builder.add("const", dtype=node.dtype, value=i) for i in range(length)]
    if (moved := rearranged(node, args)) is not None:
        return moved
    if node.op in REDUCTIONS:
        total = args[0][0]
        for x in args[0][1:]:
            total = builder.add(REDUCTIONS[node.op], (total, x), node.dtype)
        return [total]
    if node.op == "gather" and node.shape:
        columns = [builder.add("const", dtype="int64", value=i) for i in range(length)]
        return [add(*(a[0] for a in args), i) for i in columns]
    return [add(*(a[i if len(a) > 1 else 0] for a in args)) for i in range(length)]


# --- interval functions ---------------------------------------------------------------------------

OWN = ("linear", "gather", "searchsorted", "bit")
"""Operations that are more than one call on the values of their arguments; see `statements`."""

_INT_WRAPS = {"add", "sub", "mul", "neg", "abs", "floordiv", "truncdiv", "remainder", "fmod", "shl",
              "shr", "and", "or", "xor"}  # fmt: skip
_INT_MAPS = _INT_WRAPS | {"minimum", "maximum", "sign"}
_REAL_MAPS = {
    "add", "sub", "mul", "div", "neg", "abs", "sign", "minimum", "maximum", "floor", "ceil",
    "round", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh",
    "tanh_approx", "sigmoid", "erf", "atan", "sinh", "floordiv", "remainder",
}  # fmt: skip
_LOGIC = {"and": "and", "or": "or", "xor": "xor", "ne": "xor", "mul": "and", "add": "or",
          "minimum": "and", "maximum": "or"}  # fmt: skip
_REARRANGED = ("cat", "interleave", "slice", "broadcast", "amax", "amin")


@dataclass(frozen=True, slots=True)
class Step:
    """Call `name` on the values of nodes `args`, then on the numbers `extra`.

    ``i_`` functions take integers, ``f_`` floats, ``t_`` conditions. A hull takes one value or
    more. wrap: the dtype's range; an integer result that leaves it becomes this range. negate: the
    condition is inverted afterwards.
    """

    name: str
    args: tuple[int, ...] = ()
    extra: tuple[int | float, ...] = ()
    wrap: tuple[int, int] | None = None
    negate: bool = False


def kind(dtype: str) -> str:
    """``t`` (condition), ``i`` (integer) or ``f`` (float)."""
    return "t" if dtype == "bool" else "i" if dtype in INT_RANGE else "f"


def single_precision(node: Node) -> int:
    """1 if results of the node are rounded to float32, else 0."""
    return int(node.dtype == "float32")


def select(nodes: tuple[Node, ...], term: int) -> Step:
    """The call that evaluates node `term`, which is none of `OWN`."""
    node = nodes[term]
    own = kind(node.dtype)
    if node.op in ("top", "input"):
        return _top(node)
    if node.op == "const":
        return Step("t_const" if own == "t" else f"{own}_point", extra=(_number(node),))
    if node.op == "scalar":
        return Step(f"{own}_scalar", extra=(node.int_attr("slot"),))
    if node.op == "iota":
        last = node.int_attr("length") - 1
        return Step("i_top", extra=(0, last)) if own == "i" else Step("f_range", extra=(0, last))
    if node.op in BUILTINS:
        return Step(f"i_{node.op}", node.args)
    arg = nodes[node.args[0]]
    if node.op in _REARRANGED:
        return Step(f"{own}_hull", node.args)
    if node.op == "where":
        return Step(f"{own}_where", node.args)
    if node.op == "cast":
        return _cast(node, kind(arg.dtype))
    if own == "t":
        return _condition(node, kind(arg.dtype))
    if own == "i":
        return _integer(node, arg)
    if node.op == "sum":
        return Step("f_sum", node.args, (arg.shape[0], single_precision(node)))
    if node.op in _REAL_MAPS:
        return Step(f"f_{node.op}", node.args, (single_precision(node),))
    return _top(node)


def _top(node: Node) -> Step:
    extra = INT_RANGE[node.dtype] if kind(node.dtype) == "i" else ()
    return Step(f"{kind(node.dtype)}_top", extra=extra)


def _number(node: Node) -> int | float:
    value = node.attr("value")
    assert isinstance(value, int | float)
    if kind(node.dtype) != "f":
        return int(value)
    return ctypes.c_float(value).value if single_precision(node) else float(value)


def _cast(node: Node, source: str) -> Step:
    own = kind(node.dtype)
    if source == own:
        if own == "i":
            return Step("i_hull", node.args, wrap=INT_RANGE[node.dtype])
        if own == "f":
            return Step("f_round_to", node.args, (single_precision(node),))
        return Step("t_hull", node.args)
    if own == "t":
        return Step(f"t_from_{source}", node.args)
    if own == "i":
        wrap = INT_RANGE[node.dtype]
        return Step(f"i_from_{source}", node.args, wrap if source == "f" else ())
    return Step(f"f_from_{source}", node.args, (single_precision(node),))


def _condition(node: Node, source: str) -> Step:
    if node.op == "not":
        return Step("t_hull", node.args, negate=True)
    if node.op in ("any", "all"):
        return Step(f"t_from_{source}", node.args)
    if source == "t" and (node.op in _LOGIC or node.op == "eq"):
        return Step(f"t_{_LOGIC.get(node.op, 'xor')}", node.args, negate=node.op == "eq")
    if node.op in _COMPARISONS and source != "t":
        return Step(f"{source}_{node.op}", node.args)
    if node.op in ("isnan", "isinf") and source == "f":
        return Step(f"f_{node.op}", node.args)
    return Step("t_top")


def _integer(node: Node, arg: Node) -> Step:
    own = INT_RANGE[node.dtype]
    if node.op == "sum" and kind(arg.dtype) == "i":
        return Step("i_scale", node.args, (arg.shape[0],), own)
    if node.op in _INT_MAPS and kind(arg.dtype) == "i":
        return Step(f"i_{node.op}", node.args, wrap=own if node.op in _INT_WRAPS else None)
    return _top(node)
