"""Interval arithmetic on reals over numpy arrays: the twin of ``fajit/interval_real.h``.

`single` says that the hook computes in float32: endpoints are then rounded to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .intervals import Bools, F, I, Reals, T

_INF = np.inf


def _rounded(x: Reals, single: int) -> Reals:
    return np.asarray(x, np.float32).astype(np.float64) if single else np.asarray(x, np.float64)


def _below(x: Reals, single: int) -> Reals:
    if single:
        return np.nextafter(x.astype(np.float32), np.float32(-_INF)).astype(np.float64)
    return np.nextafter(x, -_INF)


def _made(lo: Reals, hi: Reals, nan: Bools) -> F:
    no_lo, no_hi = np.isnan(lo), np.isnan(hi)
    return np.where(no_lo, -_INF, lo), np.where(no_hi, _INF, hi), nan | no_lo | no_hi


def _unbounded(a: F) -> Bools:
    return (a[0] == -_INF) | (a[1] == _INF)


def _has_zero(a: F) -> Bools:
    return (a[0] <= 0) & (a[1] >= 0)


def _or_top(bad: Bools, a: F) -> F:
    return np.where(bad, -_INF, a[0]), np.where(bad, _INF, a[1]), bad | a[2]


def f_top() -> F:
    """Any real, or NaN."""
    return np.asarray(-_INF), np.asarray(_INF), np.asarray(True)


def f_const(value: float) -> F:
    """A number."""
    array = np.asarray(value, np.float64)
    return f_top() if np.isnan(array) else (array, array, np.asarray(False))


def f_range(length: int) -> F:
    """Any of 0, 1, ... length - 1."""
    return np.asarray(0.0), np.asarray(float(length - 1)), np.asarray(False)


def f_hull(*parts: F) -> F:
    """The least interval that holds all parts."""
    low, high, nan = parts[0]
    for lo, hi, also in parts[1:]:
        low, high, nan = np.minimum(low, lo), np.maximum(high, hi), nan | also
    return low, high, nan


def f_where(c: T, a: F, b: F) -> F:
    """`a` where the condition must hold, `b` where it may not, else both."""
    both = f_hull(a, b)
    x, y, z = (np.where(c[1], p, np.where(c[0], q, r)) for p, q, r in zip(a, both, b, strict=True))
    return x, y, z


def f_round_to(a: F, single: int) -> F:
    """`a` rounded to the precision."""
    return _rounded(a[0], single), _rounded(a[1], single), a[2]


def f_from_i(a: I, single: int) -> F:
    """An integer as a real."""
    dtype = np.float32 if single else np.float64
    low, high = (x.astype(dtype).astype(np.float64) for x in a)
    return low, high, np.zeros(low.shape, bool)


def f_from_t(a: T, single: int) -> F:
    """A condition as 0 or 1."""
    return a[1].astype(np.float64), a[0].astype(np.float64), np.zeros(a[0].shape, bool)


def f_add(a: F, b: F, single: int) -> F:
    """``a + b``."""
    cancels = ((a[1] == _INF) & (b[0] == -_INF)) | ((a[0] == -_INF) & (b[1] == _INF))
    low, high = _rounded(a[0] + b[0], single), _rounded(a[1] + b[1], single)
    return _made(low, high, a[2] | b[2] | cancels)


def f_neg(a: F, single: int) -> F:
    """``-a``."""
    return -a[1], -a[0], a[2]


def f_sub(a: F, b: F, single: int) -> F:
    """``a - b``."""
    return f_add(a, f_neg(b, single), single)


def _product_below(a: Reals, b: Reals, single: int) -> Reals:
    p = np.where((a == 0) | (b == 0), 0.0, a * b)
    if single:
        exact = _rounded(p, 1) == p
    else:
        exact = (a == np.floor(a)) & (b == np.floor(b)) & (np.abs(p) < 2.0**53)
    return np.where(exact, p, _below(p, single))


def f_mul(a: F, b: F, single: int) -> F:
    """``a * b``, widened where inexact."""
    nan = (_unbounded(a) & _has_zero(b)) | (_unbounded(b) & _has_zero(a))

    def low(sign: float) -> Reals:
        parts = [_product_below(sign * x, y, single) for x in a[:2] for y in b[:2]]
        return np.minimum(np.minimum(parts[0], parts[1]), np.minimum(parts[2], parts[3]))

    return _made(low(1.0), -low(-1.0), a[2] | b[2] | nan)


def f_div(a: F, b: F, single: int) -> F:
    """``a / b``; anything if `b` may be 0."""
    bad = _has_zero(b) | (_unbounded(a) & _unbounded(b))
    divisors = [np.where(bad, 1.0, y) for y in b[:2]]
    parts = [x / y for x in a[:2] for y in divisors]
    low = np.minimum(np.minimum(parts[0], parts[1]), np.minimum(parts[2], parts[3]))
    high = np.maximum(np.maximum(parts[0], parts[1]), np.maximum(parts[2], parts[3]))
    return _or_top(bad, _made(_rounded(low, single), _rounded(high, single), a[2] | b[2]))


def f_floordiv(a: F, b: F, single: int) -> F:
    """``a // b``, widened by one."""
    q = f_div(a, b, single)
    return _or_top(_unbounded(a), (np.floor(q[0]) - 1, np.floor(q[1]) + 1, q[2]))


def f_remainder(a: F, b: F, single: int) -> F:
    """``a % b``: anything between 0 and `b`."""
    bad = _has_zero(b) | _unbounded(a) | _unbounded(b)
    return _or_top(bad, (np.minimum(b[0], 0.0), np.maximum(b[1], 0.0), a[2] | b[2]))


