"""The IR of a traced hook: typed, canonical, serialisable as JSON, independent of torch.

A `Graph` is a list of nodes in topological order, each a scalar (shape ``()``) or a short vector
(shape ``(n,)``, only in row hooks and small captured rows). Equal sub-expressions are one node and
dead nodes do not exist, so that equal hooks have equal graphs and equal JSON.

Everything that a hook may do is a row of `OPS`. Type promotion has happened before: the arguments
of an arithmetic node share its dtype, and every conversion is an explicit ``cast`` node.

In order: dtypes and operations; graphs; the rules of promotion; hooks, params and whole variants;
what a variant reads; JSON; text for people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

T = TypeVar("T")

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""Dtypes of values inside a hook. Half-precision and fp8 tensors are read as float32."""

STORAGE_DTYPES = (*DTYPES, "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that a captured tensor may have in memory."""

LATENT_ROWS = {576: 656, 512: 528}
"""Bytes of rows of keys and of values whose dtype is uint8, by head dim: those of FlashMLA's fp8
cache, 512 codes of float8_e4m3fn, 4 scales of 128 codes each (float32) and 64 values of bfloat16,
and without these 64."""

INT_BITS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}

DEFAULT_FLOAT = "float32"
"""What an integer becomes in a true division or a transcendental, whatever torch's default is."""

MAX_NAME = 200
"""The most characters of a variant's name."""

REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum", "any": "or",
              "all": "and"}  # fmt: skip
"""Reductions of a vector, with the operation that joins two elements."""

INTEGER_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
"""Operations that a divisor of 0 makes an error of integers."""

FLOAT_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt tanh sigmoid sin cos tan asin acos atan sinh "
    "cosh erf tanh_approx"
).split()
"""Functions of one float, by torch's names or those of `functions.py`; an integer becomes a float
first."""

