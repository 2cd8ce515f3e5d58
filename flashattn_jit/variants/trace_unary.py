"""Elementwise functions of one argument, and conversions between dtypes."""

from __future__ import annotations

from typing import Any

import torch

from flashattn_jit.variants.ir import is_float
from flashattn_jit.variants.trace_ops import (
    aligned,
    as_float,
    binary,
    cast,
    const,
    div,
    emit,
    op,
    to_dtype,
    val,
)
from flashattn_jit.variants.trace_values import Value, tracer

# --- functions of one argument -------------------------------------------------------------------

_FLOAT_FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf",
)  # fmt: skip
_FLOAT_ALIASES = {"special_expit": "sigmoid", "arcsin": "asin", "arccos": "acos",
                  "arctan": "atan", "special_exp2": "exp2", "special_expm1": "expm1",
                  "special_erf": "erf", "special_log1p": "log1p"}  # fmt: skip


def _register_unary() -> None:
    for name in _FLOAT_FUNCTIONS:

        def function(input: Any, _name: str = name) -> Value:
            x = as_float(input)
            return emit(_name, (x,), x.name)

        aliases = [a for a, target in _FLOAT_ALIASES.items() if target == name]
        op(name, *aliases)(function)
    for name in ("floor", "ceil", "trunc", "round"):

        def rounding(input: Any, *, decimals: int = 0, _name: str = name) -> Value:
            x = val(input)
            if decimals:
                tracer().refuse("round to decimals", "multiply, round and divide")
            return emit(_name, (x,), x.name) if is_float(x.name) else cast(x, x.name)

        op(name, "fix" if name == "trunc" else name, f"__{name}__")(rounding)
    for name in ("isnan", "isinf"):

        def test(input: Any, _name: str = name) -> Value:
            x = val(input)
            if is_float(x.name):
                return emit(_name, (x,), "bool")
            return tracer().expand(const(0, "bool"), x.shape)

        op(name)(test)


_register_unary()


@op("neg", "negative", "__neg__")
def _neg(input: Any) -> Value:
    x = val(input)
    if x.name == "bool":
        tracer().refuse("`-` of a boolean", "use `~` for not, or `.int()` first")
    return emit("neg", (x,), x.name)


@op("positive", "__pos__")
def _positive(input: Any) -> Value:
    return val(input)


@op("abs", "absolute", "__abs__")
def _abs(input: Any) -> Value:
    x = val(input)
    return x if x.name in ("bool", "uint8") else emit("abs", (x,), x.name)


@op("sign", "sgn")
def _sign(input: Any) -> Value:
    x = val(input)
    return x if x.name == "bool" else emit("sign", (x,), x.name)


@op("atan2", "arctan2")
def _atan2(input: Any, other: Any) -> Value:
    dtype, (x, y) = aligned(input, other)
    dtype = dtype if is_float(dtype) else "float32"
    return emit("atan2", (cast(x, dtype), cast(y, dtype)), dtype)


@op("reciprocal")
def _reciprocal(input: Any) -> Value:
    return div(1, as_float(input))


@op("square")
def _square(input: Any) -> Value:
    return binary("mul", input, input)


# --- conversions -------------------------------------------------------------------------------


@op("to")
def _to(input: Any, *args: Any, **kwargs: Any) -> Value:
    x = val(input)
    for a in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(a, torch.dtype):
            return to_dtype(x, a)
        if hasattr(a, "dtype"):
            return to_dtype(x, a.dtype)
    return x


@op("type_as")
def _type_as(input: Any, other: Any) -> Value:
    return to_dtype(val(input), other.dtype)


@op("type")
def _type(input: Any, dtype: Any) -> Value:
    return to_dtype(val(input), dtype)


def _register_conversions() -> None:
    for name, dtype in {
        "float": torch.float32, "double": torch.float64, "half": torch.float32,
        "bfloat16": torch.float32, "int": torch.int32, "long": torch.int64,
        "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
    }.items():  # fmt: skip

        def convert(input: Any, _dtype: torch.dtype = dtype) -> Value:
            return to_dtype(val(input), _dtype)

        op(name)(convert)
    for name in ("clone", "detach", "contiguous", "alias", "cpu", "cuda", "requires_grad_",
                 "lift_fresh", "resolve_conj", "resolve_neg"):  # fmt: skip

        def same(input: Any, *args: Any, **kwargs: Any) -> Value:
            x = val(input)
            return Value(x.node, x.name, x.shape)

        op(name)(same)


_register_conversions()
