"""C++ expressions that the lowerings of pairs and rows share.

First single operations. Then reductions of short vectors in scalar hooks, as loops over their
entries. Unrolled, every entry of a captured row is a value that each row of a CUDA tile keeps in a
register; a loop keeps one pointer per row and reads the entries from the L1 cache. An unrolled
`torch.dot` of 16 entries in a score_mod took 6.6 s to compile for sm_80, in four builds of which
three spilled registers; as a loop it takes one build of 2.5 s, and so do 128 entries. Last, for
CUDA, the values that the host computes once per launch from scalar params alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.ir import BUILTINS, HOOK_INPUTS, REDUCTIONS, Attr, Graph, Node, TensorParam

CPP_TYPE = {
    "bool": "bool",
    # 8- and 16-bit integers are kept in 32-bit registers and wrapped after arithmetic.
    "uint8": "int32_t",
    "int8": "int32_t",
    "int16": "int32_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float32": "float",
    "float64": "double",
}
"""The C++ type that holds a value of each IR dtype."""

TAG = {
    "bool": "dt::b1",
    "uint8": "dt::u8",
    "int8": "dt::i8",
    "int16": "dt::i16",
    "int32": "dt::i32",
    "int64": "dt::i64",
    "float32": "dt::f32",
    "float64": "dt::f64",
    "float16": "dt::f16",
    "bfloat16": "dt::bf16",
    "float8_e4m3fn": "dt::e4m3",
    "float8_e5m2": "dt::e5m2",
}
"""The tag type of each IR or storage dtype."""

NARROW = ("uint8", "int8", "int16")
"""Integers that are narrower than the registers they are kept in."""

_WRAPPED = {"add", "sub", "mul", "neg", "abs", "shl", "floordiv", "truncdiv", "pow", "not"}
_RENAMED = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}


def arguments(hook: str) -> str:
    """The parameter list of a hook's C++ function, without the row."""
    kinds = {"score": "float", "lse": "float"}
    names = [name for name in HOOK_INPUTS[hook] if name != "row"]
    return ", ".join(f"[[maybe_unused]] {kinds.get(name, 'int32_t')} {name}" for name in names)


