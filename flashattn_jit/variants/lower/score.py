"""What a CUDA kernel computes for a score_mod: parts of its result, in the unit that costs least.

Kernels see q . k before the scale. The result of the hook is

    unit * (rest + at_first + slope * column)

unit: a factor of the score that the host knows to be positive, like the scale, where the hook does
no more than add to the score: then the exponent of the softmax includes the unit, and what is added
is divided by it. Else 1.

In a full tile, whose keys are adjacent, a term like ALiBi's, `slopes[h] * (kv_idx - q_idx)`, is
linear in the key's column, its distance from the thread's first key of the tile. Its value at the
first key is computed once per row and tile and goes to the base of the softmax, so that a score
costs one multiply-add by a constant column. `|kv_idx - q_idx|` is linear where it has one sign.
Nothing but the sum reads the float that such a distance becomes: the term is rounded differently,
by about an ulp, and everything else is as written. Tiles where the distance leaves int32 or changes
its sign (`is_line`) are handled as partial ones, whose pairs compute the `whole` result.

Of a soft cap, `cap * tanh(s / cap)`, the sign goes to the function's operand, so that |cap| is part
of the unit too. If the cap is small, full tiles compute `tanh` with a small absolute error, by half
as many instructions (`fajit/cuda/hooks/soft_cap.h`), up to a constant that is a term of the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ir.ir import Graph, TensorParam
from .block import Block, Level, lower_nodes
from .expressions import TAG, Uniforms


@dataclass(frozen=True)
class Distance:
    """`key` * kv_idx + `query` * q_idx + `constant`, an int32 node; folded: its absolute value."""

    node: int
    key: int
    query: int
    constant: int
    folded: bool = False
    negative: bool = False


@dataclass(frozen=True)
class Score:
    """Names of the values of a score_mod. unit: "" for 1. rest and at_first: "" where full tiles
    compute the `whole` result; slope: "" where no term is linear, and distances are those of the
    terms that are. exponent: where full tiles compute a short `tanh`, its operand as an exponent of
    2; "" elsewhere. small_cap: whether they do."""

    block: Block
    whole: str
    unit: str = ""
    rest: str = ""
    at_first: str = ""
    slope: str = ""
    distances: tuple[Distance, ...] = ()
    exponent: str = ""
    small_cap: str = ""

    def is_line(self) -> str:
        """The C++ condition that all terms are linear over a tile's rows `q` and keys `k`."""
        lines = [
            f"cuda::is_line<{str(d.folded).lower()}>(k, q, {d.key}, {d.query}, {d.constant})"
            for d in dict.fromkeys(self.distances)
        ]
        return " && ".join([*filter(None, [self.small_cap]), *lines])


def lower_score(
    graph: Graph, tensors: Sequence[TensorParam], prefix: str, uniforms: Uniforms
) -> Score:
    """Lowers a score_mod whose result goes to a softmax."""
    block = Block(prefix, tensors, uniforms, raw=True)
    values = lower_nodes(block, graph)
    if graph.result.dtype != "float32":
        name = block.value(values[graph.output][0])
        text = f"ops::cast<{TAG[graph.result.dtype]}, dt::f32>({name})"
        return Score(block, block.emit(text, [name]))
    return _Terms(graph, block, values).score()


