"""Elementwise operations: how torch functions in hooks become IR.

`op` registers the handler of a torch function or Tensor method. The rules for dtypes are torch's:
`ir.result_dtype` for arithmetic, float32 for the transcendental functions of integers. In order:
operands, arithmetic, comparisons and logic, functions of one argument, conversions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from flashattn_jit.variants.ir.dtypes import VALUE_DTYPES
from flashattn_jit.variants.ir.ir import FLOAT_FUNCTIONS, category, is_float, result_dtype
from flashattn_jit.variants.trace.positions import (
    ANY_INT32,
    MOST_NUMBER,
    Bound,
    bound_of,
    fits_int32,
)
from flashattn_jit.variants.trace.values import (
    HALVES,
    HANDLERS,
    Captured,
    Handler,
    Number,
    Shape,
    Value,
    tracer,
)

ELEMENTWISE: set[str] = set()
"""Handlers whose result has the strides of its tensor operands, whatever numbers they take."""

_F = TypeVar("_F", bound=Handler)


def op(*names: str, elementwise: bool = True) -> Callable[[_F], _F]:
    """Register a handler for the torch functions of these names."""

    def register(fn: _F) -> _F:
        for name in names:
            HANDLERS[name] = fn
            if elementwise:
                ELEMENTWISE.add(name)
        return fn

    return register


# --- operands ----------------------------------------------------------------------------------


def val(x: Any) -> Value:
    """Any operand as a `Value`; Python numbers are weak."""
    return x if type(x) is Value else tracer().as_value(x)


def cast(x: Value, dtype: str) -> Value:
    """The value converted to a dtype. An int64 of positions becomes int32, or int64, as any."""
    return Value(tracer().emitter.cast(x.node, dtype), dtype, x.shape)


def const(value: float, dtype: str) -> Value:
    """A 0-dim constant."""
    return Value(tracer().emitter.const(value, dtype), dtype)


def node_shape(shape: Shape) -> Shape:
    """The IR shape of a logical shape: one element is a scalar."""
    count = math.prod(shape)
    return () if count == 1 else (count,)


def common_dtype(*xs: Value) -> str:
    """torch's result dtype of the operands."""
    return result_dtype(
        ("int64" if x.bound is not None else x.name, len(x.shape), x.weak) for x in xs
    )


def emit(name: str, xs: tuple[Value, ...], dtype: str, **attrs: Any) -> Value:
    """An elementwise node over operands broadcast to one shape.

    Integers of positions whose result may not fit int32 become int64.
    """
    t = tracer()
    bound = None
    if dtype == "int32" and any(x.bound is not None for x in xs):
        bound = _bound_of(name, xs)
        if bound is None:
            dtype, xs = "int64", tuple(x if x.name == "bool" else cast(x, "int64") for x in xs)
    shape: Shape = xs[0].shape
    if any(x.shape != shape for x in xs):
        shape = t.broadcast_shape([x.shape for x in xs])
        xs = tuple(t.expand(x, shape) for x in xs)
    # Scalars stay scalar nodes, whatever shape they stand for.
    wide = any(t.emitter.node(x.node).shape for x in xs)
    inner = node_shape(shape) if wide else ()
    node = t.emitter.emit(name, [x.node for x in xs], dtype, inner, **attrs)
    return Value(node, dtype, shape, bound=bound)


def _bound_of(name: str, xs: tuple[Value, ...]) -> Bound | None:
    """The bound of an operation of positions; None if it may not fit int32.

    Specialises on captured numbers where it fits for their values alone.
    """
    t = tracer()
    xs = tuple(x for x in xs if x.name != "bool")
    if any(x.name != "int32" for x in xs):
        return None
    constants: list[int | None] = []
    numbers: list[int | None] = []
    for x in xs:
        c, number = t.emitter.value(x.node), t.number_of(x.node)
        constants.append(None if c is None else int(c))
        numbers.append(constants[-1] if number is None else int(number.value))
    bound = bound_of(name, [magnitude(x) for x in xs], constants, numbers)
    if fits_int32(bound.most):
        return bound
    if not fits_int32(bound.now):
        return None
    t.specialise_bound(bound.sources)
    return Bound(bound.now, bound.now)


