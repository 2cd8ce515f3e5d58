"""Adds nodes to a traced graph: canonical arithmetic.

`Emitter` folds constants and applies simple identities. Folding computes in the node's dtype, as
the kernel does; identities on floats are applied only where they hold for all values, infinities,
NaN and signed zeros included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.ir.ir import INTEGER_DIVISIONS, category, is_float

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
