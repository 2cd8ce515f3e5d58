"""The numbers of a `key_mod` or `value_mod` that decodes its row: ``scale * (value - zero)``.

Kernels of few rows read such rows where they are stored: (q . k) * scale is q . (k * scale), and
weight * scale belongs to the value. A quantised cache is read like any other then, at the cost of
one multiplication per score. Groups of channels may have numbers of their own, and the value may be
looked up in a codebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..ir.ir import HOOK_INPUTS, Graph, GraphBuilder, Node, TensorParam
from .block import lower_graph, needed, straight_line
from .expressions import TAG, Uniforms, arguments

_INPUTS = HOOK_INPUTS["key_mod"][1:]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Graphs of the inputs b, kv_h and kv_idx, one a group of channels.

    zeros: empty where there are none. codebook: the slot of the values of codes -8 to 7, or -1.
    """

    scales: tuple[Graph, ...]
    zeros: tuple[Graph, ...]
    codebook: int


def row_numbers(graph: Graph | None, tensors: Sequence[TensorParam]) -> RowNumbers | None:
    """The numbers of a graph of `key_mod` or `value_mod`; None for hooks that do more.

    Scales of several products are multiplied first, all in fp32.
    """
    if graph is None:
        return None
    nodes, of_row = graph.nodes, reads_row(graph)
    scales: list[list[int]] = []
    zeros: list[int] = []
    i, codebook = graph.output, -1
    while nodes[i].op != "input":
        node = nodes[i]
        if node.op == "lookup":
            found = lookup_of(graph, node, tensors)
            if found is None:
                return None
            codebook, i = found
            break
        rows = [a for a in node.args if of_row[a]]
        others = [a for a in node.args if not of_row[a]]
        if len(rows) != 1 or len(others) != 1 or nodes[rows[0]].shape != nodes[i].shape:
            return None
        numbers = _of_groups(graph, others[0])
        if numbers is None or node.dtype != "float32" or zeros:
            return None
        if node.op == "mul":
            scales.append(numbers)
        elif node.op == "sub" and node.args[0] == rows[0]:
            zeros = numbers
        else:
            return None
        (i,) = rows
    if not scales or nodes[i].op != "input":
        return None
    groups = max(len(x) for x in (*scales, zeros))
    if any(len(x) not in (1, groups) for x in (*scales, zeros) if x):
        return None
    wide = [x * groups if len(x) == 1 else x for x in scales]
    return RowNumbers(
        tuple(_product(graph, [x[g] for x in wide]) for g in range(groups)),
        tuple(_product(graph, [x]) for x in (zeros * groups if len(zeros) == 1 else zeros)),
        codebook,
    )


def lookup_of(graph: Graph, node: Node, tensors: Sequence[TensorParam]) -> tuple[int, int] | None:
    """The slot and the row of ``table[(row + 8).to(int32)]`` of a table of float32, else None."""
    nodes = graph.nodes
    if tensors[node.int_attr("slot")].dtype != "float32":
        return None
    index = nodes[node.args[-1]]
    added = nodes[index.args[0]] if index.op == "cast" and index.dtype == "int32" else index
    if len(node.args) != 1 or added.op != "add":
        return None
    row, eight = added.args
    if nodes[row].op != "input" or nodes[eight].op != "const" or nodes[eight].attr("value") != 8.0:
        return None
    return node.int_attr("slot"), row


def _of_groups(graph: Graph, i: int) -> list[int] | None:
    """The scalars of a vector that has one number a group of channels."""
    node = graph.nodes[i]
    if not node.shape:
        return [i]
    if node.op == "broadcast":
        return [node.args[0]]
    parts = [graph.nodes[a] for a in node.args]
    if node.op != "cat" or any(p.op != "broadcast" or p.shape != parts[0].shape for p in parts):
        return None
    return [p.args[0] for p in parts]


