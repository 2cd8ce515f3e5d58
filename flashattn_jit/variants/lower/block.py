"""The statements of a scalar hook, each with its level: what it depends on.

Divisors of scores are inverted once per row or key. For CUDA, the host computes what depends on
scalar params alone (`Uniforms`), and scores are multiplied late: a value that depends on the score,
times factors that the host knows, is a product that waits (`Block.times`). The host joins its
factors: `tanh(score / cap)` is one multiplication of q . k, by scale / cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import partial

from ..ir.ir import HOOK_INPUTS, INTEGER_DIVISIONS, REDUCTIONS, Graph, Node, TensorParam, rearranged
from .expressions import CPP_TYPE, TAG, UNROLLED, Loop, Uniforms, joined, literal, map_op, read_op


class Level(IntFlag):
    """The indices that a value depends on. ROW | KEY is PAIR."""

    UNIFORM = 0
    ROW = 1
    KEY = 2
    PAIR = 3


_INPUT_LEVEL = {
    "b": Level.UNIFORM,
    "h": Level.ROW,
    "kv_h": Level.KEY,
    "q_idx": Level.ROW,
    "kv_idx": Level.KEY,
    "score": Level.PAIR,
    "lse": Level.ROW,
}
_INPUT_NAME = {"score": "s"}
_NATURAL = ("b", "h", "kv_h", "kv_idx")  # inputs that are never negative


@dataclass
class Statement:
    """``const auto name = text;`` at a level, which reads the names `uses`.

    host: it depends on scalar params alone. scored: it depends on the score. kind: its C++ type.
    """

    name: str
    level: Level
    text: str
    uses: tuple[str, ...]
    host: bool
    scored: bool
    kind: str


@dataclass
class Block:
    """The statements of one hook. uniforms: for CUDA only. raw: for CUDA, ``s`` is the score
    before the scale, and products wait. starts: names of the addresses or offsets at which gathered
    rows start, by node. products: value and factor of the products that wait, by their names.
    squares: for CPUs, the texts of loads of a row and a key that are read by squares."""

    prefix: str
    tensors: Sequence[TensorParam]
    uniforms: Uniforms | None = None
    raw: bool = False
    statements: dict[str, Statement] = field(default_factory=dict)
    inputs: dict[str, Level] = field(default_factory=dict)
    starts: dict[int, str] = field(default_factory=dict)
    products: dict[str, tuple[str, str]] = field(default_factory=dict)
    positive: set[str] = field(default_factory=set)
    squares: list[str] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)

    def level_of(self, name: str) -> Level:
        """The level of a named value: an input, a literal or an earlier statement."""
        if name in self.products:
            return Level.PAIR
        if name in self.statements:
            return self.statements[name].level
        return self.inputs.get(name, Level.UNIFORM)

    def emit(self, text: str, uses: Sequence[str], kind: str = "", param: bool = False) -> str:
        """Add a statement for `text` (or find the equal one) and return its name.

        kind: its C++ type, where the host may compute it. param: it reads a scalar param.
        """
        if text in self._texts:
            return self._texts[text]
        level = Level.UNIFORM
        for use in uses:
            level |= self.level_of(use)
        name = f"{self.prefix}{len(self.statements)}"
        known = tuple(u for u in uses if u in self.statements or u in self.inputs)
        host = bool(kind) and (param or bool(known)) and all(map(self.on_host, known))
        scored = any(map(self.scored, known))
        self.statements[name] = Statement(name, level, text, known, host, scored, kind)
        self._texts[text] = name
        return name

    def on_host(self, name: str) -> bool:
        """Whether the host computes the value: for CUDA, if it depends on scalar params alone."""
        statement = self.statements.get(name)
        return self.uniforms is not None and statement is not None and statement.host

    def scored(self, name: str) -> bool:
        """Whether the value depends on the score."""
        if name == "s" or name in self.products:
            return True
        return name in self.statements and self.statements[name].scored

    def is_factor(self, name: str) -> bool:
        """Whether a value is a literal, or one that the host computes."""
        known = name in self.statements or name in self.inputs or name in self.products
        return self.on_host(name) or not known

    def times(self, name: str, factor: str, op: str = "mul", positive: bool = False) -> str:
        """The product of a value that depends on the score and a factor, which waits.

        op: `div` to divide by the factor. positive: whether the factor is known to be positive.
        """
        if name in self.products:
            name, other = self.products[name]
            positive = positive and other in self.positive
            factor = self.emit(f"ops::{op}({other}, {factor})", [other, factor], "float", True)
        elif op == "div":
            factor = self.emit(f"ops::div(1.0f, {factor})", [factor], "float", True)
        if positive:
            self.positive.add(factor)
        product = f"{name} x {factor}"
        self.products[product] = (name, factor)
        return product

    def value(self, name: str) -> str:
        """The name of a value: a product that waits is computed."""
        if name not in self.products:
            return name
        value, factor = self.products[name]
        return self.emit(f"ops::mul({value}, {factor})", [value, factor])

    def line(self, statement: Statement) -> str:
        """The C++ of a statement; a value that the host computes is read from `Uniforms`."""
        text = statement.text
        if self.uniforms is not None and statement.host:
            for s in needed(self, [statement.name], through_host=True):
                self.uniforms.compute(s.name, s.text)
            text = self.uniforms.read(statement.name, statement.kind)
        return f"[[maybe_unused]] const auto {statement.name} = {text};"


def lower_graph(
    graph: Graph, tensors: Sequence[TensorParam], prefix: str, uniforms: Uniforms | None = None
) -> tuple[Block, str]:
    """All statements of a scalar hook, in order, and the name of its result."""
    block = Block(prefix, tensors, uniforms)
    (result,) = lower_nodes(block, graph)[graph.output]
    want = "bool" if graph.inputs == HOOK_INPUTS["mask_mod"] else "float32"
    if graph.result.dtype != want:
        text = f"ops::cast<{TAG[graph.result.dtype]}, {TAG[want]}>({result})"
        result = block.emit(text, [result], CPP_TYPE[want])
    return block, result


def lower_nodes(block: Block, graph: Graph) -> list[list[str]]:
    """Adds the statements of all nodes, in order; the names of their components, one for a scalar,
    n for a vector of length n."""
    values: list[list[str]] = []
    computed: list[list[str]] = []  # products too
    for number, node in enumerate(graph.nodes):
        product = _product(block, graph, node, values) if block.raw else None
        names = [product] if product else _lower_node(block, graph, number, node, computed)
        values.append(names)
        computed.append([block.value(name) for name in names])
    return values


def _product(block: Block, graph: Graph, node: Node, values: Sequence[Sequence[str]]) -> str | None:
    """The name of a node that is a score times a factor, or the choice between that and -inf or
    inf; None for other nodes."""
    if node.dtype != "float32" or node.shape or any(graph.nodes[a].shape for a in node.args):
        return None
    names = [values[a][0] for a in node.args]
    constants = [_constant(graph.nodes[a]) for a in node.args]
    match node.op:
        case "input" if node.attr("name") == "score":
            block.inputs["s"] = Level.PAIR
            unit = block.emit("cuda::score_unit(c.args->scale)", [], "float", True)
            return block.times("s", unit, positive=True)
        case "neg" if block.scored(names[0]):
            return block.times(names[0], "-1.0f")
        case "mul" | "div":
            for x, y in ((0, 1), (1, 0))[: 2 if node.op == "mul" else 1]:
                if not block.scored(names[x]):
                    continue
                if block.is_factor(names[y]):
                    positive = 0 < (constants[y] or 0) < math.inf
                    return block.times(names[x], names[y], node.op, positive)
                if names[x] in block.products and not block.level_of(names[y]) & Level.KEY:
                    value, factor = block.products[names[x]]
                    text = f"ops::{node.op}({factor}, {names[y]})"
                    factor = block.emit(text, [factor, names[y]])
                    return block.emit(f"ops::mul({value}, {factor})", [value, factor])
        case "where":
            for x, y in ((1, 2), (2, 1)):
                value, factor = block.products.get(names[x], ("", ""))
                if factor in block.positive and constants[y] in (-math.inf, math.inf):
                    names[x] = value
                    text = f"ops::where({', '.join(names)})"
                    return block.times(block.emit(text, names), factor, positive=True)
    return None


def _constant(node: Node) -> float | None:
    """The value of a constant of dtype float32."""
    if node.op != "const" or node.dtype != "float32":
        return None
    return float(node.attr("value"))  # type: ignore[arg-type]


def _lower_node(
    block: Block, graph: Graph, number: int, node: Node, values: list[list[str]]
) -> list[str]:
    """The names of the node's components: one for a scalar, n for a vector."""
    length = node.shape[0] if node.shape else 1
    args = [values[a] for a in node.args]
    if node.op == "input":
        name = _INPUT_NAME.get(str(node.attr("name")), str(node.attr("name")))
        block.inputs[name] = _INPUT_LEVEL[str(node.attr("name"))]
        return [name]
    if node.op == "const":
        return [literal(node.attr("value"), node.dtype)] * length
    if node.op == "iota":
        return [literal(i, node.dtype) for i in range(length)]
    if node.op == "gather":
        goes_up = [_goes_up(graph, values, block, a) for a in node.args]
        return _lower_gather(block, number, node, [a[0] for a in args], goes_up, length)
    names = [a[0] for a in args]
    if text := read_op(node, names, block.tensors, block.uniforms):
        param = node.op == "scalar"
        return [block.emit(text, names, CPP_TYPE[node.dtype] if param else "", param)]
    if (moved := rearranged(node, args)) is not None:
        return moved
    if node.op in REDUCTIONS:
        return [_reduce(block, graph, node, values)]
    dtypes = [graph.nodes[a].dtype for a in node.args]
    out = []
    for i in range(length):
        names = [a[i] if len(a) > 1 else a[0] for a in args]
        cheap, names = _cheap_division(block, node, names)
        out.append(block.emit(map_op(cheap, names, dtypes), names, CPP_TYPE[node.dtype]))
    return out


