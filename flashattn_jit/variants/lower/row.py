"""Lowers row hooks (`query_mod`, `key_mod`, `value_mod`, `output_mod`) to loops over one row.

Slices, concatenations and flips need no code: they become index arithmetic in the loops that read
them, and a loop is split where a concatenation changes its source. NeoX RoPE becomes two loops of
head_dim / 2 without temporaries.

On CUDA the lanes of a warp share one row, element i on lane i % 32. The loops become
`ops::each_element`, unrolled, so that values between the reads and the writes of the row stay in
registers. Shuffles reduce over the lanes. Vectors that are read at other indices than they are
computed at are stored in the warp's scratch, `temps`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from ..ir.ir import REDUCTIONS, Graph, Node, TensorParam
from .expressions import (
    CPP_TYPE,
    NARROW,
    TAG,
    Uniforms,
    arguments,
    joined,
    literal,
    map_op,
    read_op,
)


def lower(hook: str, graph: Graph, tensors: Sequence[TensorParam]) -> str:
    """The C++ function of one row hook: from ``row`` to ``out``, both fp32, not aliased."""
    lines = RowLowering(graph, tensors).run()
    head = (
        f"  static void {hook}([[maybe_unused]] const Context& c, "
        f"[[maybe_unused]] const float* __restrict row, float* __restrict out,\n"
        f"      {arguments(hook)}) {{\n"
    )
    return head + "".join(f"    {line}\n" for line in lines) + "  }"


def _row_length(graph: Graph) -> int:
    """The length of the row: of the result, else of the input, else of any vector."""
    row = [n for n in graph.nodes if n.op == "input" and n.attr("name") == "row"]
    for node in (graph.result, *row, *graph.nodes):
        if node.shape:
            return node.shape[0]
    return 0


class RowLowering:
    """Statements of one row hook, with one loop per segment."""

    def __init__(
        self, graph: Graph, tensors: Sequence[TensorParam], uniforms: Uniforms | None = None
    ) -> None:
        self.graph, self.tensors, self.uniforms = graph, tensors, uniforms
        self.length = _row_length(graph)
        self.lines: list[str] = []
        self.names: dict[int, str] = {}  # scalar temporaries and materialised vectors
        self.uses = Counter(a for n in graph.nodes for a in n.args)

    def run(self) -> list[str]:
        for i, node in enumerate(self.graph.nodes):
            if i == self.graph.output and node.shape:
                continue
            if not node.shape:
                self._scalar(i, node)
            elif self._materialised(i, node):
                self._store(i, node)
        self._write(self.graph.output, self.graph.result)
        return self.lines

    def _store(self, i: int, node: Node) -> None:
        """Materialise vector i."""
        name = self.names[i] = f"t{i}"
        self.lines.append(f"alignas(64) {CPP_TYPE[node.dtype]} {name}[{node.shape[0]}];")
        self._fill(i, name, "")

    def _write(self, i: int, node: Node) -> None:
        """The hook's result to `out`."""
        cast = "" if node.dtype == "float32" else node.dtype
        if node.shape:
            self._fill(i, "out", cast)
        else:
            value = self._cast(self.names[i], cast)
            self.lines.append(_loop(self.length, f"out[i] = {value};"))

    # --- scalars -----------------------------------------------------------------------------

    def _scalar(self, i: int, node: Node) -> None:
        if node.op == "input":
            self.names[i] = str(node.attr("name"))
            return
        if node.op == "const":
            self.names[i] = literal(node.attr("value"), node.dtype)
            return
        if node.op in REDUCTIONS:
            text = self._reduction(node)
        elif node.op == "gather":
            text = self._load(node, self._offset(node))
        else:
            names = [self.names[a] for a in node.args]
            dtypes = [self.graph.nodes[a].dtype for a in node.args]
            read = read_op(node, names, self.tensors, self.uniforms)
            text = read or map_op(node, names, dtypes)
        self.names[i] = f"t{i}"
        self.lines.append(f"const auto t{i} = {text};")

    def _offset(self, node: Node, last: str = "") -> str:
        """The offset of an element. last: the last index, where it is no scalar."""
        slot = node.int_attr("slot")
        strides = self.tensors[slot].strides
        indices = [self.names[a] for a in (node.args[:-1] if last else node.args)]
        terms = [
            f"ops::offset<{'true' if strides[d] == '1' else 'false'}>"
            f"(c.tensor({slot}), {d}, {index})"
            for d, index in enumerate([*indices, last] if last else indices)
            if strides[d] != "0"
        ]
        return " + ".join(terms) or "INT64_C(0)"

    def _load(self, node: Node, offset: str) -> str:
        slot = node.int_attr("slot")
        return f"ops::load<{TAG[self.tensors[slot].dtype]}>(c.tensor({slot}), {offset})"

    def _reduction(self, node: Node) -> str:
        (source,) = node.args
        kind, n = CPP_TYPE[node.dtype], self.graph.nodes[source].shape[0]
        parts = []
        for lo, hi in self._segments(source, n):
            value = self._element(source, 1, lo, lo)
            body = f"[&](int i) {{ return {kind}({value}); }}"
            parts.append(f"ops::reduce_{node.op}<{kind}, {hi - lo}>({body})")
        text = parts[0]
        for part in parts[1:]:
            text = f"{joined(node)}({text}, {part})"
        return text

    # --- vectors -----------------------------------------------------------------------------

    def _materialised(self, i: int, node: Node) -> bool:
        """Whether vector i is stored: interleaving has no index form, and arithmetic that is used
        twice would be computed twice. A gather is not, but its base offset is."""
        if node.op == "gather":
            slot = node.int_attr("slot")
            self.names[i] = f"p{i}"
            self.lines.append(f"const int64_t p{i} = {self._offset(node)};")
            if self.tensors[slot].strides[-1] != "1":
                last = self.tensors[slot].rank - 1
                self.lines.append(f"const int64_t n{i} = c.tensor({slot}).strides[{last}];")
            return False
        if node.op in ("input", "const", "iota", "slice", "broadcast"):
            return False
        if node.op == "cat":  # of computed parts: the stages of a Hadamard transform
            computed = any(self.graph.nodes[a].op in ("add", "sub") for a in node.args)
            return computed and self.uses[i] > 1
        return node.op == "interleave" or self.uses[i] > 1

    def _fill(self, i: int, name: str, cast: str) -> None:
        for value, index, n in self._pieces(i, self.graph.nodes[i], cast):
            self.lines.append(_loop(n, f"{name}[{index}] = {value};"))

    def _pieces(self, i: int, node: Node, cast: str) -> Iterator[tuple[str, str, int]]:
        """The loops that compute vector i: the element, its index, the number of iterations."""
        if node.op == "interleave":
            n = len(node.args)
            for j, arg in enumerate(node.args):
                for lo, hi in self._segments(arg, self.graph.nodes[arg].shape[0]):
                    value = self._cast(self._element(arg, 1, lo, lo), cast)
                    yield value, _index(n, n * lo + j), hi - lo
            return
        for lo, hi in self._segments(i, node.shape[0], root=True):
            value = self._cast(self._element(i, 1, lo, lo, root=True), cast)
            yield value, _index(1, lo), hi - lo

    def _cast(self, value: str, dtype: str) -> str:
        return f"ops::cast<{TAG[dtype]}, dt::f32>({value})" if dtype else value

    def _stored(self, i: int, root: bool) -> bool:
        node = self.graph.nodes[i]
        return not root and i in self.names and node.op != "gather"

    def _stored_text(self, i: int, index: str) -> str:
        return f"{self.names[i]}[{index}]"

    def _segments(self, i: int, length: int, root: bool = False) -> list[tuple[int, int]]:
        cuts = sorted({0, length, *(c for c in self._cuts(i, root) if 0 < c < length)})
        return list(itertools.pairwise(cuts))

    def _cuts(self, i: int, root: bool = False) -> set[int]:
        """Positions at which the element's expression changes its form."""
        node = self.graph.nodes[i]
        if self._stored(i, root) or not node.shape:
            return set()
        if node.op == "cat":
            cuts, offset = set(), 0
            for a in node.args:
                cuts |= {offset} | {offset + c for c in self._cuts(a)}
                offset += self.graph.nodes[a].shape[0]
            return cuts
        if node.op == "slice":
            start, step = node.int_attr("start"), node.int_attr("step")
            if step > 0:
                return {-((start - c) // step) for c in self._cuts(node.args[0])}
            return {(start - c) // -step + 1 for c in self._cuts(node.args[0])}
        return set().union(*(self._cuts(a) for a in node.args))

    def _element(self, i: int, mul: int, add: int, at: int, root: bool = False) -> str:
        """Element ``mul * i + add`` of node i, where ``at`` is that index for loop index 0."""
        node = self.graph.nodes[i]
        index = _index(mul, add)
        if not node.shape:
            return self.names[i]
        if self._stored(i, root):
            return self._stored_text(i, index)
        if node.op == "input":
            return f"row[{index}]"
        if node.op == "const":
            return literal(node.attr("value"), node.dtype)
        if node.op == "iota":
            return f"{CPP_TYPE[node.dtype]}({index})"
        if node.op == "gather":
            unit = self.tensors[node.int_attr("slot")].strides[-1] == "1"
            return self._load(node, f"p{i} + {index if unit else f'({index}) * n{i}'}")
        if node.op == "lookup":
            where = self._element(node.args[-1], mul, add, at)
            return self._load(node, self._offset(node, where))
        if node.op == "broadcast":
            return self.names[node.args[0]]
        if node.op == "slice":
            start, step = node.int_attr("start"), node.int_attr("step")
            return self._element(node.args[0], mul * step, add * step + start, at * step + start)
        if node.op == "cat":
            first = 0
            for a in node.args:
                n = self.graph.nodes[a].shape[0]
                if first <= at < first + n:
                    return self._element(a, mul, add - first, at - first)
                first += n
            raise AssertionError("element outside of the concatenation")
        dtypes = [self.graph.nodes[a].dtype for a in node.args]
        return map_op(node, [self._element(a, mul, add, at) for a in node.args], dtypes)


def _index(mul: int, add: int) -> str:
    term = "i" if mul == 1 else f"{mul} * i"
    if add == 0:
        return term
    return f"{term} {'+' if add > 0 else '-'} {abs(add)}"


def _loop(length: int, body: str) -> str:
    return f"for (int i = 0; i < {length}; ++i) {body}"


# --- on CUDA: the loops, distributed over a warp -------------------------------------------------

_LANE_JOIN = {"sum": "Sum", "prod": "Product", "amax": "Greatest", "amin": "Least", "any": "Any",
              "all": "All"}  # fmt: skip
_SCRATCH_TYPE = {**CPP_TYPE, "bool": "int32_t"}


def lower_cuda(
    hook: str, graph: Graph, tensors: Sequence[TensorParam], uniforms: Uniforms
) -> tuple[str, int]:
    """The C++ function of one row hook, and the floats of `temps` that it uses, a multiple of 4."""
    lowering = _WarpLowering(graph, tensors, uniforms)
    lines = lowering.run()
    head = (
        f"  template <class Row_>\n"
        f"  FAJIT_FN static void {hook}([[maybe_unused]] const Context& c, const Row_& row,\n"
        f"      [[maybe_unused]] float* temps, int lane, {arguments(hook)}) {{\n"
    )
    text = head + "".join(f"    {line}\n" for line in lines) + "  }"
    return text, lowering.scratch + -lowering.scratch % 4


class _WarpLowering(RowLowering):
    def __init__(self, graph: Graph, tensors: Sequence[TensorParam], uniforms: Uniforms) -> None:
        super().__init__(graph, tensors, uniforms)
        self.scratch = 0

    def _store(self, i: int, node: Node) -> None:
        kind = _SCRATCH_TYPE[node.dtype]
        words = 2 if node.dtype in ("int64", "float64") else 1
        self.scratch += self.scratch % words
        name = self.names[i] = f"t{i}"
        address = f"temps + {self.scratch}"
        text = address if kind == "float" else f"reinterpret_cast<{kind}*>({address})"
        self.lines.append(f"{kind}* const {name} = {text};")
        self.scratch += words * node.shape[0]
        for value, index, n in self._pieces(i, node, ""):
            self.lines.append(_each(n, f"{name}[{index}] = {value};"))
        self.lines.append("ops::sync_warp();")

    def _stored_text(self, i: int, index: str) -> str:
        text = super()._stored_text(i, index)
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
        for number, (_, index, n) in enumerate(pieces):
            self.lines.append(_each(n, f"row.write({index}, out{number}[j]);", "int j"))
        self.lines.append("ops::sync_warp();")

    def _reduction(self, node: Node) -> str:
        (source,) = node.args
        kind, n = CPP_TYPE[node.dtype], self.graph.nodes[source].shape[0]
        join = f"ops::{_LANE_JOIN[node.op]}"
        text = f"{join}::none<{kind}>()"
        for lo, hi in self._segments(source, n):
            value = self._element(source, 1, lo, lo)
            body = f"[&]([[maybe_unused]] int i) {{ return {value}; }}"
            text = f"ops::join_elements<{hi - lo}>(lane, {join}(), {text}, {body})"
        total = f"ops::join_lanes({text}, {join}())"
        return f"ops::wrap<{TAG[node.dtype]}>({total})" if node.dtype in NARROW else total


def _each(n: int, body: str, second: str = "int") -> str:
    return f"ops::each_element<{n}>(lane, [&]([[maybe_unused]] int i, {second}) {{ {body} }});"
