"""Lowers reductions of short vectors in scalar hooks to loops over their entries.

Unrolled, every entry of a captured row is a value of its own that a query row or a key keeps: in
registers, for each row of a CUDA tile. A loop keeps one pointer a row, and reads the entries from
the L1 cache. `torch.dot` of 16 entries in a score_mod took 6.6 s of compilers for sm_80, in four
builds of which three spilled; as a loop it takes one of 2.5 s, and so do 128 entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .ir import Graph, Node, TensorParam
from .lower_expr import CPP_TYPE, TAG, literal, map_op

UNROLLED = {"cuda": 4, "cpu": 32}
"""Entries up to which a reduction is written out. On CPUs a key's entries are gathered once for all
rows of a tile, and gathers are what such a hook costs: there only very long ones are loops.
"""

JOIN = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum", "any": "or_",
        "all": "and_"}  # fmt: skip
"""The function of `fajit::ops` that joins two values, by reduction."""

Divide = Callable[[Node, list[str]], tuple[Node, list[str]]]
"""Makes a division cheaper, where its operands let it: see `lower_pair`."""


class Loop:
    """The body of one loop: what an entry is, as statements over the loop's index ``i``.

    values: names of the components of each node before, one where it is a scalar. places: of each
    gather of a row, where the row begins.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Sequence[TensorParam],
        values: Sequence[Sequence[str]],
        places: Mapping[int, str],
        divide: Divide | None,
    ) -> None:
        self._graph, self._tensors, self._values = graph, tensors, values
        self._places, self._divide = places, divide
        self._lines: list[str] = []
        self._names: dict[tuple[int, str], str] = {}
        self.uses: dict[str, None] = {}  # names of the statements outside that it reads

    def fold(self, node: Node) -> str | None:
        """The expression of a reduction node; None where entries have no common form."""
        (source,) = node.args
        vector = self._graph.nodes[source]
        if not vector.shape or not self._uniform(source):
            return None
        value = self._entry(source, "i")
        lines = "".join(f"\n      {line}" for line in self._lines)
        join = f"[](auto a, auto b) {{ return ops::{JOIN[node.op]}(a, b); }}"
        return (
            f"ops::fold<{vector.shape[0]}>({join}, [&]([[maybe_unused]] int i) {{{lines}\n"
            f"      return {value};\n    }})"
        )

    def _uniform(self, i: int) -> bool:
        """Whether all entries of a vector are the same expression of their number."""
        node = self._graph.nodes[i]
        if node.op in ("cat", "interleave"):
            return False
        return all(self._uniform(a) for a in node.args if self._graph.nodes[a].shape)

    def _outside(self, name: str) -> str:
        self.uses[name] = None
        return name

    def _entry(self, i: int, index: str) -> str:
        """Entry number `index` of node i: a name, or a literal."""
        node = self._graph.nodes[i]
        if not node.shape:
            return self._outside(self._values[i][0])
        if node.op == "const":
            return literal(node.attr("value"), node.dtype)
        if node.op == "iota":
            return f"{CPP_TYPE[node.dtype]}({index})"
        if node.op == "broadcast":
            return self._outside(self._values[node.args[0]][0])
        if node.op == "slice":
            start, step = node.int_attr("start"), node.int_attr("step")
            scaled = index if step == 1 else f"{step} * ({index})"
            return self._entry(node.args[0], scaled if start == 0 else f"{start} + {scaled}")
        key = (i, index)
        if key not in self._names:
            text = self._load(i, node, index) if node.op == "gather" else self._map(node, index)
            name = self._names[key] = f"e{len(self._names)}"
            self._lines.append(f"const auto {name} = {text};")
        return self._names[key]

    def _load(self, i: int, node: Node, index: str) -> str:
        slot = node.int_attr("slot")
        param, place = self._tensors[slot], self._outside(self._places[i])
        tag, tensor = TAG[param.dtype], f"c.tensor({slot})"
        load = "load" if self._divide is None else "read"
        if param.strides[-1] == "1":
            return f"ops::{load}<{tag}>({tensor}, {place} + ({index}))"
        return f"ops::{load}_at<{tag}>({tensor}, {place}, {param.rank - 1}, {index})"

    def _map(self, node: Node, index: str) -> str:
        names = [self._entry(a, index) for a in node.args]
        dtypes = [self._graph.nodes[a].dtype for a in node.args]
        if self._divide is not None and not self._graph.nodes[node.args[-1]].shape:
            node, names = self._divide(node, names)
            self._outside(names[-1])
        return map_op(node, names, dtypes)