def _cheap_division(block: Block, node: Node, names: list[str]) -> tuple[Node, list[str]]:
    """A cheaper operation and its operands for a division whose divisor is known before the pairs;
    other operations unchanged.

    Scores are multiplied by the reciprocal, which is at most 1 ulp off for divisors between 2^-126
    and 2^126. Integers are divided exactly, by multiplication with magic numbers, where the host
    computes the divisor.
    """
    if len(names) != 2:
        return node, names
    early, scored = block.level_of(names[1]) != Level.PAIR, block.scored(names[0])
    if early and scored and node.op == "div" and node.dtype == "float32":
        inverse = block.emit(f"ops::div(1.0f, {names[1]})", names[1:], "float")
        return replace(node, op="mul"), [names[0], inverse]
    known = block.on_host(names[1]) and not block.on_host(names[0])
    if known and node.op in INTEGER_DIVISIONS and node.dtype == "int32":
        divisor = block.emit(f"Divisor({names[1]})", names[1:], "Divisor")
        return node, [names[0], divisor]
    return node, names


def _reduce(block: Block, graph: Graph, node: Node, values: list[list[str]]) -> str:
    """A reduction: a loop where it is long, else unrolled."""
    names = values[node.args[0]]
    cuda = block.uniforms is not None
    if len(names) > UNROLLED["cuda" if cuda else "cpu"]:
        divide = partial(_cheap_division, block) if cuda else None
        loop = Loop(graph, block.tensors, values, block.starts, divide)
        if text := loop.fold(node):
            return block.emit(text, list(loop.uses))
    total = names[0]
    for name in names[1:]:
        total = block.emit(f"{joined(node)}({total}, {name})", [total, name])
    return total


