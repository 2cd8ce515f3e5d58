"""Adds nodes to a traced graph: canonical arithmetic, and loads from captured tensors.

First `Emitter`, which folds constants and applies simple identities. Folding computes in the node's
dtype, as the kernel does; identities on floats are applied only where they hold for all values,
infinities, NaN and signed zeros included. Then the indexing of captured tensors, which becomes
loads in the graph or calls of the prelude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashattn_jit.variants.capture.extract import HostTensor, map_tree
from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.ir.dtypes import VALUE_DTYPES
from flashattn_jit.variants.ir.ir import INTEGER_DIVISIONS, category, is_float
from flashattn_jit.variants.trace.operations import cast, op, val
from flashattn_jit.variants.trace.values import Captured, Number, Value, pinned, tracer

if TYPE_CHECKING:
    from flashattn_jit.variants.trace.tracer import Tracer

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "floordiv": np.floor_divide, "remainder": np.remainder, "fmod": np.fmod, "pow": np.power,
    "truncdiv": lambda a, b: (
        (a - np.fmod(a, b)) // b if np.issubdtype(a.dtype, np.integer) else np.trunc(a / b)
    ),
    "minimum": np.minimum, "maximum": np.maximum, "atan2": np.arctan2,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
    "neg": np.negative, "abs": np.abs, "not": np.invert,
    "sign": lambda x: np.sign(np.nan_to_num(x)),
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "tanh": np.tanh,
    "tanh_approx": np.tanh,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "floor": np.floor, "ceil": np.ceil,
    "round": np.round, "trunc": np.trunc,
    "rsqrt": lambda x: np.asarray(1, x.dtype) / np.sqrt(x),
    "sigmoid": lambda x: np.asarray(1, x.dtype) / (np.asarray(1, x.dtype) + np.exp(-x)),
    "erf": lambda x: np.asarray(math.erf(float(x)), x.dtype),
    "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less,
    "eq": np.equal, "ne": np.not_equal, "isnan": np.isnan, "isinf": np.isinf,
}  # fmt: skip

_COMMUTATIVE = frozenset(["add", "mul", "minimum", "maximum", "and", "or", "xor", "eq", "ne"])
_FLIPPED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
_NEGATED = {"eq": "ne", "ne": "eq"}
_NEGATED_INT = {**_NEGATED, "ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}
_EXACT_IN = {"bool": 1, "uint8": 8, "int8": 7, "int16": 15, "int32": 31, "int64": 63,
             "float32": 24, "float64": 53}  # fmt: skip


def round_to(value: float, dtype: str) -> bool | int | float:
    """`value` as the dtype holds it: wrapped for integers, rounded for floats."""
    if dtype == "bool":
        return bool(value)
    if is_float(dtype):
        with np.errstate(over="ignore"):
            return float(np.dtype(dtype).type(value))
    info = np.iinfo(dtype)
    if isinstance(value, float) and not math.isfinite(value):
        value = int(info.min)
    wrapped = int(value) - int(info.min)
    return wrapped % (int(info.max) - int(info.min) + 1) + int(info.min)


class Emitter:
    """A `GraphBuilder` whose `emit` folds constants and applies identities."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.builder = ir.GraphBuilder(inputs)

    def node(self, index: int) -> ir.Node:
        """The node at `index`."""
        return self.builder.nodes[index]

    def const(self, value: float, dtype: str) -> int:
        """A constant of `dtype`, wrapped or rounded to it."""
        return self.builder.add("const", (), dtype, value=round_to(value, dtype))

    def value(self, index: int) -> bool | int | float | None:
        """The value of a constant node, else None."""
        node = self.node(index)
        if node.op != "const":
            return None
        value = node.attr("value")
        assert not isinstance(value, str | tuple)
        return value

    def cast(self, index: int, dtype: str) -> int:
        """The node converted to `dtype`."""
        node = self.node(index)
        if node.dtype == dtype:
            return index
        value = self.value(index)
        if value is not None:
            if category(dtype) == 1 and isinstance(value, float) and math.isfinite(value):
                value = math.trunc(value)
            return self.const(value, dtype)
        if node.op == "cast":
            # int16 -> int64 -> float64 equals int16 -> float64: the first cast is exact.
            inner = self.node(node.args[0])
            if category(inner.dtype) <= category(node.dtype) and (
                _EXACT_IN[inner.dtype] <= _EXACT_IN[node.dtype]
                and not (node.dtype == "uint8" and inner.dtype.startswith("int"))  # -1 is 255
                and category(dtype) >= category(node.dtype)
            ):
                return self.cast(node.args[0], dtype)
        if node.op == "broadcast":
            inner_cast = self.cast(node.args[0], dtype)
            return self.emit("broadcast", (inner_cast,), dtype, node.shape, **dict(node.attrs))
        return self.builder.add("cast", (index,), dtype, node.shape)

    def emit(
        self, op: str, args: Sequence[int], dtype: str, shape: tuple[int, ...] = (), **attrs: Any
    ) -> int:
        """The node for `op`, simplified; its arguments already share the right dtype."""
        values = [self.value(a) for a in args]
        if args and op in _NUMPY and all(v is not None for v in values):
            folded = self._fold(op, args, values, dtype)
            if folded is not None:
                return folded
        # Constants on the right; else the older node on the left: `k <= q` is `q >= k`.
        ordered = values[1:] != [None] or values[0] is None and args[0] <= args[1]
        if op in _COMMUTATIVE and not ordered:
            args, values = (args[1], args[0]), [values[1], values[0]]
        elif op in _FLIPPED and not ordered:
            op, args, values = _FLIPPED[op], (args[1], args[0]), [values[1], values[0]]
        simple = self._simplify(op, args, values, dtype, shape)
        if simple is not None:
            return simple
        return self.builder.add(op, args, dtype, shape, **attrs)

    def _fold(self, op: str, args: Sequence[int], values: Sequence[Any], dtype: str) -> int | None:
        arrays = [np.asarray(v, self.node(a).dtype) for a, v in zip(args, values, strict=True)]
        integer_division = op in INTEGER_DIVISIONS
        if integer_division and not is_float(dtype) and values[1] == 0:
            return None
        if op == "pow" and not is_float(dtype) and values[1] < 0:
            return None
        with np.errstate(all="ignore"):
            result = _NUMPY[op](*arrays)
        return self.const(result.item(), dtype)

    def _simplify(
        self, op: str, args: Sequence[int], values: Sequence[Any], dtype: str, shape: Any
    ) -> int | None:
        if op == "where":
            return self._simplify_where(args, values, shape)
        if op in ("not", "neg"):
            return self._simplify_unary(op, args[0], dtype, shape)
        if len(args) != 2 or self.node(args[0]).shape != shape:
            return None
        first, second = args
        c = values[1]
        integer = not is_float(self.node(first).dtype)
        if op in ("and", "or", "minimum", "maximum") and first == second:
            return first
        if integer and first == second:
            if op in ("eq", "ge", "le"):
                return self.const(1, "bool") if not shape else None
            if op in ("ne", "gt", "lt"):
                return self.const(0, "bool") if not shape else None
            if op in ("sub", "xor") and not shape:
                return self.const(0, dtype)
        if c is None or isinstance(c, float) and math.isnan(c):
            return None
        if c == 1 and (op in ("mul", "div") or integer and op in ("floordiv", "truncdiv")):
            return first
        if op == "sub" and c == 0 and not (is_float(dtype) and math.copysign(1, c) < 0):
            return first
        if op == "add" and c == 0 and (integer or math.copysign(1, c) < 0):
            return first
        if integer and op in ("shl", "shr", "or", "xor") and c == 0 and dtype != "bool":
            return first
        if dtype == "bool" and op in ("and", "or", "xor"):
            if op == "xor":
                return self.emit("not", (first,), "bool", shape) if c else first
            absorbing = c is (op == "or")
            return (second if not shape else None) if absorbing else first
        if integer and not shape and c == 0 and op in ("mul", "and"):
            return second
        if self.node(first).dtype == "bool" and op in ("eq", "ne"):
            keep = (op == "eq") == bool(c)
            return first if keep else self.emit("not", (first,), "bool", shape)
        return None

    def _simplify_where(self, args: Sequence[int], values: Sequence[Any], shape: Any) -> int | None:
        picked = None
        if values[0] is not None:
            picked = args[1] if values[0] else args[2]
        elif args[1] == args[2]:
            picked = args[1]
        if picked is not None and self.node(picked).shape == shape:
            return picked
        return None

    def _simplify_unary(self, op: str, arg: int, dtype: str, shape: Any) -> int | None:
        inner = self.node(arg)
        if inner.op == op:
            return inner.args[0]
        if op == "not" and dtype == "bool":
            # With NaN, the negation of a float comparison is not the opposite comparison.
            integers = all(not is_float(self.node(a).dtype) for a in inner.args)
            opposite = (_NEGATED_INT if integers else _NEGATED).get(inner.op)
            if opposite is not None:
                return self.emit(opposite, inner.args, "bool", shape)
        return None