Attr = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One row of the operation table.

    kind: ``leaf`` (no value arguments), ``load`` (reads a param), ``map`` (elementwise, vectors and
    scalars broadcast), ``vector`` (rearranges a vector), ``reduce`` (vector to scalar).
    """

    kind: Literal["leaf", "load", "map", "vector", "reduce"]
    arity: int  # -1: any
    attrs: tuple[str, ...] = ()


def _maps(arity: int, names: str) -> dict[str, OpInfo]:
    return {name: OpInfo("map", arity) for name in names.split()}


OPS: Mapping[str, OpInfo] = {
    # leaves
    "input": OpInfo("leaf", 0, ("name",)),  # one of HOOK_INPUTS
    "const": OpInfo("leaf", 0, ("value",)),
    "scalar": OpInfo("leaf", 0, ("slot",)),  # runtime scalar param: int64 or float64
    # loads: indices wrap when negative and are then clamped; no unsafe read exists
    "gather": OpInfo("load", -1, ("slot",)),  # one int index per dim; one fewer gives the last dim
    "lookup": OpInfo("load", -1, ("slot",)),  # one int index per dim, the last one a vector
    "searchsorted": OpInfo("load", 1, ("slot", "right")),  # in a sorted 1-D param; int64
    "q_len": OpInfo("load", 1),  # (b) -> int32
    "kv_len": OpInfo("load", 1),
    "q_row": OpInfo("load", 2),  # (b, q_idx) -> row in the packed q, int64
    "kv_slot": OpInfo("load", 2),  # (b, kv_idx) -> physical slot, int64
    # elementwise, arguments and result of one dtype
    **_maps(2, "add sub mul div floordiv truncdiv remainder fmod pow minimum maximum"),
    **_maps(2, "and or xor shl shr atan2"),  # `and or xor` on bool are logical
    **_maps(1, "neg abs sign not floor ceil round trunc"),
    **_maps(1, " ".join(FLOAT_FUNCTIONS)),
    # elementwise, result bool
    **_maps(2, "ge gt le lt eq ne"),
    **_maps(1, "isnan isinf"),
    "where": OpInfo("map", 3),  # (bool, x, x) -> x
    "cast": OpInfo("map", 1),  # to the node's dtype; to bool: x != 0, float to int: truncated
    # vectors
    "slice": OpInfo("vector", 1, ("start", "step", "length")),  # step may be negative
    "cat": OpInfo("vector", -1),
    "interleave": OpInfo("vector", -1),  # n vectors of length m -> n*m: a0 b0 a1 b1 ...
    "broadcast": OpInfo("vector", 1, ("length",)),
    "iota": OpInfo("leaf", 0, ("length",)),  # 0, 1, 2, ...
    **{name: OpInfo("reduce", 1) for name in REDUCTIONS},
}


BUILTINS = {"q_len": "int32", "kv_len": "int32", "q_row": "int64", "kv_slot": "int64"}
"""Built-ins that every hook may call (`builtins.py`), with the dtypes of their results."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `args` are indices of earlier nodes of the same graph."""

    op: str
    args: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()

    def attr(self, name: str) -> Attr:
        """The attribute `name`; KeyError when the operation has none."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.op} has no attribute {name!r}")

    def int_attr(self, name: str) -> int:
        """The attribute `name`, which is an int."""
        value = self.attr(name)
        assert isinstance(value, int)
        return value


def rearranged(node: Node, args: Sequence[Sequence[T]]) -> list[T] | None:
    """The elements of a node that only moves those of its arguments; None for other nodes."""
    if node.op == "slice":
        start, step = node.int_attr("start"), node.int_attr("step")
        return [args[0][start + step * i] for i in range(node.shape[0])]
    if node.op == "cat":
        return [x for a in args for x in a]
    if node.op == "interleave":
        return [x for group in zip(*args, strict=True) for x in group]
    return [args[0][0]] * node.shape[0] if node.op == "broadcast" else None


@dataclass(frozen=True, slots=True)
class Graph:
    """A hook's body. `nodes[output]` is its result; `inputs` are the argument names in order."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    output: int

    @property
    def result(self) -> Node:
        """The node whose value the hook returns."""
        return self.nodes[self.output]

    def uses(self, name: str) -> bool:
        """Whether the hook depends on the input `name`."""
        return any(n.op == "input" and n.attr("name") == name for n in self.nodes)

    def tensor_slots(self) -> tuple[int, ...]:
        """Slots of the param tensors that the hook reads, ascending."""
        return tuple(sorted({n.int_attr("slot") for n in self.nodes if _reads_tensor(n)}))

    def scalar_slots(self) -> tuple[int, ...]:
        """Slots of the scalar params that the hook reads, ascending."""
        return tuple(sorted({n.int_attr("slot") for n in self.nodes if n.op == "scalar"}))


def _reads_tensor(node: Node) -> bool:
    return node.op in ("gather", "lookup", "searchsorted")


class GraphBuilder:
    """Builds a canonical graph: equal nodes are shared, constants folded by the caller's rules."""

    def __init__(self, inputs: Iterable[str]) -> None:
        self.inputs = tuple(inputs)
        self.nodes: list[Node] = []
        self._ids: dict[tuple[object, ...], int] = {}

    def add(
        self,
        op: str,
        args: Iterable[int] = (),
        dtype: str = "float32",
        shape: tuple[int, ...] = (),
        **attrs: Attr,
    ) -> int:
        """Append a node, or find the equal one; returns its index."""
        info = OPS[op]
        node = Node(op, tuple(args), dtype, shape, tuple((k, attrs[k]) for k in info.attrs))
        assert dtype in DTYPES, dtype
        assert info.arity in (-1, len(node.args)), node
        # 0.0 == -0.0 == False and 1 == 1.0 == True: the repr keeps such constants apart.
        key = (op, node.args, dtype, shape, repr(node.attrs))
        if key not in self._ids:
            self._ids[key] = len(self.nodes)
            self.nodes.append(node)
        return self._ids[key]

    def add_all(self, nodes: Iterable[Node]) -> list[int]:
        """Append the first nodes of a graph; returns their indices."""
        own: list[int] = []
        for node in nodes:
            args = (own[a] for a in node.args)
            own.append(self.add(node.op, args, node.dtype, node.shape, **dict(node.attrs)))
        return own

    def finish(self, output: int) -> Graph:
        """The graph that computes node `output`, without dead nodes."""
        return prune(Graph(self.inputs, tuple(self.nodes), output))


