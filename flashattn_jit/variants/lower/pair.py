"""Lowers `score_mod` and `mask_mod`: row parts, key parts, and what remains for each pair.

Every sub-expression has a level: uniform (params, b), row (also h, q_idx), key (also kv_idx) or
pair. Row parts are computed once per query row and tile, key parts once per key, and only what
depends on both once per pair. ALiBi on pairs is one subtraction, one conversion and one
multiply-add; a document mask is one comparison of two values that were read before.

On CUDA a score_mod has its own unit, and part of it may be computed once per row and tile: see
`score.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.ir import VariantIR
from .block import Block, Level, lower_graph, needed
from .expressions import Uniforms
from .score import Score, lower_score

Hook = tuple[Block, tuple[str, ...]]
"""The statements of a hook, and the names of its results."""


def lower(variant: VariantIR, declare: str, uniforms: Uniforms | None) -> str:
    """`rows`, `keys`, `score` and `mask` of ``struct Hooks``, each declared with `declare`.

    uniforms: for CUDA, receives the values that the host computes.
    """
    score, mask = variant.hook("score_mod"), variant.hook("mask_mod")
    hooks: list[Hook] = []
    bodies = []
    has_line = False
    raw = uniforms is not None and score is not None and not variant.has("pointwise")
    for kind, graph, prefix in (("score", score, "s_"), ("mask", mask, "m_")):
        if graph is None:
            bodies.append(_absent(variant, kind, declare))
        elif kind == "score" and uniforms is not None and raw:
            parts = lower_score(graph, variant.tensors, prefix, uniforms)
            results = (parts.whole, parts.rest, parts.at_first, parts.slope, parts.exponent)
            has_line = bool(parts.at_first)
            hooks.append((parts.block, tuple(filter(None, results))))
            bodies += _score_functions(parts, declare)
        else:
            block, result = lower_graph(graph, variant.tensors, prefix, uniforms)
            hooks.append((block, (result,)))
            bodies.append(_pair_function(kind, block, [result], declare))
    # C++ texts are called with plain indices, which are then fields of rows and keys.
    text = variant.cpp_hook("score_mod") is not None or variant.cpp_hook("mask_mod") is not None
    row_names = [n for block, results in hooks for n in _escaping(block, results, Level.ROW)]
    key_names = [n for block, results in hooks for n in _escaping(block, results, Level.KEY)]
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
    if uniforms is not None:
        flags.append(f"  static constexpr bool kRaw = {str(raw).lower()};  // scores: see `Units`")
        flags.append(f"  static constexpr bool kLine = {str(has_line).lower()};")
    else:
        reads = "true" if any(_keys_read_b(block, r) for block, r in hooks) else "false"
        flags.append(
            "  // Whether `keys` depends on b: rows of several requests then have their own.\n"
            f"  static constexpr bool kKeysReadRequest = {reads};"
        )
        squares = "true" if any(block.squares for block, _ in hooks) else "false"
        flags.append(
            "  // Whether hooks read a param at rows and keys (cpu/hooks/pair_squares.h).\n"
            f"  static constexpr bool kPairSquares = {squares};"
        )
        by_head = "true" if _mask_reads_head(variant) else "false"
        flags.append(
            "  // Whether `mask` depends on h: the heads of a token then visit other keys.\n"
            f"  static constexpr bool kMaskReadsHead = {by_head};"
        )
    return "\n\n".join([*flags, rows, keys, *bodies])


def _keys_read_b(block: Block, results: Sequence[str]) -> bool:
    roots = _escaping(block, results, Level.KEY)
    return any("b" in s.uses for s in needed(block, roots))


def _mask_reads_head(variant: VariantIR) -> bool:
    graph = variant.hook("mask_mod")
    if graph is None:
        return variant.cpp_hook("mask_mod") is not None
    return any(n.op == "input" and n.attr("name") == "h" for n in graph.nodes)


def _pair_uses(block: Block, results: Sequence[str]) -> set[str]:
    """Names that the pair part reads: operands of pair statements, and the results."""
    uses = set(results)
    for statement in needed(block, results):
        if statement.level == Level.PAIR:
            uses.update(statement.uses)
    return uses


def _escaping(block: Block, results: Sequence[str], level: Level) -> list[str]:
    """Names of `level` that the pair part reads. Uniform ones are fields of the row, unless the
    host computes them."""
    levels = (Level.UNIFORM, Level.ROW) if level == Level.ROW else (Level.KEY,)
    uses = _pair_uses(block, results)
    return [
        s.name
        for s in block.statements.values()
        if s.name in uses and s.level in levels and not block.on_host(s.name)
    ]


def _pair_reads(hooks: Sequence[Hook], name: str) -> bool:
    return any(name in block.inputs and name in _pair_uses(block, r) for block, r in hooks)


def _split_function(
    function: str,
    template: str,
    arguments: str,
    struct: str,
    hooks: Sequence[Hook],
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
    for block, results in hooks:
        roots = _escaping(block, results, level)
        lines += [block.line(s) for s in needed(block, roots)]
    types = ", ".join(f"class T_{n}" for n in names)
    fields = " ".join(f"T_{n} {n};" for n in names)
    body = "".join(f"    {line}\n" for line in lines)
    decls = ", ".join(f"ops::Value<decltype({n})>" for n in names)
    return (
        f"  template <{types}>\n  struct {struct} {{ {fields} }};\n{head}{body}"
        f"    return {struct}<{decls}>{{{', '.join(names)}}};\n  }}"
    )


_SCORED = (
    "  template <class S, class R, class K>\n  {} S {}([[maybe_unused]] const Context& c, "
    "[[maybe_unused]] S s, [[maybe_unused]] const R& r, [[maybe_unused]] const K& k) {{"
)
_PAIR_HEAD = {
    "score": _SCORED,
    "rest": _SCORED,
    "exponent": _SCORED,
    "line": "  template <class R>\n  {} Line {}([[maybe_unused]] const Context& c, "
    "[[maybe_unused]] const R& r, [[maybe_unused]] int32_t kv_first) {{",
    "mask": "  template <class R, class K>\n  {} auto {}([[maybe_unused]] const Context& c, "
    "[[maybe_unused]] const R& r, [[maybe_unused]] const K& k) {{",
}


def _score_functions(parts: Score, declare: str) -> list[str]:
    """What CUDA kernels call for a score_mod; see `score.py`."""
    block = parts.block
    lines = [f"  {declare} float unit([[maybe_unused]] const Context& c) {{"]
    if parts.unit:
        lines.append(f"    {block.line(block.statements[parts.unit])}")
    lines.append(f"    return {parts.unit or '1.0f'};\n  }}")
    out = [
        "\n".join(lines),
        _pair_function("score", block, [parts.whole], declare),
    ]
    if parts.exponent:
        out.append(_pair_function("exponent", block, [parts.exponent], declare))
    if parts.at_first:
        small = block.statements.get(parts.small_cap)
        out += [
            f"  static constexpr bool kSlope = {str(bool(parts.slope)).lower()};\n"
            f"  static constexpr bool kSoftCap = {str(bool(parts.exponent)).lower()};\n"
            "  struct Line { float at_first, slope; };",
            _pair_function("rest", block, [parts.rest], declare),
            _pair_function("line", block, [parts.at_first, parts.slope or "0.0f"], declare),
            f"  {declare} bool is_line([[maybe_unused]] const Context& c, "
            "[[maybe_unused]] const Interval& k,\n"
            "                      [[maybe_unused]] const Interval& q) {\n"
            + (f"    {block.line(small)}\n" if small else "")
            + f"    return {parts.is_line()};\n  }}",
        ]
    return out


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
    return f"{_PAIR_HEAD[kind].format(declare, kind)}\n    return {value};\n  }}"


def _pair_function(kind: str, block: Block, results: Sequence[str], declare: str) -> str:
    """The pair part, which reads row and key values from `r` and `k`."""
    uses = _pair_uses(block, results)
    lines = []
    for name, level in block.inputs.items():
        if name in uses and name not in ("s", "kv_first"):
            source = "k" if level == Level.KEY else "r"
            lines.append(f"const auto {name} = {source}.{name};")
    for statement in needed(block, results):
        if statement.level == Level.PAIR or (
            statement.name in uses and block.on_host(statement.name)
        ):
            lines.append(block.line(statement))
        elif statement.name in uses:
            source = "k" if statement.level == Level.KEY else "r"
            lines.append(f"const auto {statement.name} = {source}.{statement.name};")
    value = ", ".join(results)
    if kind == "line":
        value = f"{{{value}}}"
    elif kind != "mask":
        value = f"ops::widen<S>({value})"
    body = "".join(f"    {line}\n" for line in lines)
    return f"{_PAIR_HEAD[kind].format(declare, kind)}\n{body}    return {value};\n  }}"