# --- captured tensors ----------------------------------------------------------------------------

_WHOLE = slice(None)
_ONE_VECTOR = (
    "index with one element per dim; in a hook of rows one index may be a vector of integers "
    "(`t[b, q_idx, numbers]`), with an element for every other dim"
)


def materialise(t: Tracer, c: Captured) -> HostTensor:
    """The prelude tensor of a captured tensor whose indices are all known at bind time."""
    if all(i is None for i in c.index):
        return c.host
    where = tuple(_WHOLE if i is None else i for i in c.index)
    return t.run_host(torch.Tensor.__getitem__, (c.host, where), {})  # type: ignore[no-any-return]


def index(t: Tracer, c: Captured, items: Any) -> Captured | Value:
    """``c[items]``: indexed lazily by values of the hook, else a view that the prelude makes."""
    parts = list(items) if isinstance(items, tuple) else [items]
    if not c.on_host or any(isinstance(p, Value) for p in parts):
        parts = [_vector(t, p) for p in parts]
    vectors = [i for i, p in enumerate(parts) if isinstance(p, Value) and math.prod(p.shape) != 1]
    if vectors:
        return _lookup(t, c, parts, vectors[0])
    parts = [_scalar_index(t, p) for p in parts]
    if not any(isinstance(p, Value) for p in parts):
        if not c.on_host or all(type(p) in (int, Number) for p in parts):
            return _assign(t, c, parts)
        pinned = tuple(_pinned(p) for p in parts)
        return Captured(t.run_host(torch.Tensor.__getitem__, (materialise(t, c), pinned), {}))
    return _assign(t, c, parts)


