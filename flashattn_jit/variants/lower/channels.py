"""The numbers of a `key_mod` or `value_mod` that decodes its row by scales of channels, which a
block of keys shares: ``scale[c] * (value of the code - zero[c])``.

q . (scale * (code - zero)) is (q * scale) . code - (q * scale) . zero: kernels of few rows multiply
q by the scales of a block once, and read its keys where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.ir import HOOK_INPUTS, Graph, GraphBuilder, Node, TensorParam
from .expressions import TAG
from .row_numbers import functions_of, lookup_of, offset_of, reads_row


@dataclass(frozen=True, slots=True)
class ChannelNumbers:
    """Loads of the number of channel 0, as graphs of the inputs b, kv_h and kv_idx.

    zero: None where there are no zero points. codebook: the slot of the values of codes -8 to 7, or
    -1.
    """

    scale: Graph
    zero: Graph | None
    codebook: int


def channel_numbers(graph: Graph | None, tensors: Sequence[TensorParam]) -> ChannelNumbers | None:
    """The numbers of a graph of `key_mod` or `value_mod`; None for hooks that do more, and for
    numbers of single keys."""
    if graph is None or graph.result.op != "mul":
        return None
    nodes, of_row = graph.nodes, reads_row(graph)

    def split(node: Node) -> tuple[int, int] | None:
        """The row and the row of numbers that an operation joins."""
        rows = [a for a in node.args if of_row[a]]
        others = [a for a in node.args if not of_row[a]]
        if len(rows) != 1 or len(others) != 1 or nodes[others[0]].op != "gather":
            return None
        whole = nodes[others[0]].shape == node.shape == nodes[rows[0]].shape
        return (rows[0], others[0]) if whole and node.dtype == "float32" else None

    found = split(graph.result)
    if found is None:
        return None
    row, scale = found
    zero = None
    if nodes[row].op == "sub":
        found = split(nodes[row])
        if found is None or nodes[row].args[0] != found[0]:
            return None
        row, zero = found
    codebook = -1
    if nodes[row].op == "lookup":
        looked_up = lookup_of(graph, nodes[row], tensors)
        if looked_up is None:
            return None
        codebook, row = looked_up
    numbers = [scale] if zero is None else [scale, zero]
    dtypes = {tensors[nodes[i].int_attr("slot")].dtype for i in numbers}
    if nodes[row].op != "input" or len(dtypes) != 1 or not dtypes <= {"float32", *_HALVES}:
        return None
    if not all(_of_blocks(nodes, a) for i in numbers for a in nodes[i].args):
        return None
    return ChannelNumbers(
        _first(graph, scale), None if zero is None else _first(graph, zero), codebook
    )


_HALVES = ("float16", "bfloat16")


def _of_blocks(nodes: Sequence[Node], i: int) -> bool:
    """Whether an index is the same for all keys, or for adjacent ones: `kv_idx` is shifted."""
    node = nodes[i]
    if node.op == "input":
        return node.attr("name") != "kv_idx"
    return node.op == "shr" or all(_of_blocks(nodes, a) for a in node.args)


def _first(graph: Graph, row: int) -> Graph:
    """The first element of a row of a param, as a load."""
    built = GraphBuilder(HOOK_INPUTS["key_mod"][1:])
    names = built.add_all(graph.nodes[:row])
    load = graph.nodes[row]
    at = built.add("const", (), "int32", value=0)
    indices = (*(names[a] for a in load.args), at)
    return built.finish(built.add("gather", indices, load.dtype, (), slot=load.int_attr("slot")))


def lower_channels(name: str, found: ChannelNumbers, tensors: Sequence[TensorParam]) -> str:
    """``struct KeyNumbers`` or ``ValueNumbers``, for fajit/cpu/codes/channels.h."""
    graphs = [found.scale] if found.zero is None else [found.scale, found.zero]
    slots = [graph.result.int_attr("slot") for graph in graphs]
    dims = [tensors[slot].rank - 1 for slot in slots]
    lines = [
        f"  struct {name} {{",
        "    static constexpr int kGroups = 0, kCount = 0;",
        "    static constexpr bool kChannels = true;",
        f"    static constexpr bool kZeros = {'true' if len(graphs) == 2 else 'false'};",
        f"    static constexpr int kCodebook = {found.codebook};",
        f"    using Type = {TAG[tensors[slots[0]].dtype]};",
        f"    static constexpr int kTensors[] = {{{', '.join(map(str, slots))}}};",
        f"    static constexpr int kChannelDims[] = {{{', '.join(map(str, dims))}}};",
        *functions_of("vl", "offset", graphs, lambda graph: offset_of(graph, tensors)),
    ]
    return "\n".join([*lines, "  };"])
