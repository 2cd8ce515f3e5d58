"""The factor of a `key_mod` or `value_mod` that multiplies its row by one number.

Kernels of few rows read such rows where they are stored: (q . k) * factor is q . (k * factor), and
weight * factor belongs to the value. A quantised cache is read like any other then, at the cost of
one multiplication per score.
"""

from __future__ import annotations

from ..ir.ir import HOOK_INPUTS, Graph, GraphBuilder

SCALE_INPUTS = HOOK_INPUTS["key_mod"][1:]


def row_scale(graph: Graph | None) -> Graph | None:
    """The graph of the factor, of the inputs b, kv_h and kv_idx; None for hooks that do more.

    graph: of `key_mod` or `value_mod`, or None. Factors of several products are multiplied first,
    all in fp32.
    """
    if graph is None:
        return None
    factors: list[int] = []
    i, nodes = graph.output, graph.nodes
    of_row = _reads_row(graph)
    while nodes[i].op != "input":
        if nodes[i].op != "mul" or nodes[i].dtype != "float32":
            return None
        rows = [a for a in nodes[i].args if of_row[a]]
        others = [a for a in nodes[i].args if not of_row[a]]
        if len(rows) != 1 or nodes[rows[0]].shape != nodes[graph.output].shape:
            return None
        (factor,) = others
        if nodes[factor].op == "broadcast":
            (factor,) = nodes[factor].args
        if nodes[factor].shape:
            return None
        factors.append(factor)
        (i,) = rows
    if not factors:
        return None
    built = GraphBuilder(SCALE_INPUTS)
    names: list[int] = []
    for node in nodes:
        args = (names[a] for a in node.args)
        names.append(built.add(node.op, args, node.dtype, node.shape, **dict(node.attrs)))
    total, *rest = (names[f] for f in factors)
    for name in rest:
        total = built.add("mul", (total, name))
    return built.finish(total)


def _reads_row(graph: Graph) -> list[bool]:
    """Whether each node depends on the row."""
    reads: list[bool] = []
    for node in graph.nodes:
        own = node.op == "input" and node.attr("name") == "row"
        reads.append(own or any(reads[a] for a in node.args))
    return reads
