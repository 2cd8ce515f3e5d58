"""torch functions that are compositions of IR operations: activations, special values, norms."""

from __future__ import annotations

import math
from typing import Any

from flashattn_jit.variants.ir import is_float
from flashattn_jit.variants.trace_ops import (
    as_float,
    binary,
    cast,
    compare,
    const,
    emit,
    logical,
    op,
    val,
)
from flashattn_jit.variants.trace_values import HANDLERS, Value, tracer

_FLOAT_MAX = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return HANDLERS[name](*args, **kwargs)


@op("relu")
def _relu(input: Any, inplace: bool = False) -> Value:
    return _call("clamp", input, min=0)  # type: ignore[no-any-return]


@op("relu6")
def _relu6(input: Any, inplace: bool = False) -> Value:
    return _call("clamp", input, min=0, max=6)  # type: ignore[no-any-return]


@op("leaky_relu")
def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    x = val(input)
    return _call("where", compare("gt", x, 0), x, binary("mul", x, negative_slope))


@op("elu")
def _elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    x = as_float(input)
    return _call("where", compare("gt", x, 0), x, binary("mul", _call("expm1", x), alpha))


@op("silu", "swish")
def _silu(input: Any, inplace: bool = False) -> Value:
    x = as_float(input)
    return binary("mul", x, _call("sigmoid", x))


@op("gelu")
def _gelu(input: Any, approximate: str = "none") -> Value:
    x = as_float(input)
    if approximate == "tanh":
        inner = binary("add", x, binary("mul", 0.044715, _call("pow", x, 3)))
        t = _call("tanh", binary("mul", inner, math.sqrt(2 / math.pi)))
    else:
        t = _call("erf", binary("mul", x, math.sqrt(0.5)))
    return binary("mul", binary("mul", 0.5, x), binary("add", t, 1))


@op("softplus")
def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    x = as_float(input)
    scaled = x if type(beta) is int and beta == 1 else binary("mul", x, beta)
    soft = _call("log1p", _call("exp", scaled))
    if scaled is not x:
        soft = _call("div", soft, beta)
    return _call("where", compare("gt", scaled, threshold), x, soft)


@op("log_sigmoid", "logsigmoid")
def _log_sigmoid(input: Any) -> Value:
    x = as_float(input)
    tail = _call("log1p", _call("exp", _call("neg", _call("abs", x))))
    return binary("sub", _call("clamp", x, max=0), tail)


@op("hardsigmoid")
def _hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return _call("div", _call("clamp", binary("add", as_float(input), 3), min=0, max=6), 6)


@op("hardswish")
def _hardswish(input: Any, inplace: bool = False) -> Value:
    x = as_float(input)
    return binary("mul", x, _hardsigmoid(x))


@op("mish")
def _mish(input: Any, inplace: bool = False) -> Value:
    x = as_float(input)
    return binary("mul", x, _call("tanh", _softplus(x)))


@op("softsign")
def _softsign(input: Any) -> Any:
    x = as_float(input)
    return _call("div", x, binary("add", _call("abs", x), 1))


@op("tanhshrink")
def _tanhshrink(input: Any) -> Value:
    x = as_float(input)
    return binary("sub", x, _call("tanh", x))


@op("erfc", "special_erfc")
def _erfc(input: Any) -> Value:
    return binary("sub", 1, _call("erf", input))


@op("logit", "special_logit")
def _logit(input: Any, eps: Any = None) -> Any:
    x = as_float(input)
    if eps is not None:
        x = _call("clamp", x, min=eps, max=binary("sub", 1, eps))
    return _call("log", _call("div", x, binary("sub", 1, x)))


@op("logaddexp")
def _logaddexp(input: Any, other: Any) -> Any:
    a, b = as_float(input), as_float(other)
    top = binary("maximum", a, b)
    low = _call("neg", _call("abs", binary("sub", a, b)))
    total = binary("add", top, _call("log1p", _call("exp", low)))
    # inf - inf: both are the same infinity, which is the answer.
    same = _call("logical_and", compare("eq", a, b), _call("isinf", a))
    return _call("where", same, a, total)


@op("xlogy", "special_xlogy")
def _xlogy(input: Any, other: Any) -> Any:
    x, y = as_float(input), as_float(other)
    product = _call("where", compare("eq", x, 0), 0.0, binary("mul", x, _call("log", y)))
    return _call("where", _call("isnan", y), y, product)