def _product(graph: Graph, factors: Sequence[int]) -> Graph:
    built = GraphBuilder(_INPUTS)
    names = built.add_all(graph.nodes)
    total, *rest = (_element(built, names[f]) for f in factors)
    for name in rest:
        total = built.add("mul", (total, name))
    return built.finish(total)


def _element(built: GraphBuilder, i: int) -> int:
    """An element of a row of a param as a load of its own."""
    node = built.nodes[i]
    cut = built.nodes[node.args[0]] if node.op == "sum" else node
    row = built.nodes[cut.args[0]] if cut.op == "slice" else cut
    if node.op != "sum" or cut.op != "slice" or row.op != "gather" or cut.shape != (1,):
        return i
    at = built.add("const", (), "int32", value=cut.int_attr("start"))
    return built.add("gather", (*row.args, at), row.dtype, (), slot=row.int_attr("slot"))


def reads_row(graph: Graph) -> list[bool]:
    """Whether each node depends on the row."""
    reads: list[bool] = []
    for node in graph.nodes:
        own = node.op == "input" and node.attr("name") == "row"
        reads.append(own or any(reads[a] for a in node.args))
    return reads


# --- C++ -----------------------------------------------------------------------------------------


def lower_numbers(
    name: str,
    found: RowNumbers | None,
    tensors: Sequence[TensorParam],
    uniforms: Uniforms | None = None,
) -> str:
    """``struct KeyNumbers`` or ``ValueNumbers``, for fajit/cpu/codes/numbers.h, or with the values
    that the host computes for fajit/cuda/tile/codes.h."""
    if found is None and uniforms is not None:
        return f"  using {name} = cuda::NoNumbers;"
    if found is None:
        return (
            f"  struct {name} {{\n    static constexpr int kGroups = 0, kCount = 0;\n"
            "    static constexpr bool kChannels = false;\n  };"
        )
    graphs = [*found.scales, *found.zeros]
    if uniforms is not None:
        return _cuda_numbers(name, found, graphs, tensors, uniforms)
    by_head = _adjacent(found.scales) and (not found.zeros or _adjacent(found.zeros))
    dtypes = {tensors[graph.result.int_attr("slot")].dtype for graph in graphs if by_head}
    by_head = by_head and len(dtypes) == 1
    lines = [
        f"  struct {name} {{",
        f"    static constexpr int kGroups = {len(found.scales)}, kCount = {len(graphs)};",
        "    static constexpr bool kChannels = false;",
        f"    static constexpr bool kZeros = {'true' if found.zeros else 'false'};",
        f"    static constexpr int kCodebook = {found.codebook};",
        f"    static constexpr bool kByHead = {'true' if by_head else 'false'};",
    ]
    if by_head:
        (dtype,) = dtypes
        slots = ", ".join(str(graph.result.int_attr("slot")) for graph in graphs)
        dims = ", ".join(str(dim) for dim in (_by_head(graph) for graph in graphs))
        lines += [
            f"    using Type = {TAG[dtype]};",
            f"    static constexpr int kTensors[] = {{{slots}}}, kHeadDims[] = {{{dims}}};",
            *functions_of("vl", "offset", graphs, lambda g: offset_of(g, tensors)),
        ]
    lines += functions_of("vf", "number", graphs, lambda g: _number(g, tensors))
    return "\n".join([*lines, "  };"])


def _cuda_numbers(
    name: str,
    found: RowNumbers,
    graphs: Sequence[Graph],
    tensors: Sequence[TensorParam],
    uniforms: Uniforms,
) -> str:
    lines = [
        f"  struct {name} {{",
        f"    static constexpr int kGroups = {len(found.scales)}, kCount = {len(graphs)};",
        f"    static constexpr bool kZeros = {'true' if found.zeros else 'false'};",
        f"    static constexpr int kCodebook = {found.codebook};",
        "    template <int i>",
        "    FAJIT_FN static float number([[maybe_unused]] const Context& c, "
        f"{arguments('key_mod')}) {{",
    ]
    lines += _cases(
        straight_line(graph, tensors, f"{name[0].lower()}n{i}_", uniforms)
        for i, graph in enumerate(graphs)
    )
    return "\n".join([*lines, "    }\n  };"])


