"""Reads IR from untrusted JSON documents: every op, attribute, dtype, shape and slot is checked.

A graph that passes is one that tracing could have made, so that no text of the document reaches the
generated code unchecked. Limits bound the work that a small document can cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ...errors import ManifestError
from .ir import (
    BUILTINS,
    DTYPES,
    FLOAT_FUNCTIONS,
    HOOK_INPUTS,
    HOOKS,
    INT_BITS,
    MAX_NAME,
    OPS,
    ROW_HOOKS,
    STORAGE_DTYPES,
    TEXT_HOOKS,
    Graph,
    Node,
    ScalarParam,
    TensorParam,
    VariantIR,
    fitting_name,
)

MAX_NODES = 4096
MAX_ELEMENTS = 4096
"""Elements of one vector: as many as tracing allows."""
MAX_TOTAL_ELEMENTS = 1 << 17
"""Elements of all vectors of a graph: scalar hooks are unrolled."""
MAX_PARAMS = 1024
MAX_RANK = 8
MAX_TEXT = 1 << 16

_INTS = tuple(INT_BITS)
_FLOATS = ("float32", "float64")
_COMPARES = frozenset("ge gt le lt eq ne".split())
_OF_FLOATS = {*FLOAT_FUNCTIONS, *"div atan2 floor ceil round trunc isnan isinf".split()}
_OF_BITS = frozenset("and or xor not shl shr".split())
_HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}")


def fail(where: str, problem: str) -> ManifestError:
    """The error for a field, to be raised."""
    return ManifestError(f"{where}: {problem}")


def show(value: object) -> str:
    """An untrusted value as errors quote it: short, ASCII."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_name(where: str, name: object) -> str:
    """`name`; raises ManifestError unless it is a name that `fitting_name` does not change."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise fail(where, f"a name of 1 to {MAX_NAME} characters is expected, got {show(name)}")
    if name != fitting_name(name):
        raise fail(where, f"{show(name)} has characters that a name may not have")
    return name


def variant_from_document(where: str, doc: object) -> VariantIR:
    """The variant that an untrusted document describes.

    Raises ManifestError, which names the field, for anything that tracing could not have made.
    """
    fields = record(where, doc, ("hooks", "tensors", "scalars", "cpp"))
    cpp = _texts(f"{where}.cpp", fields["cpp"])
    tensors = [
        _tensor(f"{where}.tensors[{i}]", x, bool(cpp))
        for i, x in enumerate(_list(f"{where}.tensors", fields["tensors"], MAX_PARAMS))
    ]
    scalars = [
        _scalar(f"{where}.scalars[{i}]", x, bool(cpp))
        for i, x in enumerate(_list(f"{where}.scalars", fields["scalars"], MAX_PARAMS))
    ]
    hooks = fields["hooks"]
    if not isinstance(hooks, dict) or not set(hooks) <= set(HOOKS):
        raise fail(f"{where}.hooks", f"expected graphs by the names of hooks, got {show(hooks)}")
    graphs = {}
    for name, graph in hooks.items():
        if name in cpp:
            raise fail(f"{where}.hooks.{name}", "the hook is given as C++ text as well")
        graphs[name] = _GraphReader(f"{where}.hooks.{name}", name, tensors, scalars).read(graph)
    return VariantIR(
        tuple((name, graphs[name]) for name in HOOKS if name in graphs),
        tuple(tensors),
        tuple(scalars),
        tuple((name, cpp[name]) for name in HOOKS if name in cpp),
    )


def record(where: str, doc: object, names: Sequence[str]) -> dict[str, Any]:
    """`doc` as an object with exactly these fields."""
    if not isinstance(doc, dict):
        raise fail(where, f"an object is expected, got {show(doc)}")
    missing = [n for n in names if n not in doc]
    unknown = [n for n in doc if n not in names]
    if missing or unknown:
        raise fail(
            where,
            f"the fields {', '.join(names)} are expected; missing: {', '.join(missing) or 'none'}, "
            f"unknown: {', '.join(show(n) for n in unknown[:8]) or 'none'}",
        )
    return doc


def integer(where: str, value: object, low: int, high: int) -> int:
    """`value` as an int from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise fail(where, f"an integer from {low} to {high} is expected, got {show(value)}")
    return value