class _Terms:
    """The terms of a lowered score_mod; values: the names of its nodes."""

    def __init__(self, graph: Graph, block: Block, values: Sequence[Sequence[str]]) -> None:
        self._graph, self._block, self._values = graph, block, values
        self._unit = self._inverse = self._exponent = self._small_cap = ""

    def score(self) -> Score:
        terms = list(self._split(self._graph.output, False))
        scored = [t for t in terms if self._block.scored(self._values[t[0]][0])]
        if len(scored) != 1:
            terms = scored = [(self._graph.output, False)]
        rest = whole = self._scored(*scored[0])
        if self._unit:
            self._inverse = self._host(f"ops::div(1.0f, {self._unit})", [self._unit])
        at_first = slope = ""
        if self._exponent:
            rest, at_first = "s", "-0.5f"  # s: of `half_tanh`
        distances, of_rows = [], []
        for node, negative in terms:
            if (node, negative) == scored[0]:
                continue
            line = self._line(node)
            if line:
                factor, distance, cast = line
                value = self._value(cast)
                term = self._emit(f"ops::mul({factor}, {value})", [factor, value])
                whole = self._sum(whole, term, negative)
                first, step = self._at_first(factor, distance)
                at_first = self._sum(at_first, first, negative)
                slope = self._sum(slope, step, negative)
                distances.append(distance)
                continue
            term = self._in_units(node)
            whole = self._sum(whole, term, negative)
            if self._block.level_of(term) & Level.KEY:
                rest = self._sum(rest, term, negative)
            else:
                of_rows.append((term, negative))
        if not distances and not self._exponent:
            return Score(self._block, whole, self._unit)
        for term, negative in of_rows:
            at_first = self._sum(at_first, term, negative)
        return Score(
            self._block, whole, self._unit, rest, at_first, slope, tuple(distances),
            self._exponent, self._small_cap,
        )  # fmt: skip

    def _emit(self, text: str, uses: Sequence[str]) -> str:
        return self._block.emit(text, uses, "float")

    def _host(self, text: str, uses: Sequence[str]) -> str:
        return self._block.emit(text, uses, "float", True)

    def _value(self, node: int) -> str:
        return self._block.value(self._values[node][0])

    def _level(self, node: int) -> Level:
        return self._block.level_of(self._value(node))

    def _sum(self, total: str, term: str, negative: bool) -> str:
        if not total:
            return self._emit(f"ops::neg({term})", [term]) if negative else term
        op = "sub" if negative else "add"
        return self._emit(f"ops::{op}({total}, {term})", [total, term])

    def _split(self, i: int, negative: bool) -> Iterator[tuple[int, bool]]:
        """The terms of a sum, and whether each is subtracted.

        A sum without the score is one term, added up as it is written: its terms may be large and
        cancel.
        """
        node = self._graph.nodes[i]
        scored = self._block.scored(self._values[i][0])
        if scored and node.op in ("add", "sub") and node.dtype == "float32" and not node.shape:
            left, right = node.args
            yield from self._split(left, negative)
            yield from self._split(right, negative != (node.op == "sub"))
        else:
            yield i, negative

    def _scored(self, i: int, negative: bool) -> str:
        """The term with the score, in units, which it chooses."""
        block, name = self._block, self._values[i][0]
        if negative:
            name = block.times(name, "-1.0f")
        value, factor = block.products.get(name, (name, ""))
        capped = self._capped(i) if factor else None
        if capped is not None and value == self._values[capped][0]:
            return self._cap(capped, factor)
        if factor in block.positive:
            self._unit = self._host(f"cuda::result_unit({factor})", [factor])
            return value
        return block.value(name)

    def _capped(self, i: int) -> int | None:
        """The node of a `tanh` of the score of which node i is a multiple."""
        node = self._graph.nodes[i]
        while node.op in ("mul", "div", "neg"):
            i = next(a for a in node.args if self._block.scored(self._values[a][0]))
            node = self._graph.nodes[i]
        return i if node.op == "tanh" else None

    def _cap(self, i: int, cap: str) -> str:
        """cap * tanh(...) in units of 2 |cap|. The function is odd: the sign of the cap goes to its
        operand, which for `half_tanh` is an exponent of 2."""
        node = self._graph.nodes[i]
        operand = self._values[node.args[0]][0]
        value, by = self._block.products.get(operand, (operand, "1.0f"))
        by = self._host(f"ops::flipped({by}, as_int({cap}))", [by, cap])
        product = self._emit(f"ops::mul({value}, {by})", [value, by])
        tanh = self._emit(f"ops::tanh({product})", [product])
        self._unit = self._host(f"cuda::result_unit(ops::mul(2.0f, {cap}))", [cap])
        self._small_cap = self._block.emit(f"ops::is_small_cap({cap})", [cap], "bool", True)
        rate = self._host(f"ops::mul(ops::kTanhRate, {by})", [by])
        self._exponent = self._emit(f"ops::mul({value}, {rate})", [value, rate])
        return self._emit(f"ops::mul(0.5f, {tanh})", [tanh])

    def _in_units(self, i: int) -> str:
        """A term without the score, divided by the unit: by way of a factor that fewer pairs share,
        if it has one."""
        block, name, node = self._block, self._value(i), self._graph.nodes[i]
        if not self._inverse:
            return name
        if node.op == "mul":
            x, y = sorted(map(self._value, node.args), key=block.level_of)
            if block.level_of(x) < block.level_of(y):
                x = self._emit(f"ops::scaled({x}, {self._inverse})", [x, self._inverse])
                return self._emit(f"ops::mul({x}, {y})", [x, y])
        return self._emit(f"ops::mul({name}, {self._inverse})", [name, self._inverse])

    # --- linear terms ----------------------------------------------------------------------------

    def _line(self, i: int) -> tuple[str, Distance, int] | None:
        """A term that is linear in the key's position: its factor in units, its distance and the
        node that is the distance as a float."""
        factors: list[str] = []
        negative = False
        while True:
            node = self._graph.nodes[i]
            if node.shape or node.dtype != "float32":
                return None
            if node.op == "neg":
                negative = not negative
                i = node.args[0]
            elif node.op in ("mul", "div"):
                # The factor last, which a divisor is already.
                if node.op == "mul":
                    i, other = sorted(node.args, key=self._level, reverse=True)
                else:
                    i, other = node.args
                if self._level(other) & Level.KEY:
                    return None
                factor = self._value(other)
                if node.op == "div":
                    factor = self._emit(f"ops::div(1.0f, {factor})", [factor])
                factors.append(factor)
            else:
                break
        distance = self._distance(node.args[0]) if node.op == "cast" else None
        if distance is None:
            return None
        product = factors[0] if factors else "1.0f"
        for factor in factors[1:]:
            product = self._emit(f"ops::scaled({product}, {factor})", [product, factor])
        if negative:
            product = self._emit(f"ops::neg({product})", [product])
        if factors:
            product = self._emit(f"ops::slope({product})", [product])
        if self._inverse:
            product = self._emit(
                f"ops::scaled({product}, {self._inverse})", [product, self._inverse]
            )
        return product, distance, i

    def _at_first(self, factor: str, distance: Distance) -> tuple[str, str]:
        """The value of a linear term at the thread's first key of a tile, and its step from one key
        to the next."""
        emit, x, key = self._emit, self._first(distance.node), distance.key
        # An expression of `line`: rows keep `factor` alone.
        by = f"ops::neg({factor})" if distance.negative else factor
        if distance.folded:
            # |x| is x or -x over the whole tile; where x is 0 at the first key, by its next one.
            by = emit(f"ops::flipped({by}, {x if key > 0 else f'ops::sub({x}, 1)'})", [factor, x])
        value = emit(f"ops::mul({by}, ops::cast<dt::i32, dt::f32>({x}))", [factor, by, x])
        return value, emit(f"ops::mul({by}, {float(key)}f)", [factor, by, x])

    def _first(self, i: int) -> str:
        """A distance at the thread's first key."""
        node = self._graph.nodes[i]
        if node.op == "input" and node.attr("name") == "kv_idx":
            self._block.inputs["kv_first"] = Level.PAIR
            return "kv_first"
        if not self._block.level_of(self._value(i)) & Level.KEY:
            return self._value(i)
        names = [self._first(a) for a in node.args]
        return self._block.emit(f"ops::{node.op}({', '.join(names)})", names)

    def _distance(self, i: int) -> Distance | None:
        """An int32 node as a distance; None if it is none."""
        negative = False
        while self._graph.nodes[i].op == "neg" and self._affine(i) is None:
            negative = not negative
            (i,) = self._graph.nodes[i].args
        folded = self._graph.nodes[i].op == "abs"
        if folded:
            (i,) = self._graph.nodes[i].args
        found = self._affine(i)
        if found is None or found[0] == 0:
            return None
        return Distance(i, *found, folded, negative)

    def _affine(self, i: int) -> tuple[int, int, int] | None:
        """The factors of kv_idx and q_idx, and the constant, of an int32 node that has no more."""
        node = self._graph.nodes[i]
        if node.dtype != "int32" or node.shape:
            return None
        if node.op == "const":
            constant = node.attr("value")
            assert isinstance(constant, int)
            return 0, 0, constant
        if node.op == "input":
            name = node.attr("name")
            return {"kv_idx": (1, 0, 0), "q_idx": (0, 1, 0)}.get(str(name))
        parts = [self._affine(a) for a in node.args]
        if node.op not in ("add", "sub", "neg") or None in parts:
            return None
        first, *others = [p for p in parts if p is not None]
        sign = 1 if node.op == "add" else -1
        if node.op == "neg":
            return -first[0], -first[1], -first[2]
        (other,) = others
        a, b, c = (x + sign * y for x, y in zip(first, other, strict=True))
        return a, b, c