def _lower_gather(
    block: Block, number: int, node: Node, indices: list[str], goes_up: list[bool], length: int
) -> list[str]:
    """A load: one offset per dim, added level by level, so that rows and keys compute theirs once.

    For CUDA the offsets are added to a pointer: the last one, of 32 bits, is one multiply-add.
    """
    slot = node.int_attr("slot")
    param, cuda = block.tensors[slot], block.uniforms is not None
    sums: dict[Level, str] = {}
    dims: dict[Level, list[int]] = {}
    for dim, index in enumerate(indices):
        if param.strides[dim] == "0":
            continue
        unit = "true" if param.strides[dim] == "1" else "false"
        if cuda and index in _NATURAL:
            unit += ", true"
        text = f"ops::offset<{unit}>(c.tensor({slot}), {dim}, {index})"
        name = block.emit(text, [index])
        level = block.level_of(name)
        if level in sums:
            name = block.emit(f"ops::add({sums[level]}, {name})", [sums[level], name])
        sums[level] = name
        dims.setdefault(level, []).append(dim)
    names = [sums[level] for level in sorted(sums)]
    tag, tensor = TAG[param.dtype], f"c.tensor({slot})"
    if cuda:
        total = block.emit(f"ops::place<{tag}>({tensor})", ())
        for name in names:
            total = block.emit(f"ops::moved({total}, {name})", [total, name])
    else:
        total = names[0] if names else "INT64_C(0)"
        for name in names[1:]:
            if name == names[-1] and not node.shape and _by_squares(param, dims, goes_up):
                return [_load_of_pair(block, tag, tensor, dims[Level.KEY][0], total, name)]
            total = block.emit(f"ops::add({total}, {name})", [total, name])
    load, uses = "read" if cuda else "load", [total]
    if not node.shape:
        return [block.emit(f"ops::{load}<{tag}>({tensor}, {total})", uses)]
    dim = param.rank - 1
    block.starts[number] = total
    return [
        block.emit(f"ops::{load}_at<{tag}>({tensor}, {total}, {dim}, {i})", uses)
        for i in range(length)
    ]