def choice(where: str, value: object, choices: Sequence[str]) -> str:
    """`value`, which must be one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise fail(where, f"one of {', '.join(choices)} is expected, got {show(value)}")
    return value


def _list(where: str, value: object, most: int, exactly: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise fail(where, f"a list is expected, got {show(value)}")
    if len(value) > most or exactly not in (None, len(value)):
        wanted = f"{exactly}" if exactly is not None else f"at most {most}"
        raise fail(where, f"{wanted} entries are expected, got {len(value)}")
    return value


def _texts(where: str, doc: object) -> dict[str, str]:
    if not isinstance(doc, dict) or not set(doc) <= set(TEXT_HOOKS):
        raise fail(where, f"C++ texts by the names of hooks are expected, got {show(doc)}")
    for hook, text in doc.items():
        if not isinstance(text, str) or len(text) > MAX_TEXT or not _is_text(text):
            raise fail(f"{where}.{hook}", f"text of at most {MAX_TEXT} characters is expected")
    return doc


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return all(c in "\n\t\r" or c >= " " for c in text)


def _param_name(where: str, name: object, named: bool) -> str:
    # Only C++ texts refer to params by name: other kernel specs have no names.
    if not named and name != "":
        raise fail(where, f"params have names only beside C++ texts, got {show(name)}")
    return check_name(where, name) if name != "" else ""


def _tensor(where: str, doc: object, named: bool) -> TensorParam:
    name, dtype, rank, strides, sizes = _list(where, doc, 5, exactly=5)
    name = _param_name(f"{where}.name", name, named)
    choice(f"{where}.dtype", dtype, STORAGE_DTYPES)
    integer(f"{where}.rank", rank, 0, MAX_RANK)
    if not isinstance(strides, str) or len(strides) != rank or not set(strides) <= set("01n"):
        raise fail(f"{where}.strides", f"{rank} of '0', '1', 'n' are expected, got {show(strides)}")
    for d, size in enumerate(_list(f"{where}.sizes", sizes, MAX_RANK, exactly=rank)):
        integer(f"{where}.sizes[{d}]", size, -1, 2**31 - 1)
    return TensorParam(name, dtype, rank, strides, tuple(sizes))


def _scalar(where: str, doc: object, named: bool) -> ScalarParam:
    name, dtype = _list(where, doc, 2, exactly=2)
    name = _param_name(f"{where}.name", name, named)
    choice(f"{where}.dtype", dtype, ("int64", "float64"))
    return ScalarParam(name, dtype)


class _GraphReader:
    """Reads one hook's graph, node by node."""

    def __init__(
        self, where: str, hook: str, tensors: Sequence[TensorParam], scalars: Sequence[ScalarParam]
    ) -> None:
        self.where, self.hook = where, hook
        self.tensors, self.scalars = tensors, scalars
        self.nodes: list[Node] = []

    def read(self, doc: object) -> Graph:
        """The graph of a document."""
        fields = record(self.where, doc, ("inputs", "nodes", "output"))
        if fields["inputs"] != list(HOOK_INPUTS[self.hook]):
            wanted = ", ".join(HOOK_INPUTS[self.hook])
            raise fail(f"{self.where}.inputs", f"{wanted} are expected")
        nodes = _list(f"{self.where}.nodes", fields["nodes"], MAX_NODES)
        elements = 0
        for i, node in enumerate(nodes):
            made = self._node(f"{self.where}.nodes[{i}]", node)
            elements += made.shape[0] if made.shape else 0
            self.nodes.append(made)
        if elements > MAX_TOTAL_ELEMENTS:
            raise fail(self.where, f"vectors of {elements} elements in all are too many")
        output = integer(f"{self.where}.output", fields["output"], 0, len(nodes) - 1)
        self._result(self.nodes[output])
        graph = Graph(HOOK_INPUTS[self.hook], tuple(self.nodes), output)
        needed = _needed(graph)
        dead = next((i for i in range(len(nodes)) if i not in needed), None)
        if dead is not None:
            raise fail(f"{self.where}.nodes[{dead}]", "the result does not need this node")
        return graph

    def _result(self, node: Node) -> None:
        dtype = "bool" if self.hook == "mask_mod" else "float32"
        if node.dtype != dtype or node.shape and self.hook not in ROW_HOOKS:
            raise fail(f"{self.where}.output", f"a hook of this kind gives {dtype}")

    def _node(self, where: str, doc: object) -> Node:
        op, args, dtype, shape, attrs = _list(where, doc, 5, exactly=5)
        if not isinstance(op, str) or op not in OPS:
            raise fail(where, f"unknown operation {show(op)}")
        where = f"{where} ({op})"
        choice(f"{where}.dtype", dtype, DTYPES)
        for a in _list(f"{where}.args", args, MAX_NODES):
            integer(f"{where}.args", a, 0, len(self.nodes) - 1)
        for n in _list(f"{where}.shape", shape, 1):
            integer(f"{where}.shape", n, 1, MAX_ELEMENTS)
        info = OPS[op]
        if info.arity not in (-1, len(args)):
            raise fail(f"{where}.args", f"{info.arity} are expected, got {len(args)}")
        pairs = [
            _list(f"{where}.attrs", p, 2, exactly=2) for p in _list(f"{where}.attrs", attrs, 8)
        ]
        if [p[0] for p in pairs] != list(info.attrs):
            raise fail(f"{where}.attrs", f"expected {', '.join(info.attrs) or 'none'}")
        values = {key: _attribute(f"{where}.{key}", value, op, dtype) for key, value in pairs}
        node = Node(op, tuple(args), dtype, tuple(shape), tuple(values.items()))
        rule = info.kind if info.kind in ("map", "reduce") else "built_in" if op in BUILTINS else op
        getattr(self, rule)(where, node)
        return node

    # --- rules: methods of the operation's name or kind ---------------------------------------

    def args(self, node: Node) -> list[Node]:
        """The nodes of a node's arguments."""
        return [self.nodes[a] for a in node.args]

    def want(self, where: str, node: Node, dtype: str, shape: tuple[int, ...]) -> None:
        """The node has this dtype and shape."""
        if (node.dtype, node.shape) != (dtype, shape):
            found = f"{node.dtype}{list(node.shape)}"
            raise fail(where, f"{dtype}{list(shape)} is expected, got {found}")

    def indices(self, where: str, node: Node) -> None:
        """The arguments are integers, no vectors."""
        for a in self.args(node):
            if a.shape or a.dtype not in _INTS:
                raise fail(f"{where}.args", f"integers are expected, got {a.dtype}{list(a.shape)}")

    def tensor(self, where: str, node: Node) -> TensorParam:
        """The param that the node's slot names."""
        slot = integer(f"{where}.slot", node.attr("slot"), 0, len(self.tensors) - 1)
        return self.tensors[slot]

    def input(self, where: str, node: Node) -> None:
        name = choice(f"{where}.name", node.attr("name"), HOOK_INPUTS[self.hook])
        if name == "row":
            if len(node.shape) != 1:
                raise fail(f"{where}.shape", "a row is a vector")
            self.want(where, node, "float32", node.shape)
        else:
            self.want(where, node, "float32" if name in ("score", "lse") else "int32", ())

    def const(self, where: str, node: Node) -> None:
        self.want(where, node, node.dtype, ())

    def scalar(self, where: str, node: Node) -> None:
        slot = integer(f"{where}.slot", node.attr("slot"), 0, len(self.scalars) - 1)
        self.want(where, node, self.scalars[slot].dtype, ())

    def gather(self, where: str, node: Node) -> None:
        param = self.tensor(where, node)
        self.indices(where, node)
        shape: tuple[int, ...] = ()
        if len(node.args) == param.rank - 1 and node.shape:
            shape = node.shape
            if param.sizes[-1] not in (-1, *shape):
                raise fail(f"{where}.shape", f"the param's last dim is {param.sizes[-1]}")
        elif len(node.args) != param.rank:
            raise fail(f"{where}.args", f"the param has {param.rank} dims")
        self.want(where, node, param.value_dtype, shape)

    def lookup(self, where: str, node: Node) -> None:
        param, args = self.tensor(where, node), self.args(node)
        if len(args) != param.rank or not args[-1].shape or any(a.shape for a in args[:-1]):
            raise fail(
                f"{where}.args", f"the param has {param.rank} dims; only the last is looked up"
            )
        for a in args:
            if a.dtype not in _INTS:
                raise fail(f"{where}.args", f"integers are expected, got {a.dtype}")
        self.want(where, node, param.value_dtype, args[-1].shape)

    def searchsorted(self, where: str, node: Node) -> None:
        param, (x,) = self.tensor(where, node), self.args(node)
        if param.rank != 1 or x.shape or type(node.attr("right")) is not bool:
            raise fail(where, "one value is searched in a param of one dim, right is a bool")
        self.want(where, node, "int64", ())

    def built_in(self, where: str, node: Node) -> None:
        self.indices(where, node)
        self.want(where, node, BUILTINS[node.op], ())

    def map(self, where: str, node: Node) -> None:
        args = self.args(node)
        lengths = {a.shape for a in args if a.shape}
        if lengths - {node.shape} or (node.shape and not lengths):
            raise fail(f"{where}.shape", "elementwise operations have their arguments' shape")
        if node.op == "cast":
            return
        if node.op == "where":
            if args[0].dtype != "bool":
                raise fail(f"{where}.args", "the condition is a bool")
            args = args[1:]
        dtypes = {a.dtype for a in args}
        if len(dtypes) != 1:
            raise fail(f"{where}.args", f"one dtype is expected, got {', '.join(sorted(dtypes))}")
        (dtype,) = dtypes
        allowed: tuple[str, ...] = DTYPES
        if node.op in _OF_FLOATS:
            allowed = _FLOATS
        elif node.op in _OF_BITS:
            allowed = ("bool", *_INTS)
        choice(f"{where}.args", dtype, allowed)
        gives_bool = node.op in _COMPARES or node.op in ("isnan", "isinf")
        self.want(where, node, "bool" if gives_bool else dtype, node.shape)

    def iota(self, where: str, node: Node) -> None:
        length = integer(f"{where}.length", node.attr("length"), 1, MAX_ELEMENTS)
        self.want(where, node, node.dtype, (length,))

    def broadcast(self, where: str, node: Node) -> None:
        (x,) = self.args(node)
        length = integer(f"{where}.length", node.attr("length"), 1, MAX_ELEMENTS)
        if x.shape:
            raise fail(f"{where}.args", "a scalar is expected")
        self.want(where, node, x.dtype, (length,))

    def slice(self, where: str, node: Node) -> None:
        x = self.vectors(where, node)[0]
        length = integer(f"{where}.length", node.attr("length"), 1, MAX_ELEMENTS)
        start = integer(f"{where}.start", node.attr("start"), 0, x.shape[0] - 1)
        step = integer(f"{where}.step", node.attr("step"), -MAX_ELEMENTS, MAX_ELEMENTS)
        if step == 0 or not 0 <= start + step * (length - 1) < x.shape[0]:
            raise fail(where, f"the slice leaves its argument of {x.shape[0]} elements")
        self.want(where, node, x.dtype, (length,))

    def cat(self, where: str, node: Node) -> None:
        parts = self.vectors(where, node)
        self.want(where, node, parts[0].dtype, (sum(p.shape[0] for p in parts),))

    def interleave(self, where: str, node: Node) -> None:
        parts = self.vectors(where, node)
        if any(p.shape != parts[0].shape for p in parts):
            raise fail(f"{where}.args", "vectors of one length are expected")
        self.want(where, node, parts[0].dtype, (len(parts) * parts[0].shape[0],))

    def vectors(self, where: str, node: Node) -> list[Node]:
        """The arguments, which are one or more vectors of one dtype."""
        parts = self.args(node)
        if not parts or any(not p.shape or p.dtype != parts[0].dtype for p in parts):
            raise fail(f"{where}.args", "vectors of one dtype are expected")
        return parts

    def reduce(self, where: str, node: Node) -> None:
        (x,) = self.vectors(where, node)
        logical = node.op in ("any", "all")
        if logical != (x.dtype == "bool"):
            raise fail(f"{where}.args", "booleans are reduced by any and all, numbers by others")
        self.want(where, node, x.dtype, ())