def literal(value: Attr, dtype: str) -> str:
    """A C++ literal of the IR dtype; floats are exact."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in ("float32", "float64"):
        number = float(value)  # type: ignore[arg-type]
        suffix = "f" if dtype == "float32" else ""
        if math.isnan(number):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
        if abs(number) < 1e6 and float(repr(number)) == number and len(repr(number)) <= 9:
            return f"{number!r}{suffix}"
        return f"{number.hex()}{suffix}"
    number = int(value)  # type: ignore[arg-type]
    if dtype == "int64":
        low = -(2**63)
        return "INT64_MIN" if number == low else f"INT64_C({number})"
    return "INT32_MIN" if number == -(2**31) else f"int32_t({number})"


def read_op(
    node: Node,
    args: Sequence[str],
    tensors: Sequence[TensorParam],
    uniforms: Uniforms | None = None,
) -> str | None:
    """The C++ expression of a scalar param, a position in a sorted param or a built-in; None for
    other operations. uniforms: for CUDA only."""
    if node.op == "scalar":
        getter = "scalar_i64" if node.dtype == "int64" else "scalar_f64"
        return f"c.{getter}({node.int_attr('slot')})"
    if node.op == "searchsorted":
        slot = node.int_attr("slot")
        right = "true" if node.attr("right") else "false"
        return (
            f"ops::searchsorted<{TAG[tensors[slot].dtype]}, {right}>(c.tensor({slot}), {args[0]})"
        )
    if node.op == "kv_slot" and uniforms is not None:
        args = [*args, uniforms.page_size()]
    return f"ops::{node.op}({', '.join(['c', *args])})" if node.op in BUILTINS else None


def map_op(node: Node, args: list[str], arg_dtypes: list[str]) -> str:
    """The C++ expression of an elementwise operation on named values."""
    if node.op == "cast":
        return f"ops::cast<{TAG[arg_dtypes[0]]}, {TAG[node.dtype]}>({args[0]})"
    call = f"ops::{_RENAMED.get(node.op, node.op)}({', '.join(args)})"
    if node.dtype in NARROW and node.op in _WRAPPED:
        return f"ops::wrap<{TAG[node.dtype]}>({call})"
    return call


# --- reductions of short vectors -----------------------------------------------------------------

UNROLLED = {"cuda": 4, "cpu": 32}
"""The most entries of a reduction that is unrolled. CPUs gather a key's entries once for all rows
of a tile, and the gathers dominate the cost of such a hook: there only long reductions are loops.
"""


def joined(node: Node) -> str:
    """The C++ function that joins two values of a reduction."""
    name = REDUCTIONS[node.op]
    return f"ops::{_RENAMED.get(name, name)}"


Divide = Callable[[Node, list[str]], tuple[Node, list[str]]]
"""Replaces a division by a cheaper operation where its operands allow it; see `block`."""


class Loop:
    """The body of one loop: statements that compute one entry from the loop's index ``i``.

    values: names of the components of each earlier node, one for a scalar. starts: the name of the
    first element's address or offset, for each gather of a row.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Sequence[TensorParam],
        values: Sequence[Sequence[str]],
        starts: Mapping[int, str],
        divide: Divide | None,
    ) -> None:
        self._graph, self._tensors, self._values = graph, tensors, values
        self._starts, self._divide = starts, divide
        self._lines: list[str] = []
        self._names: dict[tuple[int, str], str] = {}
        self.uses: dict[str, None] = {}  # names of the values from outside that it reads

    def fold(self, node: Node) -> str | None:
        """The expression of a reduction node; None where no one expression gives all entries."""
        (source,) = node.args
        vector = self._graph.nodes[source]
        if not vector.shape or not self._uniform(source):
            return None
        value = self._entry(source, "i")
        lines = "".join(f"\n      {line}" for line in self._lines)
        join = f"[](auto a, auto b) {{ return {joined(node)}(a, b); }}"
        return (
            f"ops::fold<{vector.shape[0]}>({join}, [&]([[maybe_unused]] int i) {{{lines}\n"
            f"      return {value};\n    }})"
        )

    def _uniform(self, i: int) -> bool:
        """Whether one expression of the index gives all entries of a vector."""
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
        param, start = self._tensors[slot], self._outside(self._starts[i])
        tag, tensor = TAG[param.dtype], f"c.tensor({slot})"
        load = "load" if self._divide is None else "read"
        if param.strides[-1] == "1":
            return f"ops::{load}<{tag}>({tensor}, {start} + ({index}))"
        return f"ops::{load}_at<{tag}>({tensor}, {start}, {param.rank - 1}, {index})"

    def _map(self, node: Node, index: str) -> str:
        names = [self._entry(a, index) for a in node.args]
        dtypes = [self._graph.nodes[a].dtype for a in node.args]
        if self._divide is not None and not self._graph.nodes[node.args[-1]].shape:
            node, names = self._divide(node, names)
            self._outside(names[-1])
        return map_op(node, names, dtypes)


# --- values of a launch --------------------------------------------------------------------------


@dataclass
class Uniforms:
    """The fields of ``Hooks::Uniforms``, and the statements that compute them.

    The struct is one of the kernel's parameters, so that instructions read its fields as operands.
    The kernel then does not spend time on conversions of doubles, reciprocals and the magic numbers
    of integer divisions.
    """

    fields: dict[str, str] = field(default_factory=dict)  # name -> C++ type
    lines: dict[str, str] = field(default_factory=dict)  # name -> expression, in order

    def compute(self, name: str, text: str) -> None:
        """Add the statement that computes `name` from scalar params and earlier names."""
        self.lines.setdefault(name, text)

    def read(self, name: str, kind: str) -> str:
        """The expression with which a kernel reads `name`, a value of C++ type `kind`."""
        self.fields[name] = kind
        return f"c.uniform<Uniforms>().{name}"

    def page_size(self) -> str:
        """The expression with which a kernel reads the divisor of positions in pages."""
        self.compute("page_size", "Divisor(c.args->page_size)")
        return self.read("page_size", "Divisor")

    def text(self) -> str:
        """``struct Uniforms`` and the function that fills it, which the host calls."""
        fields = "".join(f" {kind} {name};" for name, kind in self.fields.items())
        lines = "".join(
            f"    [[maybe_unused]] const auto {name} = {text};\n"
            for name, text in self.lines.items()
        )
        values = ", ".join(self.fields)
        return (
            f"  struct Uniforms {{{fields} }};\n"
            f"  FAJIT_FN static Uniforms uniforms([[maybe_unused]] const Context& c) {{\n{lines}"
            f"    return {{{values}}};\n  }}"
        )