def prune(graph: Graph) -> Graph:
    """The same graph with only the nodes that its output needs, in first-use order."""
    order: list[int] = []
    seen: set[int] = set()
    stack: list[tuple[int, bool]] = [(graph.output, False)]
    while stack:
        index, done = stack.pop()
        if done:
            order.append(index)
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack.extend((a, False) for a in reversed(graph.nodes[index].args))
    new = {old: i for i, old in enumerate(order)}
    kept = (graph.nodes[i] for i in order)
    nodes = tuple(replace(n, args=tuple(new[a] for a in n.args)) for n in kept)
    return Graph(graph.inputs, nodes, new[graph.output])


def slot_order(graphs: Iterable[Graph]) -> tuple[dict[int, int], dict[int, int]]:
    """The slots of param tensors, and of scalars, numbered in the order of their first use."""
    tensors: dict[int, int] = {}
    scalars: dict[int, int] = {}
    for node in (n for graph in graphs for n in graph.nodes):
        if node.op == "scalar":
            scalars.setdefault(node.int_attr("slot"), len(scalars))
        elif _reads_tensor(node):
            tensors.setdefault(node.int_attr("slot"), len(tensors))
    return tensors, scalars


def remap_slots(graph: Graph, tensors: Mapping[int, int], scalars: Mapping[int, int]) -> Graph:
    """The same graph with its param slots renumbered."""

    def renamed(n: Node) -> Node:
        if n.op == "scalar":
            table = scalars
        elif _reads_tensor(n):
            table = tensors
        else:
            return n
        attrs = tuple((k, table[v] if k == "slot" else v) for k, v in n.attrs)  # type: ignore[index]
        return replace(n, attrs=attrs)

    return replace(graph, nodes=tuple(map(renamed, graph.nodes)))


# --- dtypes and their promotion -----------------------------------------------------------------

# The rules are those of ``torch.result_type`` (ATen/native/TypeProperties.cpp). Operands fall into
# three classes: tensors with dimensions, 0-dim tensors and Python numbers. A later class only
# matters when its category (bool < int < float) is higher.


def value_dtype(stored: str) -> str:
    """The dtype of a tensor's elements inside a hook: half and fp8 are read as float32."""
    return stored if stored in DTYPES else "float32"


def is_float(dtype: str) -> bool:
    """Whether `dtype` is a floating dtype of the IR."""
    return dtype in ("float32", "float64")


def category(dtype: str) -> int:
    """0 for bool, 1 for integers, 2 for floating dtypes."""
    return 0 if dtype == "bool" else 2 if is_float(dtype) else 1


def promote(a: str, b: str) -> str:
    """``torch.promote_types`` on IR dtypes."""
    if a == b:
        return a
    ca, cb = category(a), category(b)
    if ca != cb:
        return a if ca > cb else b
    if ca == 2:
        return "float64"
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if INT_BITS[a] > INT_BITS[b] else b


def _combine(higher: str | None, lower: str | None) -> str | None:
    # combine_categories of TypeProperties.cpp, without complex numbers.
    if higher is None or lower is None:
        return higher or lower
    if is_float(higher):
        return higher
    if higher == "bool" or is_float(lower):
        return promote(higher, lower)
    return higher


def result_dtype(operands: Iterable[tuple[str, int, bool]]) -> str:
    """The dtype of an arithmetic result.

    operands: (dtype, rank, weak) each; weak: a Python number, whose floats count as float32.
    """
    classes: list[str | None] = [None, None, None]
    for dtype, rank, weak in operands:
        i = 2 if weak else 0 if rank else 1
        own, known = DEFAULT_FLOAT if weak and is_float(dtype) else dtype, classes[i]
        classes[i] = own if known is None else promote(known, own)
    result = _combine(classes[0], _combine(classes[1], classes[2]))
    assert result is not None
    return result