def magnitude(x: Value) -> Bound:
    """The bound of an int32 value."""
    t = tracer()
    if (c := t.emitter.value(x.node)) is not None:
        return Bound(abs(int(c)), abs(int(c)))
    if (number := t.number_of(x.node)) is not None:
        now = int(abs(number.value))
        return Bound(max(MOST_NUMBER, now), now, number.sources)
    if x.bound is not None:
        return x.bound
    node = t.emitter.node(x.node)
    bits = _BITS.get(t.emitter.node(node.args[0]).dtype) if node.op == "cast" else None
    return ANY_INT32 if bits is None else Bound(1 << bits, 1 << bits)


_BITS = {"bool": 0, "uint8": 8, "int8": 7, "int16": 15}
"""Bits of the magnitudes of integers that have fewer than 32."""


def stored(target: Value, new: Value) -> Value:
    """`new` in the dtype of `target`, which may be an int64 of positions."""
    if target.bound is None:
        return cast(new, target.name)
    c = tracer().emitter.value(new.node)
    if c is not None and math.isfinite(c) and fits_int32(int(abs(c))):
        return _position(new)
    return _position(new) if _may_be_int32(new) else cast(new, "int64")


def _may_be_int32(x: Value) -> bool:
    """Whether an operand may be int32 in a formula of positions."""
    if x.bound is not None or x.name == "int32" or x.name in _BITS:
        return True
    return x.weak and category(x.name) == 1 and not _is_beyond_int32(x)


def _position(x: Value) -> Value:
    """The value as an int64 of positions, computed as int32."""
    made = cast(x, "int32")
    made.bound = magnitude(made) if x.bound is None else x.bound
    return made


def as_positions(dtype: str, xs: Sequence[Value]) -> tuple[Value, ...] | None:
    """Operands of an int64 formula of positions as int32; None for other ones."""
    if dtype != "int64" or all(x.bound is None for x in xs) or not all(map(_may_be_int32, xs)):
        return None
    return tuple(map(_position, xs))


def aligned(*xs: Any) -> tuple[str, tuple[Value, ...]]:
    """The common dtype of operands, and the operands converted to it."""
    values = tuple(val(x) for x in xs)
    dtype = common_dtype(*values)
    positions = as_positions(dtype, values)
    if positions is not None:
        return "int32", positions
    for x in values:
        if x.weak and category(dtype) == 1:
            _check_range(x, dtype)
    return dtype, tuple(cast(x, dtype) for x in values)


def _is_beyond_int32(x: Value) -> bool:
    """Whether a number is, in this trace, or may be in a sum with a position."""
    if (number := tracer().number_of(x.node)) is not None:
        return abs(number.value) > MOST_NUMBER
    constant = tracer().emitter.value(x.node)
    return constant is not None and not fits_int32(int(abs(constant)))


def promoted(x: Value, *others: Value) -> Value:
    """The value in the common dtype of all."""
    dtype = common_dtype(x, *others)
    of_positions = dtype == "int64" and any(y.bound is not None for y in (x, *others))
    return _position(x) if of_positions and _may_be_int32(x) else cast(x, dtype)


def _check_range(x: Value, dtype: str) -> None:
    value = tracer().emitter.value(x.node)
    if value is not None:
        info = torch.iinfo(getattr(torch, dtype))
        # As in torch, negative numbers wrap in unsigned dtypes.
        if not (info.min or -info.max) <= value <= info.max:
            tracer().refuse(
                f"the number {value} with a tensor of {dtype}",
                f"convert the tensor first: `x.long()` ({dtype} holds {info.min} to {info.max})",
            )


def as_float(x: Any) -> Value:
    """The operand in a floating dtype: integers become float32."""
    value = val(x)
    dtype = common_dtype(value)
    return cast(value, dtype if is_float(dtype) else "float32")


def logical(x: Any) -> Value:
    """The operand as a bool: whether it is not zero."""
    return cast(val(x), "bool")


# --- arithmetic --------------------------------------------------------------------------------

_BOOL_ARITHMETIC = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