def _adjacent(graphs: Sequence[Graph]) -> bool:
    """Whether numbers of groups are loads that differ in the last index alone, 0, 1, 2, ..., which
    follows that of the head; or one load that uses the head."""
    first = graphs[0]
    dim = _by_head(first)
    if not dim or len(graphs) == 1:
        return bool(dim)
    wanted = [_but_last(graph) for graph in graphs]
    return dim == len(first.result.args) - 2 and all(
        own == (*wanted[0][:-1], i) for i, own in enumerate(wanted)
    )


def _but_last(graph: Graph) -> tuple[object, ...]:
    """All of a load but its last index, and that index; -1 unless it is a constant."""
    nodes, load = graph.nodes, graph.result
    if load.op != "gather" or not load.args:
        return (load, -1)
    last = nodes[load.args[-1]]
    seen = tuple(_tree(nodes, a) for a in load.args[:-1])
    return load.attrs, seen, last.attr("value") if last.op == "const" else -1


def _tree(nodes: Sequence[Node], i: int) -> object:
    node = nodes[i]
    return node.op, node.dtype, node.attrs, tuple(_tree(nodes, a) for a in node.args)


def _by_head(graph: Graph) -> int:
    """The dim that kv_h indexes, where a graph is a load that uses it nowhere else; else 0, as the
    first dim counts slots or requests."""
    node, nodes = graph.result, graph.nodes
    if node.op != "gather" or node.shape:
        return 0
    own = [d for d, a in enumerate(node.args) if _is_head(nodes[a])]
    rest = (a for d, a in enumerate(node.args) if d not in own)
    return own[0] if len(own) == 1 and not any(_uses_head(nodes, a) for a in rest) else 0


def _is_head(node: Node) -> bool:
    return node.op == "input" and node.attr("name") == "kv_h"


def _uses_head(nodes: Sequence[Node], i: int) -> bool:
    return _is_head(nodes[i]) or any(_uses_head(nodes, a) for a in nodes[i].args)


def functions_of(
    result: str, name: str, graphs: Sequence[Graph], body: Callable[[Graph], tuple[list[str], str]]
) -> list[str]:
    """``template <int i> static result name(c, b, kv_h, kv_idx)`` of the numbers."""
    lines = [
        "    template <int i>",
        f"    static FAJIT_INLINE {result} {name}([[maybe_unused]] const Context& c, "
        "[[maybe_unused]] int32_t b, [[maybe_unused]] int32_t kv_h, [[maybe_unused]] vi kv_idx) {",
    ]
    return [*lines, *_cases(map(body, graphs)), "    }"]


def _cases(bodies: Iterable[tuple[list[str], str]]) -> Iterator[str]:
    """``if constexpr (i == 0) { ... }`` and so on, of statements and the value that they return."""
    for i, (own, value) in enumerate(bodies):
        yield f"      if constexpr (i == {i}) {{"
        yield from (f"        {line}" for line in own)
        yield f"        return {value};\n      }}"


def _number(graph: Graph, tensors: Sequence[TensorParam]) -> tuple[list[str], str]:
    lines, value = straight_line(graph, tensors, "n_")
    return lines, f"ops::widen<vf>({value})"


def offset_of(graph: Graph, tensors: Sequence[TensorParam]) -> tuple[list[str], str]:
    """The statements of the offset at which a load reads."""
    block, load = lower_graph(graph, tensors, "n_")
    uses = block.statements[load].uses
    offset = uses[0] if uses else "INT64_C(0)"
    return [block.line(s) for s in needed(block, [offset])], f"ops::widen<vl>({offset})"