# --- params and the whole variant ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorParam:
    """A tensor that hooks read at run time.

    strides: per dim ``"0"``, ``"1"`` or ``"n"`` (any), which is compiled in. sizes: per dim -1 (not
    compiled in) or a size that the hook's structure depends on.
    """

    name: str
    dtype: str  # one of STORAGE_DTYPES
    rank: int
    strides: str
    sizes: tuple[int, ...]

    @property
    def value_dtype(self) -> str:
        """The dtype that hooks see."""
        return value_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class ScalarParam:
    """A number that hooks read at run time: dtype ``int64`` or ``float64``."""

    name: str
    dtype: Literal["int64", "float64"]


HOOKS = ("query_mod", "key_mod", "value_mod", "score_mod", "mask_mod", "sink", "pointwise",
         "pointwise_scale", "output_mod")  # fmt: skip
"""Hook names in canonical order. `sink` (b, h) and `pointwise` (score) come from the normaliser."""

USER_HOOKS = tuple(h for h in HOOKS if h.endswith("_mod"))
"""Hooks that users write themselves, in the same order."""

NORMALIZER_HOOKS = tuple(h for h in HOOKS if not h.endswith("_mod"))
"""Those that come from the normaliser."""

ROW_HOOKS: Mapping[str, str] = {
    "query_mod": "head_dim",
    "key_mod": "head_dim",
    "value_mod": "head_dim_v",
    "output_mod": "head_dim_v",
}
"""Hooks of one row of q, k, v or the output, with the size that is its length; the others are of
scalars."""

KV_HOOKS = ("key_mod", "value_mod")
"""Hooks that change rows of keys, and of values: those that appends may apply."""

TEXT_HOOKS = ("score_mod", "mask_mod", "sink", "pointwise", "pointwise_scale")
"""Hooks that may be given as C++ text."""

HOOK_INPUTS: Mapping[str, tuple[str, ...]] = {
    "query_mod": ("row", "b", "h", "q_idx"),
    "key_mod": ("row", "b", "kv_h", "kv_idx"),
    "value_mod": ("row", "b", "kv_h", "kv_idx"),
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
    "sink": ("b", "h"),
    "pointwise": ("score",),
    "pointwise_scale": ("b", "h", "q_idx"),
    "output_mod": ("row", "lse", "b", "h", "q_idx"),
}
"""Arguments of each hook. `h` is the query head, `kv_h` the key-value head, `row` one fp32 row of
q, k, v or the output, `lse` the row's log-sum-exp."""


@dataclass(frozen=True, slots=True)
class VariantIR:
    """All of a variant that decides the code: its hooks, and the params that they read by slot.

    cpp: hooks given as C++ text instead of a graph, (hook name, text) pairs.
    """

    hooks: tuple[tuple[str, Graph], ...]
    tensors: tuple[TensorParam, ...] = ()
    scalars: tuple[ScalarParam, ...] = ()
    cpp: tuple[tuple[str, str], ...] = ()

    def hook(self, name: str) -> Graph | None:
        """The graph of the hook `name`, or None when the variant has none."""
        return dict(self.hooks).get(name)

    def cpp_hook(self, name: str) -> str | None:
        """The C++ text of the hook `name`, or None."""
        return dict(self.cpp).get(name)

    def has(self, name: str) -> bool:
        """Whether the variant has the hook `name`, as a graph or as text."""
        return self.hook(name) is not None or self.cpp_hook(name) is not None

    @property
    def normalizer(self) -> Literal["softmax", "pointwise"]:
        """Which normaliser the variant uses."""
        return "pointwise" if self.has("pointwise") else "softmax"


# --- what a variant reads: for calls that do not support every variant ---------------------------

_OF_REQUEST = ("kv_len", "q_len", "q_row")


def reads_builtin(variant: VariantIR, name: str) -> bool:
    """Whether a hook calls the built-in of this name (`BUILTINS`)."""
    return any(node.op == name for _, graph in variant.hooks for node in graph.nodes)


def keys_read_request(variant: VariantIR) -> bool:
    """Whether `key_mod` or `value_mod` depends on the request b, or on a length or row of any.

    Keys that a group of requests shares go through these hooks once, with the index of the group
    for b: neither b nor a built-in of b belongs to one of the requests then. The exception is
    ``fa.kv_slot(b, kv_idx)``: the slot of a shared key is the same for all requests of the group.
    """
    graphs = (variant.hook(h) for h in KV_HOOKS)
    return any(g is not None and _reads_request(g) for g in graphs)