def _vector(t: Tracer, part: Any) -> Any:
    """A list or a 1-D tensor of integers as a value, which a hook of rows may have as an index."""
    if isinstance(part, list) and part and all(type(i) in (int, Number) for i in part):
        part = Captured(t.run_host(torch.tensor, ([int(i) for i in part],), {}))
    if isinstance(part, Captured) and part.ndim == 1:
        dtype = VALUE_DTYPES.get(part.dtype, "bool")
        return load(t, part) if dtype != "bool" and category(dtype) == 1 else part
    return part


def _lookup(t: Tracer, c: Captured, parts: list[Any], at: int) -> Value:
    """``c[..., x, ...]`` with a vector x: an element for each of its entries, in hooks of rows."""
    x = parts.pop(at)
    if x.name == "bool" or category(x.name) != 1:
        t.refuse(f"an index of dtype {x.name}", "use integers: `table[row.to(torch.int32)]`")
    others = [_scalar_index(t, p) for p in parts]
    if not t.of_row or len(x.shape) != 1 or len(parts) + 1 != len(c.free) or any(
        p is None or p is Ellipsis or isinstance(p, slice) for p in parts
    ):  # fmt: skip
        t.refuse("an index that is a vector", _ONE_VECTOR)
    axis = c.free[at]
    order = [*(d for d in range(len(c.index)) if d != axis), axis]
    if order != sorted(order):  # a view with that dim at the end
        host = t.run_host(torch.Tensor.permute, (c.host, tuple(order)), {})
        c = Captured(host, tuple([c.index[d] for d in order]))
    c = _assign(t, c, [*others, _WHOLE])
    dtype = VALUE_DTYPES.get(c.host.dtype)
    if dtype is None or c.free != (len(c.index) - 1,):
        t.refuse(f"a lookup in {c.host.name!r}, of {c.host.dtype}", "look up in the last dim")
    nodes = [*(_index_node(t, i) for i in c.index[:-1]), x.node]
    slot = t.tensor_slot(c.host, {})
    return Value(
        t.emitter.emit("lookup", nodes, dtype, (math.prod(x.shape),), slot=slot), dtype, x.shape
    )


def _pinned(part: Any) -> Any:
    if isinstance(part, Captured):
        return materialise(tracer(), part)
    return map_tree(part, pinned) if isinstance(part, slice) else pinned(part)


def _scalar_index(t: Tracer, part: Any) -> Any:
    """An element of an index tuple; 0-dim captured tensors become values."""
    if isinstance(part, Captured) and part.ndim == 0:
        part = load(t, part)
    if isinstance(part, Captured) and not part.on_host:
        t.refuse(
            "an index that is itself a row of a tensor", "index with one element: `t[rows[q, 0]]`"
        )
    if isinstance(part, Value):
        if part.name == "bool" or category(part.name) != 1:
            t.refuse(
                f"an index of dtype {part.name}",
                "use an integer index; a boolean one would give a shape that depends on data",
            )
        if math.prod(part.shape) != 1:
            t.refuse("an index that is a vector", _ONE_VECTOR)
    return part