def _needed(graph: Graph) -> set[int]:
    needed = {graph.output}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in needed:
            needed.update(graph.nodes[i].args)
    return needed


def _attribute(where: str, value: object, op: str, dtype: str) -> bool | int | float | str:
    if op == "const":
        return _constant(where, value, dtype)
    if isinstance(value, bool | str | int):
        return value
    raise fail(where, f"an attribute cannot be {show(value)}")


def _constant(where: str, value: object, dtype: str) -> bool | int | float:
    if dtype == "bool":
        if type(value) is not bool:
            raise fail(where, f"a bool is expected, got {show(value)}")
        return value
    if dtype in INT_BITS:
        signed, bits = int(dtype != "uint8"), INT_BITS[dtype]
        return integer(where, value, -(2 ** (bits - 1)) * signed, 2 ** (bits - signed) - 1)
    text = record(where, value, ("f",))["f"]
    if text in ("inf", "-inf", "nan"):
        return float(text)
    if not isinstance(text, str) or not _HEX_FLOAT.fullmatch(text):
        raise fail(where, f"a hexadecimal float is expected, got {show(text)}")
    exponent = int(text.partition("p")[2])
    number = float.fromhex(text) if -1100 <= exponent <= 1023 else math.inf
    if number.hex() != text:
        raise fail(where, f"{show(text)} is not how this number is written")
    return number