def _reads_request(graph: Graph) -> bool:
    inputs = {i: n.attr("name") for i, n in enumerate(graph.nodes) if n.op == "input"}

    def is_input(i: int, name: str) -> bool:
        while graph.nodes[i].op == "cast" and graph.nodes[i].dtype in ("int32", "int64"):
            (i,) = graph.nodes[i].args
        return inputs.get(i) == name

    def reads(i: int) -> bool:
        node = graph.nodes[i]
        if node.op == "kv_slot":
            return not (is_input(node.args[0], "b") and is_input(node.args[1], "kv_idx"))
        if node.op in _OF_REQUEST:
            return True
        return not is_input(i, "b") and any(is_input(arg, "b") for arg in node.args)

    return is_input(graph.output, "b") or any(reads(i) for i in range(len(graph.nodes)))


def unscaled_integers(has: Callable[[str], bool], k_dtype: Any, v_dtype: Any) -> str:
    """The error message for integer keys or values that no hook scales; empty where there are none.

    Integers of a quantised cache mean nothing without their scale. Keys and values of
    float8_e4m3fn need no hook: a scale of 1 is common.

    has: whether the variant has the hook of this name. k_dtype, v_dtype: of torch, or their names.
    """
    for name, dtype, hook in (("k", k_dtype, "key_mod"), ("v", v_dtype, "value_mod")):
        own = str(dtype).removeprefix("torch.")
        if own in ("int8", "bits4x2") and not has(hook):
            return (
                f"{name} is {own}, but the variant has no {hook}, so that raw integers would be "
                f"taken for {'keys' if name == 'k' else 'values'}; give it one that scales the "
                f"row, such as {hook}=lambda row, b, kv_h, kv_idx: row * scale[kv_h], or convert "
                f"{name} to float32, bfloat16 or float16"
            )
    return ""


# --- JSON ------------------------------------------------------------------------------------


def _value_to_json(value: Attr) -> object:
    # JSON has no inf, nan or exact float: hex strings are exact and canonical.
    if isinstance(value, float):
        return {"f": value.hex() if math.isfinite(value) else repr(value)}
    return value


def graph_to_json(graph: Graph) -> object:
    """A JSON-able document of the graph."""
    nodes = [
        [n.op, list(n.args), n.dtype, list(n.shape), [[k, _value_to_json(v)] for k, v in n.attrs]]
        for n in graph.nodes
    ]
    return {"inputs": list(graph.inputs), "nodes": nodes, "output": graph.output}


def variant_to_json(ir: VariantIR) -> dict[str, object]:
    """A JSON-able document of the variant; `document.variant_from_document` reads it."""
    return {
        "hooks": {name: graph_to_json(g) for name, g in ir.hooks},
        "tensors": [[p.name, p.dtype, p.rank, p.strides, list(p.sizes)] for p in ir.tensors],
        "scalars": [[p.name, p.dtype] for p in ir.scalars],
        "cpp": dict(ir.cpp),
    }


def canonical_json(doc: object) -> str:
    """The one spelling of a JSON document: sorted keys, no spaces, no NaN."""
    return json.dumps(doc, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- text for people -------------------------------------------------------------------------


def format_graph(graph: Graph) -> Iterator[str]:
    """The graph as lines such as ``%3 = add(%1, %2) : int32``."""
    for i, n in enumerate(graph.nodes):
        args = [f"%{a}" for a in n.args] + [f"{k}={v!r}" for k, v in n.attrs]
        shape = f"[{n.shape[0]}]" if n.shape else ""
        yield f"%{i} = {n.op}({', '.join(args)}) : {n.dtype}{shape}"
    yield f"return %{graph.output}"


def fitting_name(name: str) -> str:
    """`name` made safe for comments, ``#line`` directives and messages, and cut to `MAX_NAME`.

    Underscores replace quotes, backslashes, question marks (trigraphs) and characters that do not
    print. "variant" stands for an empty name.
    """
    kept = (c if c.isprintable() and c not in '"\\?' else "_" for c in name[:MAX_NAME])
    return "".join(kept) or "variant"