def _assign(t: Tracer, c: Captured, parts: list[Any]) -> Captured:
    """`c` with indices for its free dims; slices narrow the host tensor."""
    free = list(c.free)
    given = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if given > len(free):
        t.refuse(
            f"{given} indices for {c.host.name!r}, which has {len(free)} dims left",
            "give at most one index per dim",
        )
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    if at is not None:
        parts = [*parts[:at], *[_WHOLE] * (len(free) - given), *parts[at + 1 :]]
    host, where = c.host, list(c.index)
    for part in parts:
        if part is None:
            t.refuse("`None` in an index next to a tensor", "add the dim before: `t[:, None]`")
        dim = free.pop(0)
        if isinstance(part, slice):
            if part != _WHOLE:
                cut = (*[_WHOLE] * dim, _pinned(part))
                host = t.run_host(torch.Tensor.__getitem__, (host, cut), {})
        elif isinstance(part, Value) or type(part) in (int, Number):
            where[dim] = part
        elif isinstance(part, bool | torch.Tensor | list | Captured):
            t.refuse("an index that mixes positions with lists or masks", _ONE_VECTOR)
        else:
            where[dim] = int(part)
    return Captured(host, tuple(where))


def load(t: Tracer, c: Captured) -> Value:
    """The indexed element, or the free dims as a short vector, as a value of the hook."""
    dtype = VALUE_DTYPES.get(c.host.dtype)
    if dtype is None:
        t.refuse(
            f"{c.host.name!r}, a tensor of {c.host.dtype}",
            "capture bool, uint8, int8 to int64, half, bfloat16, float8, float32 or float64",
        )
    host, where = c.host, list(c.index)
    free = list(c.free)
    shape = tuple(int(host.shape[d]) for d in free)
    count = math.prod(shape)
    if free:
        if count > t.max_elements or count == 0:
            t.refuse(
                f"{count} elements of {host.name!r} (shape {list(shape)}) at once",
                f"index it down: a hook of this kind holds vectors of at most {t.max_elements} "
                "elements",
            )
        t.pin_sizes(host, free)
        indexed = [d for d in range(len(where)) if d not in free]
        if free != list(range(len(indexed), len(where))):
            host = t.run_host(torch.Tensor.permute, (host, (*indexed, *free)), {})
            where = [where[d] for d in indexed] + [None] * len(free)
        if len(free) > 1:
            host = t.run_host(torch.Tensor.flatten, (host, len(indexed)), {})
            where = [*where[: len(indexed)], None]
        if count == 1:
            where[-1] = 0
    nodes = [_index_node(t, i) for i in where if i is not None]
    sizes = {len(where) - 1: count} if count > 1 else {}
    slot = t.tensor_slot(host, sizes)
    inner = (count,) if count > 1 else ()
    node = t.emitter.emit("gather", nodes, dtype, inner, slot=slot)
    return Value(node, dtype, shape)


def _index_node(t: Tracer, i: Any) -> int:
    if type(i) is int:
        return t.emitter.const(i, "int64" if abs(i) >= 2**31 else "int32")
    return val(i).node


@op("embedding", elementwise=False)
def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Captured | Value:
    t = tracer()
    if max_norm is not None:
        t.refuse("an embedding with max_norm", "it writes to the weight; scale that before")
    if not isinstance(weight, Captured):
        t.refuse("an embedding of a computed weight", "capture the weight: `weight[index]`")
    return index(t, weight, input)


@op("searchsorted", elementwise=False)
def _searchsorted(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Any = None,
) -> Value:  # fmt: skip
    t = tracer()
    if side is not None:
        right = side == "right"
    if not isinstance(sorted_sequence, Captured) or not sorted_sequence.on_host or (
        sorted_sequence.ndim != 1 or sorter is not None
    ):  # fmt: skip
        t.refuse(
            "searchsorted in something that is not a captured 1-D tensor",
            "capture the sorted tensor, one dim, without a sorter",
        )
    host = materialise(t, sorted_sequence)
    dtype = VALUE_DTYPES.get(host.dtype)
    x = val(input)
    if dtype is None or math.prod(x.shape) != 1:
        t.refuse("searchsorted of a vector", "search one value at a time")
    if category(x.name) != category(dtype) or category(dtype) == 2:
        x = cast(x, dtype)
    slot = t.tensor_slot(host, {})
    node = t.emitter.emit("searchsorted", [x.node], "int64", (), slot=slot, right=right)
    found = Value(node, "int64", x.shape)
    return cast(found, "int32") if out_int32 else found


@op("bucketize", elementwise=False)
def _bucketize(
    input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _searchsorted(boundaries, input, out_int32=out_int32, right=right)
