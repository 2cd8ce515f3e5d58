"""Lowers row hooks for CUDA: the lanes of a warp share one row, element i on lane i % 32.

The loops of `lower_row` become `ops::each_element`, unrolled, so that what a lane keeps between the
row's reads and its writes stays in registers. Reductions are joined over the lanes by shuffles.
Vectors that are read at other places than they are computed go through the warp's scratch, `temps`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Graph, Node, TensorParam
from .lower_expr import CPP_TYPE, TAG
from .lower_row import ARGUMENTS, RowLowering

_JOIN = {"sum": "Sum", "prod": "Product", "amax": "Greatest", "amin": "Least", "any": "Any",
         "all": "All"}  # fmt: skip
_SCRATCH_TYPE = {**CPP_TYPE, "bool": "int32_t"}


def lower(hook: str, graph: Graph, tensors: Sequence[TensorParam]) -> tuple[str, int]:
    """The C++ function of one row hook, and how many floats of `temps` it uses, a multiple of 4."""
    lowering = _WarpLowering(graph, tensors)
    lines = lowering.run()
    listed = ", ".join(f"[[maybe_unused]] {a}" for a in ARGUMENTS[hook].split(", "))
    head = (
        f"  template <class Row_>\n"
        f"  FAJIT_FN static void {hook}([[maybe_unused]] const Context& c, const Row_& row,\n"
        f"      [[maybe_unused]] float* temps, int lane, {listed}) {{\n"
    )
    text = head + "".join(f"    {line}\n" for line in lines) + "  }"
    return text, lowering.scratch + -lowering.scratch % 4


class _WarpLowering(RowLowering):
    def __init__(self, graph: Graph, tensors: Sequence[TensorParam]) -> None:
        super().__init__(graph, tensors)
        self.scratch = 0

    def _store(self, i: int, node: Node) -> None:
        kind = _SCRATCH_TYPE[node.dtype]
        words = 2 if node.dtype in ("int64", "float64") else 1
        self.scratch += self.scratch % words
        name = self.names[i] = f"t{i}"
        place = f"temps + {self.scratch}"
        text = place if kind == "float" else f"reinterpret_cast<{kind}*>({place})"
        self.lines.append(f"{kind}* const {name} = {text};")
        self.scratch += words * node.shape[0]
        for value, where, n in self._pieces(i, node, ""):
            self.lines.append(_each(n, f"{name}[{where}] = {value};"))
        self.lines.append("ops::sync_warp();")

    def _stored_text(self, i: int, place: str) -> str:
        text = super()._stored_text(i, place)
        return f"({text} != 0)" if self.graph.nodes[i].dtype == "bool" else text

    def _write(self, i: int, node: Node) -> None:
        cast = "" if node.dtype == "float32" else node.dtype
        if node.shape:
            pieces = list(self._pieces(i, node, cast))
        else:
            pieces = [(self._cast(self.names[i], cast), "i", self.length)]
        for number, (value, _, n) in enumerate(pieces):
            self.lines.append(f"float out{number}[ops::per_lane<{n}>];")
            self.lines.append(_each(n, f"out{number}[j] = {value};", "int j"))
        self.lines.append("ops::sync_warp();  // all of the row is read")
        for number, (_, where, n) in enumerate(pieces):
            self.lines.append(_each(n, f"row.write({where}, out{number}[j]);", "int j"))
        self.lines.append("ops::sync_warp();")

    def _reduction(self, node: Node) -> str:
        (source,) = node.args
        kind, n = CPP_TYPE[node.dtype], self.graph.nodes[source].shape[0]
        join = f"ops::{_JOIN[node.op]}"
        text = f"{join}::none<{kind}>()"
        for lo, hi in self._segments(source, n):
            value = self._element(source, 1, lo, lo)
            body = f"[&]([[maybe_unused]] int i) {{ return {value}; }}"
            text = f"ops::join_elements<{hi - lo}>(lane, {join}(), {text}, {body})"
        total = f"ops::join_lanes({text}, {join}())"
        return f"ops::wrap<{TAG[node.dtype]}>({total})" if _narrow(node.dtype) else total


def _narrow(dtype: str) -> bool:
    return dtype in ("uint8", "int8", "int16")


def _each(n: int, body: str, second: str = "int") -> str:
    return f"ops::each_element<{n}>(lane, [&]([[maybe_unused]] int i, {second}) {{ {body} }});"