@op("hypot")
def _hypot(input: Any, other: Any) -> Any:
    a, b = as_float(input), as_float(other)
    return _call("sqrt", binary("add", binary("mul", a, a), binary("mul", b, b)))


@op("copysign")
def _copysign(input: Any, other: Any) -> Any:
    size, sign = _call("abs", as_float(input)), as_float(other)
    # 1 / -0.0 is -inf: the sign of a zero counts.
    negative = compare("lt", _call("where", compare("eq", sign, 0), _call("div", 1, sign), sign), 0)
    return _call("where", negative, _call("neg", size), size)


@op("deg2rad")
def _deg2rad(input: Any) -> Value:
    return binary("mul", as_float(input), math.pi / 180)


@op("rad2deg")
def _rad2deg(input: Any) -> Value:
    return binary("mul", as_float(input), 180 / math.pi)


@op("heaviside")
def _heaviside(input: Any, values: Any) -> Any:
    x = val(input)
    step = cast(compare("gt", x, 0), x.name)
    return _call("where", compare("eq", x, 0), values, step)


@op("lerp")
def _lerp(input: Any, end: Any, weight: Any) -> Value:
    start = val(input)
    return binary("add", start, binary("mul", weight, binary("sub", end, start)))


@op("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Value:
    return binary("add", input, binary("mul", binary("mul", value, tensor1), tensor2))


@op("addcdiv")
def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Value:
    return binary("add", input, binary("mul", value, _call("div", tensor1, tensor2)))


@op("isfinite")
def _isfinite(input: Any) -> Value:
    x = val(input)
    return _call("logical_not", _call("logical_or", _call("isnan", x), _call("isinf", x)))  # type: ignore[no-any-return]


@op("isposinf")
def _isposinf(input: Any) -> Any:
    return compare("eq", input, math.inf)


@op("isneginf")
def _isneginf(input: Any) -> Any:
    return compare("eq", input, -math.inf)


@op("nan_to_num")
def _nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    x = val(input)
    if not is_float(x.name):
        return x
    top = _FLOAT_MAX[x.name]

    def chosen(value: Any, default: float) -> Value:
        return const(default, x.name) if value is None else cast(val(value), x.name)

    finite = emit("where", (_call("isnan", x), chosen(nan, 0.0), x), x.name)
    finite = emit("where", (compare("eq", x, math.inf), chosen(posinf, top), finite), x.name)
    return emit("where", (compare("eq", x, -math.inf), chosen(neginf, -top), finite), x.name)


@op("frac")
def _frac(input: Any) -> Value:
    return binary("sub", input, _call("trunc", input))


@op("isin", elementwise=False)
def _isin(elements: Any, test_elements: Any, *, invert: bool = False, **_: Any) -> Any:
    found = _call("any", compare("eq", val(elements), val(test_elements)))
    return _call("logical_not", found) if invert else found


# --- normalisations of a row ----------------------------------------------------------------------


@op("rms_norm", elementwise=False)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    x = val(input)
    _whole_row(x, normalized_shape)
    eps = 1.1920928955078125e-07 if eps is None else eps
    mean = _call("mean", binary("mul", x, x), -1, keepdim=True)
    out = binary("mul", x, _call("rsqrt", binary("add", mean, eps)))
    return out if weight is None else binary("mul", out, weight)


@op("layer_norm", elementwise=False)
def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Value:
    x = val(input)
    _whole_row(x, normalized_shape)
    centred = binary("sub", x, _call("mean", x, -1, keepdim=True))
    variance = _call("mean", binary("mul", centred, centred), -1, keepdim=True)
    out = binary("mul", centred, _call("rsqrt", binary("add", variance, eps)))
    out = out if weight is None else binary("mul", out, weight)
    return out if bias is None else binary("add", out, bias)


def _whole_row(x: Value, normalized_shape: Any) -> None:
    expected = tuple(int(n) for n in normalized_shape)
    if len(expected) != 1 or x.shape[-1:] != expected:
        tracer().refuse(
            f"a normalisation over {list(expected)} of a value of shape {list(x.shape)}",
            "normalise over the last dim",
        )


@op("normalize", elementwise=False)
def _normalize(input: Any, p: Any = 2.0, dim: int = -1, eps: Any = 1e-12, out: Any = None) -> Any:
    x = as_float(input)
    norm = _call("norm", x, p, dim, keepdim=True)
    return _call("div", x, _call("clamp", norm, min=eps))


@op("count_nonzero", elementwise=False)
def _count_nonzero(input: Any, dim: Any = None) -> Any:
    return _call("sum", logical(input), dim)