def binary(name: str, input: Any, other: Any) -> Value:
    """An arithmetic operation after promotion."""
    first, second = val(input), val(other)
    if name == "sub" and "bool" in (first.name, second.name):
        tracer().refuse("`-` of booleans", "convert with `.int()` or use `^`, `&`, `|`")
    dtype, (x, y) = aligned(first, second)
    if dtype == "bool":
        name = _BOOL_ARITHMETIC[name]
    return emit(name, (x, y), dtype)


def _scaled(name: str, input: Any, other: Any, alpha: Any = 1) -> Value:
    if type(alpha) is int and alpha == 1:  # comparing a Number would specialise on it
        return binary(name, input, other)
    x, y = val(input), val(other)
    return binary(name, x, binary("mul", promoted(y, x), alpha))


@op("div", "divide", "true_divide")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    """torch.div: a true division gives a float."""
    if rounding_mode in ("floor", "trunc"):
        return _integer_division(f"{rounding_mode}div", input, other)
    return _of_floats("div", input, other)


def _of_floats(name: str, input: Any, other: Any) -> Value:
    dtype, (x, y) = aligned(input, other)
    dtype = dtype if is_float(dtype) else "float32"
    return emit(name, (cast(x, dtype), cast(y, dtype)), dtype)


def _integer_division(name: str, input: Any, other: Any) -> Value:
    divisor = val(other)
    if tracer().emitter.value(divisor.node) == 0 and not is_float(divisor.name):
        tracer().refuse("integer division by the constant zero", "use a divisor that is not zero")
    dtype, (x, y) = aligned(input, divisor)
    if dtype == "bool":
        tracer().refuse(f"{name} of booleans", "convert with `.int()` first")
    return emit(name, (x, y), dtype)


@op("float_power")
def _float_power(input: Any, exponent: Any) -> Value:
    """torch.float_power: both as float64, whatever they are."""
    power = val(exponent)
    return _pow(cast(val(input), "float64"), power if power.weak else cast(power, "float64"))


@op("pow")
def _pow(input: Any, exponent: Any) -> Value:
    if type(exponent) is Number and type(exponent.value) is int:
        exponent = exponent.pin()
    base, power = val(input), val(exponent)
    dtype = common_dtype(base, power)
    x, to = cast(base, dtype), cast(power, dtype)
    if (positions := as_positions(dtype, (base, power))) is not None:
        dtype, (x, to) = "int32", positions
    c = tracer().emitter.value(power.node) if power.weak else None
    if c is not None:
        if not is_float(dtype) and c < 0:
            tracer().refuse("an integer to a negative power", "convert with `.float()` first")
        simple = _constant_power(x, c, dtype)
        if simple is not None:
            return simple
    if base.weak and is_float(dtype) and tracer().emitter.value(base.node) == 2:
        return emit("exp2", (to,), dtype)
    return emit("pow", (x, to), dtype)