def f_minimum(a: F, b: F, single: int) -> F:
    """The smaller of the two; NaN wins."""
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1]), a[2] | b[2]


def f_maximum(a: F, b: F, single: int) -> F:
    """The larger of the two; NaN wins."""
    return np.maximum(a[0], b[0]), np.maximum(a[1], b[1]), a[2] | b[2]


def f_abs(a: F, single: int) -> F:
    """``|a|``."""
    plus, minus = a[0] >= 0, a[1] <= 0
    low = np.where(plus, a[0], np.where(minus, -a[1], 0.0))
    return low, np.where(plus, a[1], np.where(minus, -a[0], np.maximum(-a[0], a[1]))), a[2]


def f_sign(a: F, single: int) -> F:
    """-1, 0 or 1."""
    low, high = np.sign(a[0]), np.sign(a[1])
    return np.where(a[2], np.minimum(low, 0), low), np.where(a[2], np.maximum(high, 0), high), a[2]


def _rounding(function: Callable[[Reals], Reals]) -> Callable[[F, int], F]:
    return lambda a, single: (function(a[0]), function(a[1]), a[2])


f_floor, f_ceil = _rounding(np.floor), _rounding(np.ceil)
f_round, f_trunc = _rounding(np.rint), _rounding(np.trunc)


def _loose(lo: Reals, hi: Reals, nan: Bools, single: int, least: float, most: float) -> F:
    relative, absolute = (1e-5, 1e-6) if single else (1e-12, 1e-13)
    huge = np.finfo(np.float64).max  # where one overflows, another may just not
    lo, hi = np.where(lo == _INF, huge, lo), np.where(hi == -_INF, -huge, hi)
    lo = _rounded(lo - (np.abs(lo) * relative + absolute), single)
    hi = _rounded(hi + (np.abs(hi) * relative + absolute), single)
    lo, hi, nan = _made(lo, hi, nan)
    return np.maximum(lo, least), np.minimum(hi, most), nan


def _increasing(
    function: Callable[[Reals], Reals], least: float, most: float
) -> Callable[[F, int], F]:
    return lambda a, single: _loose(function(a[0]), function(a[1]), a[2], single, least, most)


def _root(function: Callable[[Reals], Reals], domain: float) -> Callable[[F, int], F]:
    """Functions of x >= domain; what lies below gives NaN."""

    def f(a: F, single: int) -> F:
        below = a[0] < domain
        low = np.where(below, -_INF, function(np.where(below, domain + 1, a[0])))
        high = function(np.maximum(a[1], domain))
        made = _loose(low, high, a[2] | below, single, -_INF, _INF)
        return _or_top(~(a[1] >= domain), made)

    return f


def _erf(x: Reals) -> Reals:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _logistic(x: Reals) -> Reals:
    return np.asarray(1 / (1 + np.exp(-x)))


f_exp, f_exp2 = _increasing(np.exp, 0, _INF), _increasing(np.exp2, 0, _INF)
f_expm1, f_sinh = _increasing(np.expm1, -1.00001, _INF), _increasing(np.sinh, -_INF, _INF)
f_tanh, f_erf = _increasing(np.tanh, -1.00001, 1.00001), _increasing(_erf, -1.00001, 1.00001)
f_atan, f_sigmoid = _increasing(np.arctan, -1.6, 1.6), _increasing(_logistic, 0, 1.00001)
f_log, f_log2 = _root(np.log, 0), _root(np.log2, 0)
f_log10, f_log1p = _root(np.log10, 0), _root(np.log1p, -1)


def f_sqrt(a: F, single: int) -> F:
    """The square root; NaN below 0."""
    low, high = (_rounded(np.sqrt(np.maximum(x, 0.0)), single) for x in a[:2])
    return _or_top(a[1] < 0, (low, high, a[2] | (a[0] < 0)))


def f_sum(a: F, length: int, single: int) -> F:
    """The sum of a vector of `length` values in `a`."""
    spread = (2e-5 if single else 2e-12) * length * np.maximum(np.abs(a[0]), np.abs(a[1]))
    made = _made(length * a[0] - spread, length * a[1] + spread, a[2])
    return _or_top(_unbounded(a), made)


# --- conditions ----------------------------------------------------------------------------


def f_ge(a: F, b: F) -> T:
    """``a >= b``."""
    return a[1] >= b[0], (a[0] >= b[1]) & ~a[2] & ~b[2]


def f_gt(a: F, b: F) -> T:
    """``a > b``."""
    return a[1] > b[0], (a[0] > b[1]) & ~a[2] & ~b[2]


def f_le(a: F, b: F) -> T:
    """``a <= b``."""
    return f_ge(b, a)


def f_lt(a: F, b: F) -> T:
    """``a < b``."""
    return f_gt(b, a)


def f_eq(a: F, b: F) -> T:
    """``a == b``."""
    points = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return (a[0] <= b[1]) & (b[0] <= a[1]), points & ~a[2] & ~b[2]


def f_ne(a: F, b: F) -> T:
    """``a != b``."""
    may, must = f_eq(a, b)
    return ~must, ~may


def f_isnan(a: F) -> T:
    """Whether `a` is NaN."""
    return a[2], np.zeros(a[2].shape, bool)


def f_isinf(a: F) -> T:
    """Whether `a` is infinite."""
    unbounded = _unbounded(a)
    return unbounded, (a[0] == a[1]) & unbounded & ~a[2]
