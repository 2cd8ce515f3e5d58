"""Writes the short vectors of a mask out as scalars, so that the interval form sees each element.

``((edges[:-1] <= q) & (q < edges[1:])).any()`` becomes a disjunction of comparisons, which is
exact, where one interval for all elements would say nothing.
"""

from __future__ import annotations

from .bounds_terms import INT_RANGE
from .ir import Graph, GraphBuilder, Node

_REDUCE = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum", "any": "or",
           "all": "and"}  # fmt: skip
_MAX_ELEMENTS = 64


def scalars_only(graph: Graph) -> Graph:
    """The same mask without vectors.

    Returned as it is when it has none, when one is long, or when reals are summed: the order of
    that sum is the kernel's choice.
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
    if node.op == "slice":
        start, step = node.int_attr("start"), node.int_attr("step")
        return [args[0][start + step * i] for i in range(length)]
    if node.op == "cat":
        return [x for a in args for x in a]
    if node.op == "interleave":
        return [a[i] for i in range(len(args[0])) for a in args]
    if node.op == "broadcast":
        return [args[0][0]] * length
    if node.op in _REDUCE:
        total = args[0][0]
        for x in args[0][1:]:
            total = builder.add(_REDUCE[node.op], (total, x), node.dtype)
        return [total]
    if node.op == "gather" and node.shape:
        columns = [builder.add("const", dtype="int64", value=i) for i in range(length)]
        return [add(*(a[0] for a in args), i) for i in columns]
    return [add(*(a[i if len(a) > 1 else 0] for a in args)) for i in range(length)]