def _constant_power(x: Value, c: float, dtype: str) -> Value | None:
    if c == 0.5:
        return emit("sqrt", (x,), dtype)
    if c == -0.5:
        return emit("rsqrt", (x,), dtype)
    if c != int(c) or abs(c) > 8:
        return None
    if c < 0:
        inverse = _constant_power(x, -c, dtype)
        assert inverse is not None
        return div(1, inverse)
    if c == 0:
        return tracer().expand(stored(x, const(1, dtype)), x.shape)
    half = x
    if c > 1:
        root = _constant_power(x, c // 2, dtype)
        assert root is not None
        half = emit("mul", (root, root), root.name)
    if c <= 1 or c % 2 == 0:
        return half
    return emit("mul", (half, cast(x, half.name)), half.name)


@op("clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Value:
    dtype, (result, *bounds) = aligned(input, *(x for x in (min, max) if x is not None))
    if min is not None:
        result = emit("maximum", (result, bounds[0]), dtype)
    if max is not None:
        result = emit("minimum", (result, bounds[-1]), dtype)
    return result


@op("hardtanh")
def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Value:
    x = val(input)  # as in torch, an integer is not converted for bounds that are floats
    return _clamp(x, stored(x, val(min_val)), stored(x, val(max_val)))


@op("clamp_min")
def _clamp_min(input: Any, min: Any) -> Value:
    return _clamp(input, min=min)


@op("clamp_max")
def _clamp_max(input: Any, max: Any) -> Value:
    return _clamp(input, max=max)


# --- comparisons and logic ---------------------------------------------------------------------


def compare(name: str, input: Any, other: Any) -> Any:
    """A comparison after promotion; booleans are ordered as 0 and 1."""
    if input is None or other is None:
        return name == "ne"
    dtype, (x, y) = aligned(input, other)
    if dtype == "bool" and name not in ("eq", "ne"):
        x, y = cast(x, "int32"), cast(y, "int32")
    return emit(name, (x, y), "bool")


def _bitwise(name: str, input: Any, other: Any) -> Value:
    dtype, (x, y) = aligned(input, other)
    if is_float(dtype):
        tracer().refuse(f"`{name}` of floating values", "compare first, then combine the booleans")
    return emit(name, (x, y), dtype)


def _logical(name: str, input: Any, other: Any) -> Value:
    return emit(name, (logical(input), logical(other)), "bool")


@op("bitwise_not", "__invert__")
def _not(input: Any) -> Value:
    value = val(input)
    if is_float(value.name):
        tracer().refuse("`~` of a floating value", "compare first, then invert the boolean")
    return emit("not", (value,), value.name)


@op("logical_not")
def _logical_not(input: Any) -> Value:
    return emit("not", (logical(input),), "bool")


@op("where")
def where(condition: Any, input: Any = None, other: Any = None) -> Value:
    """torch.where with three arguments."""
    if input is None or other is None:
        tracer().refuse("`where` with one argument", "give both branches: where(cond, a, b)")
    chosen = val(condition)
    if chosen.name != "bool":
        tracer().refuse("`where` on a condition that is not boolean", "compare it: `x != 0`")
    dtype, (a, b) = aligned(input, other)
    return emit("where", (chosen, a, b), dtype)


@op("masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Value:
    x = val(input)
    filler = stored(x, val(value))
    kept = x if x.name == filler.name else cast(x, filler.name)
    return emit("where", (logical(mask), filler, kept), filler.name)


# --- the operations of two arguments -----------------------------------------------------------


def _reflected(handler: Handler) -> Handler:
    """The handler of ``input.__rsub__(other)``, made from that of ``input - other``."""

    @wraps(handler)
    def reflected(input: Any, other: Any, *rest: Any, **named: Any) -> Any:
        return handler(other, input, *rest, **named)

    return reflected


_PAIRS: Mapping[tuple[str, ...], Handler] = {
    ("add",): partial(_scaled, "add"),
    ("sub", "subtract"): partial(_scaled, "sub"),
    ("mul", "multiply"): partial(binary, "mul"),
    ("maximum",): partial(binary, "maximum"),
    ("minimum",): partial(binary, "minimum"),
    ("floor_divide",): partial(_integer_division, "floordiv"),
    ("remainder",): partial(_integer_division, "remainder"),
    ("fmod",): partial(_integer_division, "fmod"),
    ("atan2", "arctan2"): partial(_of_floats, "atan2"),
    ("ge", "greater_equal"): partial(compare, "ge"),
    ("gt", "greater"): partial(compare, "gt"),
    ("le", "less_equal"): partial(compare, "le"),
    ("lt", "less"): partial(compare, "lt"),
    ("eq",): partial(compare, "eq"),
    ("ne", "not_equal"): partial(compare, "ne"),
    ("bitwise_and",): partial(_bitwise, "and"),
    ("bitwise_or",): partial(_bitwise, "or"),
    ("bitwise_xor",): partial(_bitwise, "xor"),
    ("bitwise_left_shift",): partial(_bitwise, "shl"),
    ("bitwise_right_shift",): partial(_bitwise, "shr"),
    ("logical_and",): partial(_logical, "and"),
    ("logical_or",): partial(_logical, "or"),
    ("logical_xor",): partial(_logical, "xor"),
}
_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "pow": "pow",
    "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip


for _names, _handler in _PAIRS.items():
    op(*_names)(_handler)
for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    op(f"__{_name}__")(HANDLERS[_name])
for _symbol, _name in _OPERATORS.items():
    op(f"__{_symbol}__", f"__i{_symbol}__")(HANDLERS[_name])
    op(f"__r{_symbol}__")(_reflected(HANDLERS[_name]))
op("rsub")(_reflected(HANDLERS["sub"]))


# --- functions of one argument -------------------------------------------------------------------

_FLOAT_ALIASES = {"special_expit": "sigmoid", "arcsin": "asin", "arccos": "acos",
                  "arctan": "atan", "special_exp2": "exp2", "special_expm1": "expm1",
                  "special_erf": "erf", "special_log1p": "log1p"}  # fmt: skip


def _of_float(name: str, input: Any) -> Value:
    x = as_float(input)
    return emit(name, (x,), x.name)


def _rounding(name: str, input: Any, *, decimals: int = 0) -> Value:
    x = val(input)
    if decimals:
        tracer().refuse("round to decimals", "multiply, round and divide")
    return emit(name, (x,), x.name) if is_float(x.name) else _same(x)


def _test(name: str, input: Any) -> Value:
    x = val(input)
    if is_float(x.name):
        return emit(name, (x,), "bool")
    return tracer().expand(const(0, "bool"), x.shape)


for _name in FLOAT_FUNCTIONS:
    op(_name)(partial(_of_float, _name))
for _alias, _name in _FLOAT_ALIASES.items():
    op(_alias)(HANDLERS[_name])
for _name in ("floor", "ceil", "trunc", "round"):
    op(_name, f"__{_name}__")(partial(_rounding, _name))
op("fix")(HANDLERS["trunc"])
op("isnan")(partial(_test, "isnan"))
op("isinf")(partial(_test, "isinf"))


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
    return _same(x) if x.name in ("bool", "uint8") else emit("abs", (x,), x.name)


@op("sign", "sgn")
def _sign(input: Any) -> Value:
    x = val(input)
    return _same(x) if x.name == "bool" else emit("sign", (x,), x.name)


# --- conversions -----------------------------------------------------------------------------


def to_dtype(x: Value, dtype: torch.dtype) -> Value:
    """A conversion that the hook asks for; half precision becomes float32."""
    name = VALUE_DTYPES.get(dtype)
    if name is None:
        tracer().refuse(f"conversion to {dtype}", "use bool, int8-64, uint8, float32 or float64")
    return cast(x, name)  # int32 that the hook asks for wraps


@op("to")
def _to(input: Any, *args: Any, **kwargs: Any) -> Value:
    x = val(input)
    for a in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(a, torch.dtype) or hasattr(a, "dtype"):
            converted = _type(x, a if isinstance(a, torch.dtype) else _dtype_of(a))
            break
    else:
        converted = x
    # to(dtype, non_blocking, copy), to(other, non_blocking, copy), to(device, dtype, ...)
    at = 2 if args and (isinstance(args[0], torch.dtype) or hasattr(args[0], "dtype")) else 3
    copies = kwargs.get("copy") or any(args[at:])
    if copies and converted is x:
        return x.now()
    return converted


@op("type_as")
def _type_as(input: Any, other: Any) -> Value:
    return _type(input, _dtype_of(other))


def _dtype_of(x: Any) -> Any:
    return x.torch_dtype if isinstance(x, Value | Captured) else x.dtype


@op("type")
def _type(input: Any, dtype: Any) -> Value:
    x = val(input)
    if x.torch_dtype == dtype and not x.weak:
        return x  # as torch: the same tensor
    made = to_dtype(x, dtype)
    made.half_dtype = dtype if dtype in HALVES else None
    return made


for _name, _dtype in {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "short": torch.int16,
    "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}.items():  # fmt: skip
    op(_name)(partial(_type, dtype=_dtype))


@op("cpu", "cuda", "requires_grad_", "lift_fresh", "resolve_conj", "resolve_neg", "clone")
def _same(input: Any, *args: Any, **kwargs: Any) -> Value:
    return val(input)
