"""Lowers `score_mod` and `mask_mod`: row parts, key parts, and what remains for each pair.

Every sub-expression has a level: uniform (params, b), row (also h, q_idx), key (also kv_idx) or
pair. Row parts are computed once per query row and tile, key parts once per key, and only what
depends on both once per pair. ALiBi on pairs is one subtraction, one conversion and one
multiply-add; a document mask is one comparison of two values that were read before.

Divisors of scores are inverted once per row or key. For CUDA, the host computes what depends on
scalar params alone (`Uniforms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import partial

from ..ir.ir import HOOK_INPUTS, REDUCTIONS, Graph, Node, TensorParam, VariantIR, rearranged
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
    """The statements of one hook. uniforms: for CUDA only. starts: names of the addresses or
    offsets at which gathered rows start, by node."""

    prefix: str
    tensors: Sequence[TensorParam]
    uniforms: Uniforms | None = None
    statements: dict[str, Statement] = field(default_factory=dict)
    inputs: dict[str, Level] = field(default_factory=dict)
    starts: dict[int, str] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def level_of(self, name: str) -> Level:
        """The level of a named value: an input, a literal or an earlier statement."""
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
        return name == "s" or (name in self.statements and self.statements[name].scored)

    def line(self, statement: Statement) -> str:
        """The C++ of a statement; a value that the host computes is read from `Uniforms`."""
        text = statement.text
        if self.uniforms is not None and statement.host:
            for s in _needed(self, [statement.name], through_host=True):
                self.uniforms.compute(s.name, s.text)
            text = self.uniforms.read(statement.name, statement.kind)
        return f"[[maybe_unused]] const auto {statement.name} = {text};"


def lower_graph(
    graph: Graph, tensors: Sequence[TensorParam], prefix: str, uniforms: Uniforms | None = None
) -> tuple[Block, str]:
    """All statements of a scalar hook, in order, and the name of its result."""
    block = Block(prefix, tensors, uniforms)
    values: list[list[str]] = []
    for number, node in enumerate(graph.nodes):
        values.append(_lower_node(block, graph, number, node, values))
    (result,) = values[graph.output]
    want = "bool" if graph.inputs == HOOK_INPUTS["mask_mod"] else "float32"
    if graph.result.dtype != want:
        text = f"ops::cast<{TAG[graph.result.dtype]}, {TAG[want]}>({result})"
        result = block.emit(text, [result], CPP_TYPE[want])
    return block, result


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
        return _lower_gather(block, number, node, [a[0] for a in args], length)
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
    if known and node.op in _DIVISIONS and node.dtype == "int32":
        divisor = block.emit(f"Divisor({names[1]})", names[1:], "Divisor")
        return node, [names[0], divisor]
    return node, names


_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")


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
    block: Block, number: int, node: Node, indices: list[str], length: int
) -> list[str]:
    """A load: one offset per dim, added level by level, so that rows and keys compute theirs once.

    For CUDA the offsets are added to a pointer: the last one, of 32 bits, is one multiply-add.
    """
    slot = node.int_attr("slot")
    param, cuda = block.tensors[slot], block.uniforms is not None
    sums: dict[Level, str] = {}
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
    names = [sums[level] for level in sorted(sums)]
    tag, tensor = TAG[param.dtype], f"c.tensor({slot})"
    if cuda:
        total = block.emit(f"ops::place<{tag}>({tensor})", ())
        for name in names:
            total = block.emit(f"ops::moved({total}, {name})", [total, name])
    else:
        total = names[0] if names else "INT64_C(0)"
        for name in names[1:]:
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


def straight_line(
    graph: Graph, tensors: Sequence[TensorParam], prefix: str, uniforms: Uniforms | None = None
) -> tuple[list[str], str]:
    """The lines of a scalar hook without levels, and the name of its result."""
    block, result = lower_graph(graph, tensors, prefix, uniforms)
    return [block.line(s) for s in _needed(block, [result])], result


# --- the row / key / pair split ----------------------------------------------------------------


def lower(variant: VariantIR, declare: str, uniforms: Uniforms | None) -> str:
    """`rows`, `keys`, `score` and `mask` of ``struct Hooks``, each declared with `declare`.

    uniforms: for CUDA, receives the values that the host computes.
    """
    score, mask = variant.hook("score_mod"), variant.hook("mask_mod")
    hooks: list[tuple[Block, str]] = []
    bodies = []
    for kind, graph, prefix in (("score", score, "s_"), ("mask", mask, "m_")):
        if graph is None:
            bodies.append(_absent(variant, kind, declare))
            continue
        block, result = lower_graph(graph, variant.tensors, prefix, uniforms)
        hooks.append((block, result))
        bodies.append(_pair_function(kind, block, result, declare))
    # C++ texts are called with plain indices, which are then fields of rows and keys.
    text = variant.cpp_hook("score_mod") is not None or variant.cpp_hook("mask_mod") is not None
    row_names = [n for block, result in hooks for n in _escaping(block, result, Level.ROW)]
    key_names = [n for block, result in hooks for n in _escaping(block, result, Level.KEY)]
    row_inputs = [n for n in ("h", "q_idx") if text or _pair_reads(hooks, n)]
    key_inputs = [n for n in ("kv_idx",) if text or _pair_reads(hooks, n)]
    if text or _pair_reads(hooks, "b"):
        row_inputs = ["b", *row_inputs]
    # On CPUs the lanes may hold rows of several requests, so that b may be a vector.
    vary, b = ("", "int32_t b") if uniforms is not None else ("class B, ", "B b")
    rows = _split_function(
        "rows", f"{vary}class H, class Q", f"{b}, H h, Q q_idx", "Row",
        hooks, Level.ROW, row_inputs + row_names, declare,
    )  # fmt: skip
    keys = _split_function(
        "keys", f"{vary}class K", f"{b}, int32_t kv_h, K kv_idx", "Key",
        hooks, Level.KEY, key_inputs + key_names, declare,
    )  # fmt: skip
    flags = []
    if uniforms is None:
        reads = "true" if any(_keys_read_b(block, r) for block, r in hooks) else "false"
        flags.append(
            "  // Whether `keys` depends on b: rows of several requests then have their own.\n"
            f"  static constexpr bool kKeysReadRequest = {reads};"
        )
        by_head = "true" if _mask_reads_head(variant) else "false"
        flags.append(
            "  // Whether `mask` depends on h: the heads of a token then visit other keys.\n"
            f"  static constexpr bool kMaskReadsHead = {by_head};"
        )
    return "\n\n".join([*flags, rows, keys, *bodies])


def _keys_read_b(block: Block, result: str) -> bool:
    roots = _escaping(block, result, Level.KEY)
    return any("b" in s.uses for s in _needed(block, roots))


def _mask_reads_head(variant: VariantIR) -> bool:
    graph = variant.hook("mask_mod")
    if graph is None:
        return variant.cpp_hook("mask_mod") is not None
    return any(n.op == "input" and n.attr("name") == "h" for n in graph.nodes)


def _needed(block: Block, roots: Sequence[str], through_host: bool = False) -> list[Statement]:
    """The statements that `roots` need, themselves included, in order.

    through_host: include what values that the host computes need.
    """
    wanted = set(roots)
    for name in reversed(list(block.statements)):
        if name in wanted and (through_host or not block.on_host(name)):
            wanted.update(block.statements[name].uses)
    return [s for s in block.statements.values() if s.name in wanted]


def _pair_uses(block: Block, result: str) -> set[str]:
    """Names that the pair part reads: operands of pair statements, and the result."""
    uses = {result}
    for statement in _needed(block, [result]):
        if statement.level == Level.PAIR:
            uses.update(statement.uses)
    return uses


def _escaping(block: Block, result: str, level: Level) -> list[str]:
    """Names of `level` that the pair part reads. Uniform ones are fields of the row, unless the
    host computes them."""
    levels = (Level.UNIFORM, Level.ROW) if level == Level.ROW else (Level.KEY,)
    uses = _pair_uses(block, result)
    return [
        s.name
        for s in block.statements.values()
        if s.name in uses and s.level in levels and not block.on_host(s.name)
    ]


def _pair_reads(hooks: Sequence[tuple[Block, str]], name: str) -> bool:
    return any(name in block.inputs and name in _pair_uses(block, r) for block, r in hooks)


def _split_function(
    function: str,
    template: str,
    arguments: str,
    struct: str,
    hooks: Sequence[tuple[Block, str]],
    level: Level,
    names: list[str],
    declare: str,
) -> str:
    listed = ", ".join(f"[[maybe_unused]] {a}" for a in arguments.split(", "))
    head = (
        f"  template <{template}>\n"
        f"  {declare} auto {function}([[maybe_unused]] const Context& c, {listed}) {{\n"
    )
    if not names:
        return f"  struct {struct} {{}};\n{head}    return {struct}{{}};\n  }}"
    lines = []
    for block, result in hooks:
        roots = _escaping(block, result, level)
        lines += [block.line(s) for s in _needed(block, roots)]
    types = ", ".join(f"class T_{n}" for n in names)
    fields = " ".join(f"T_{n} {n};" for n in names)
    body = "".join(f"    {line}\n" for line in lines)
    decls = ", ".join(f"ops::Value<decltype({n})>" for n in names)
    return (
        f"  template <{types}>\n  struct {struct} {{ {fields} }};\n{head}{body}"
        f"    return {struct}<{decls}>{{{', '.join(names)}}};\n  }}"
    )


_PAIR_HEAD = {
    "score": "  template <class S, class R, class K>\n  {} S score([[maybe_unused]] const Context& "
    "c, [[maybe_unused]] S s, [[maybe_unused]] const R& r, [[maybe_unused]] const K& k) {{",
    "mask": "  template <class R, class K>\n  {} auto mask([[maybe_unused]] const Context& c, "
    "[[maybe_unused]] const R& r, [[maybe_unused]] const K& k) {{",
}


def _absent(variant: VariantIR, kind: str, declare: str) -> str:
    """The pair function of an absent hook, or of one given as C++ text, called for each lane."""
    value = "s" if kind == "score" else "true"
    if variant.cpp_hook(f"{kind}_mod") is not None:
        types, names, values = ("float x, ", "x, ", "s, ") if kind == "score" else ("", "", "")
        value = (
            f"ops::each_lane([&]({types}int32_t b, int32_t h, int32_t q, int32_t kv) "
            f"{{ return {kind}_mod_text(c, {names}b, h, q, kv); }}, "
            f"{values}r.b, r.h, r.q_idx, k.kv_idx)"
        )
    return f"{_PAIR_HEAD[kind].format(declare)}\n    return {value};\n  }}"


def _pair_function(kind: str, block: Block, result: str, declare: str) -> str:
    """The pair part, which reads row and key values from `r` and `k`."""
    uses = _pair_uses(block, result)
    lines = []
    for name, level in block.inputs.items():
        if name in uses and name != "s":
            source = "k" if level == Level.KEY else "r"
            lines.append(f"const auto {name} = {source}.{name};")
    for statement in _needed(block, [result]):
        if statement.level == Level.PAIR or (
            statement.name in uses and block.on_host(statement.name)
        ):
            lines.append(block.line(statement))
        elif statement.name in uses:
            source = "k" if statement.level == Level.KEY else "r"
            lines.append(f"const auto {statement.name} = {source}.{statement.name};")
    value = f"ops::widen<S>({result})" if kind == "score" else result
    body = "".join(f"    {line}\n" for line in lines)
    return f"{_PAIR_HEAD[kind].format(declare)}\n{body}    return {value};\n  }}"