_MOST_SQUARES = 2
_SQUARE_DTYPES = ("float32", "int32", "float16", "bfloat16", "bool")
_GATHERED_DTYPES = ("float32", "int32")
"""Those that CPUs gather. A square for each key, as where keys are permuted or go down, takes 1.1
to 2.5 times as long as a gather (float32), but 0.6 to 0.9 of the time of 16 loads (bool)."""


def _by_squares(
    param: TensorParam, dims: Mapping[Level, Sequence[int]], goes_up: Sequence[bool]
) -> bool:
    """Whether a load at a row and a key has the keys adjacent: a bias or a mask of every pair.

    dims: the dims that each level indexes. goes_up: the dims whose index goes up with the keys.
    """
    keys = dims.get(Level.KEY, ())
    return (
        param.dtype in _SQUARE_DTYPES
        and set(dims) - {Level.UNIFORM} == {Level.ROW, Level.KEY}
        and [param.strides[d] for d in keys] == ["1"]
        and (goes_up[keys[0]] or param.dtype not in _GATHERED_DTYPES)
    )


def _goes_up(graph: Graph, values: list[list[str]], block: Block, number: int) -> bool:
    """Whether an index is `kv_idx`, or that plus what is the same for all keys."""
    node = graph.nodes[number]
    if node.op == "cast":
        return _goes_up(graph, values, block, node.args[0])
    if node.op not in ("add", "sub"):
        return values[number] == ["kv_idx"]
    first, second = node.args
    if node.op == "add" and block.level_of(values[first][0]) == Level.UNIFORM:
        first, second = second, first
    is_same = block.level_of(values[second][0]) == Level.UNIFORM
    return is_same and _goes_up(graph, values, block, first)


def _load_of_pair(block: Block, tag: str, tensor: str, dim: int, row: str, key: str) -> str:
    """A load whose offset is the sum of a row's and of a key's, which indexes `dim`."""
    text = f"{tensor}, {dim}, {row}, {key}"
    if text not in block.squares and len(block.squares) < _MOST_SQUARES:
        block.squares.append(text)
    if text not in block.squares:
        total = block.emit(f"ops::add({row}, {key})", [row, key])
        return block.emit(f"ops::load<{tag}>({tensor}, {total})", [total])
    # score_mod and mask_mod have squares of their own.
    slot = block.squares.index(text) + (_MOST_SQUARES if block.prefix == "m_" else 0)
    return block.emit(f"ops::load_pair<{tag}, {slot}>(c, {text})", [row, key])


def needed(block: Block, roots: Sequence[str], through_host: bool = False) -> list[Statement]:
    """The statements that `roots` need, themselves included, in order.

    through_host: include what values that the host computes need.
    """
    wanted = set(roots)
    for name in reversed(list(block.statements)):
        if name in wanted and (through_host or not block.on_host(name)):
            wanted.update(block.statements[name].uses)
    return [s for s in block.statements.values() if s.name in wanted]


def straight_line(
    graph: Graph, tensors: Sequence[TensorParam], prefix: str, uniforms: Uniforms | None = None
) -> tuple[list[str], str]:
    """The lines of a scalar hook without levels, and the name of its result."""
    block, result = lower_graph(graph, tensors, prefix, uniforms)
    return [block.line(s) for s in needed(block, [result])], result
