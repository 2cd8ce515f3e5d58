"""torch functions that are compositions of IR operations: activations, special values, norms.

They are written as in a hook, with the operators and methods of values (`values.attach`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from flashattn_jit.variants.ir.ir import is_float
from flashattn_jit.variants.trace.operations import (
    aligned,
    as_float,
    binary,
    cast,
    compare,
    const,
    div,
    emit,
    logical,
    op,
    promoted,
    stored,
    to_dtype,
    val,
    where,
)
from flashattn_jit.variants.trace.values import HANDLERS, Handler, Value, pinned, tracer
from flashattn_jit.variants.trace.vectors import dims_of, reduce

_FLOAT_MAX = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}


@op("gelu")
def _gelu(input: Any, approximate: str = "none") -> Any:
    x: Any = as_float(input)
    if approximate == "tanh":
        t = ((x + 0.044715 * x**3) * math.sqrt(2 / math.pi)).tanh()
    else:
        t = (x * math.sqrt(0.5)).erf()
    return 0.5 * x * (t + 1)


@op("softplus")
def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    x: Any = as_float(input)
    scaled = x if type(beta) is int and beta == 1 else x * beta
    soft = scaled.exp().log1p()
    return where(scaled > threshold, x, soft if scaled is x else soft / beta)


_OF_VALUE: Mapping[str, Handler] = {
    "relu": lambda input, inplace=False: input.clamp(min=0),
    "relu6": lambda input, inplace=False: input.clamp(min=0, max=6),
    "square": lambda input: input * input,
    "frac": lambda input: input - input.trunc(),
    "isfinite": lambda input: ~(input.isnan() | input.isinf()),
    "isposinf": lambda input: input == math.inf,
    "isneginf": lambda input: input == -math.inf,
    "leaky_relu": lambda input, negative_slope=0.01, inplace=False: where(
        input > 0, input, input * negative_slope
    ),
    "heaviside": lambda input, values: where(input == 0, values, cast(input > 0, input.name)),
    "lerp": lambda input, end, weight: input + weight * (end - input),
    "threshold": lambda input, threshold, value, inplace=False: where(
        input <= threshold, stored(input, val(value)), input
    ),
}
"""Functions of a value of any dtype, with the parameters that torch gives them."""

_OF_FLOAT: Mapping[str, Handler] = {
    "silu": lambda input, inplace=False: input * input.sigmoid(),
    "hardsigmoid": lambda input, inplace=False: (input + 3).clamp(min=0, max=6) / 6,
    "hardswish": lambda input, inplace=False: input * _OF_FLOAT["hardsigmoid"](input),
    "mish": lambda input, inplace=False: input * _softplus(input).tanh(),
    "softsign": lambda input: input / (input.abs() + 1),
    "tanhshrink": lambda input: input - input.tanh(),
    "log_sigmoid": lambda input: input.clamp(max=0) - (-input.abs()).exp().log1p(),
    "erfc": lambda input: 1 - input.erf(),
    "reciprocal": lambda input: 1 / input,
    "deg2rad": lambda input: input * (math.pi / 180),
    "rad2deg": lambda input: input * (180 / math.pi),
    "elu": lambda input, alpha=1.0, inplace=False: where(input > 0, input, input.expm1() * alpha),
    "hypot": lambda input, other: (input * input + _OF_VALUE["square"](as_float(other))).sqrt(),
}
"""The same, with an integer value converted to float32."""

_ALIASES = {
    "silu": ["swish"], "log_sigmoid": ["logsigmoid"], "erfc": ["special_erfc"],
    "threshold": ["_threshold"],
}  # fmt: skip


def _converted(convert: Callable[[Any], Value], formula: Handler) -> Handler:
    @wraps(formula)  # which gives the signature that errors are about
    def handler(input: Any, *others: Any, **named: Any) -> Any:
        return formula(convert(input), *others, **named)

    return handler


for _convert, _formulas in ((val, _OF_VALUE), (as_float, _OF_FLOAT)):
    for _name, _formula in _formulas.items():
        op(_name, *_ALIASES.get(_name, ()))(_converted(_convert, _formula))


@op("logit", "special_logit")
def _logit(input: Any, eps: Any = None) -> Any:
    x: Any = as_float(input)
    if eps is not None:
        x = x.clamp(min=eps, max=1 - eps)
    return (x / (1 - x)).log()


_HUGE = 1e9  # above it, x*x + 1 is x*x in float64 too


@op("asinh", "arcsinh")
def _asinh(input: Any) -> Any:
    x: Any = as_float(input)
    a = x.abs()
    near = (a + a * a / ((a * a + 1).sqrt() + 1)).log1p()
    return HANDLERS["copysign"](where(a > _HUGE, a.log() + math.log(2), near), x)


@op("acosh", "arccosh")
def _acosh(input: Any) -> Any:
    x: Any = as_float(input)
    above = x - 1
    near = (above + (above * above + 2 * above).sqrt()).log1p()
    return where(x < 1, math.nan, where(x > _HUGE, x.log() + math.log(2), near))


@op("atanh", "arctanh")
def _atanh(input: Any) -> Any:
    x: Any = as_float(input)
    a = x.abs()
    return HANDLERS["copysign"](0.5 * (2 * a / (1 - a)).log1p(), x)


@op("logaddexp")
def _logaddexp(input: Any, other: Any) -> Any:
    a: Any = as_float(input)
    b = as_float(other)
    total = binary("maximum", a, b) + (-(a - b).abs()).exp().log1p()
    # For two equal infinities a - b is NaN; the result is the infinity.
    return where((a == b) & a.isinf(), a, total)


@op("xlogy", "special_xlogy")
def _xlogy(input: Any, other: Any) -> Any:
    x: Any = as_float(input)
    y: Any = as_float(other)
    return where(y.isnan(), y, where(x == 0, 0.0, x * y.log()))


@op("copysign")
def _copysign(input: Any, other: Any) -> Any:
    x: Any = as_float(input)
    size, sign = x.abs(), as_float(other)
    # 1 / -0.0 is -inf, which tells -0.0 from 0.0.
    negative = compare("lt", where(compare("eq", sign, 0), div(1, sign), sign), 0)
    return where(negative, -size, size)


@op("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Value:
    x, y, z = val(input), val(tensor1), val(tensor2)
    first = binary("mul", value, promoted(y, x, z))
    return binary("add", x, binary("mul", first, promoted(z, x, y)))


@op("addcdiv")
def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Value:
    return binary("add", input, binary("mul", value, div(tensor1, tensor2)))


@op("nan_to_num")
def _nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    x: Any = val(input)
    if not is_float(x.name):
        return x
    top = _FLOAT_MAX[x.name]

    def chosen(value: Any, default: float) -> Value:
        return const(default, x.name) if value is None else cast(val(value), x.name)

    finite = emit("where", (x.isnan(), chosen(nan, 0.0), x), x.name)
    finite = emit("where", (compare("eq", x, math.inf), chosen(posinf, top), finite), x.name)
    return emit("where", (compare("eq", x, -math.inf), chosen(neginf, -top), finite), x.name)


@op("isin", elementwise=False)
def _isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    x: Any = val(elements)
    tests: Any = val(test_elements)
    shape = x.shape
    if not shape and math.prod(tests.shape) >= 10:
        x = x[None]  # so many are joined with the elements, both as vectors, and sorted
    x, tests = aligned(x, tests)[1]
    same: Any = emit("eq", (x.reshape(-1, 1), tests.reshape(1, -1)), "bool")
    found = same.any(-1).reshape(shape)
    return ~found if invert else found


# --- norms --------------------------------------------------------------------------------------


@op("linalg_vector_norm", elementwise=False)
def _vector_norm(
    input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x: Any = _floats("a norm", input, dtype)
    ord = pinned(ord)
    if ord == 2:
        return reduce("sum", x * x, dim, keepdim).sqrt()  # type: ignore[attr-defined]
    if ord == 1:
        return reduce("sum", x.abs(), dim, keepdim)
    if abs(ord) == math.inf:
        return reduce("amax" if ord > 0 else "amin", x.abs(), dim, keepdim)
    return tracer().refuse(f"a norm of order {ord}", "use order 1, 2, inf or -inf")


@op("linalg_matrix_norm", elementwise=False)
def _matrix_norm(
    input: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x: Any = _floats("a norm", input, dtype)
    ord, dims = pinned(ord), dims_of(dim, x.ndim)
    if x.ndim < 2 or len(dims) != 2:
        tracer().refuse(f"a matrix norm over the dims {list(dims)}", "give two dims of a matrix")
    if ord == "fro":
        return _vector_norm(x, 2, dims, keepdim)
    if ord not in (1, -1, math.inf, -math.inf):
        tracer().refuse(
            f"a matrix norm of order {ord}",
            "use order 1, inf or 'fro'; for a norm of all elements torch.linalg.vector_norm; norms "
            "of singular values can be computed before the call and captured",
        )
    sums = reduce("sum", x.abs(), dims[abs(ord) != 1], keepdim=True)
    return reduce("amax" if ord > 0 else "amin", sums, dims, keepdim)


@op("linalg_norm", elementwise=False)
def _linalg_norm(
    input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x = val(input)
    dims = None if dim is None else dims_of(dim, x.ndim)
    count = x.ndim if dims is None else len(dims)
    if count not in (1, 2) and not (ord is None and dims is None):
        tracer().refuse(f"linalg.norm over {count} dims", "use torch.linalg.vector_norm")
    if isinstance(ord, str) or ord is not None and count == 2:
        return _matrix_norm(x, ord, dims or tuple(range(count)), keepdim, dtype=dtype)
    return _vector_norm(x, 2 if ord is None else ord, dims, keepdim, dtype=dtype)


@op("norm", elementwise=False)
def _norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None,
    dtype: Any = None,
) -> Any:  # fmt: skip
    x = val(input)
    if isinstance(p, str):
        dims = dims_of(tuple(range(x.ndim)) if dim is None else dim, x.ndim)
        if p != "fro" or dim is not None and len(dims) > 2:
            return _matrix_norm(x, p, dims, keepdim, dtype=dtype)
    return _vector_norm(x, 2 if p is None or p == "fro" else p, dim, keepdim, dtype=dtype)


# --- normalisations of a row ----------------------------------------------------------------------


@op("rms_norm", elementwise=False)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    x: Any = val(input)
    _whole_row(x, normalized_shape)
    eps = 1.1920928955078125e-07 if eps is None else eps
    out = x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt()
    return out if weight is None else out * weight


@op("layer_norm", elementwise=False)
def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Any:
    x: Any = val(input)
    _whole_row(x, normalized_shape)
    centred = x - x.mean(-1, keepdim=True)
    out = centred * ((centred * centred).mean(-1, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _whole_row(x: Value, normalized_shape: Any) -> None:
    expected = tuple(int(n) for n in normalized_shape)
    if len(expected) != 1 or x.shape[-1:] != expected:
        tracer().refuse(
            f"a normalisation over {list(expected)} of a value of shape {list(x.shape)}",
            "normalise over the last dim",
        )


@op("normalize", elementwise=False)
def _normalize(input: Any, p: Any = 2.0, dim: int = -1, eps: Any = 1e-12, out: Any = None) -> Any:
    x: Any = as_float(input)
    return x / x.norm(p, dim, keepdim=True).clamp(min=eps)


def _floats(what: str, input: Any, dtype: Any = None) -> Any:
    x = val(input) if dtype is None else to_dtype(val(input), dtype)
    if not is_float(x.name):
        tracer().refuse(f"{what} of integers", "convert with `.float()` first")
    return x


@op("softmax", "special_softmax", elementwise=False)
def _softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x: Any = _floats("softmax", input, dtype)
    if dim is None:
        tracer().refuse("softmax without a dim", "give it: `torch.softmax(x, -1)`")
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


@op("log_softmax", "special_log_softmax", elementwise=False)
def _log_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x: Any = _floats("log_softmax", input, dtype)
    if dim is None:
        tracer().refuse("log_softmax without a dim", "give it: `torch.log_softmax(x, -1)`")
    y = x - x.amax(dim, keepdim=True)
    return y - y.exp().sum(dim, keepdim=True).log()


@op("logsumexp", "special_logsumexp", elementwise=False)
def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    x: Any = as_float(input)
    most = x.amax(dim, keepdim=True)
    top: Any = where(most.isinf(), 0.0, most)  # an infinite x less its maximum is NaN
    total = (x - top).exp().sum(dim, keepdim).log()
    return total + (top if keepdim else top.amax(dim))


@op("var", elementwise=False)
def _var(
    input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: Any = None,
) -> Any:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    x: Any = _floats("var and std", input)
    centred = x - x.mean(dim, keepdim=True)
    total: Any = reduce("sum", centred * centred, dim, keepdim)
    count = math.prod(x.shape) // math.prod(total.shape)
    less = int(unbiased) if correction is None else correction
    return div(total, float(max(0, count - less)))


@op("std", elementwise=False)
def _std(input: Any, *args: Any, **named: Any) -> Any:
    return _var(input, *args, **named).sqrt()


@op("einsum", elementwise=False)
def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    if len(operands) == 2 and len(inputs) == 3 and inputs[0] == inputs[2] and not output:
        return HANDLERS["dot"](*operands)
    return tracer().refuse(
        f"`einsum` of {equation!r}",
        "small vectors have dot products alone: write `a @ b`; multiply matrices before the call "
        "and capture the result",
    )


@op("linear", elementwise=False)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return tracer().refuse(
        "`linear` (nn.Linear)",
        "of a score write `w * s + c` with captured w and c, of a small vector `a @ w + c`; apply "
        "it to a row before the call",
    )


@op("count_nonzero", elementwise=False)
def _count_nonzero(input: Any, dim: Any = None) -> Any:
    x: Any = logical(input)
    return x.sum(dim)
