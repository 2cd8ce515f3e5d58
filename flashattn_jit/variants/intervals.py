"""Interval arithmetic over numpy arrays: the twin of ``csrc/include/fajit/interval_*.h``.

Values are tuples of arrays that broadcast against each other: ``(lo, hi)`` int64 for integers,
``(lo, hi, maybe_nan)`` float64 for reals, ``(may, must)`` for conditions. Names, results and
saturation are those of the C++ functions, which say why they are as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds_terms import I64_MAX, I64_MIN

Ints = Any  # NDArray[np.int64]: numpy functions of arrays are typed Any
Reals = Any  # NDArray[np.float64]
Bools = Any  # NDArray[np.bool_]
I = tuple[Ints, Ints]  # noqa: E741
F = tuple[Reals, Reals, Bools]
T = tuple[Bools, Bools]
Value = Any
"""One of `I`, `F`, `T`, as the node's dtype says."""

_MIN, _MAX = np.int64(I64_MIN), np.int64(I64_MAX)
_INF = np.inf


def point(value: int) -> I:
    """The interval of one integer."""
    array = np.asarray(value, np.int64)
    return array, array


# --- integers -----------------------------------------------------------------------------


def _add(a: Ints, b: Ints, absorbing: np.int64) -> Ints:
    r = a + b
    over = ((a ^ r) & (b ^ r)) < 0
    r = np.where(over, np.where(a > 0, _MAX, _MIN), r)
    return np.where((a == absorbing) | (b == absorbing), absorbing, r)


def _negated(a: Ints) -> Ints:
    return np.where(a == _MIN, _MAX, np.where(a == _MAX, _MIN, -a))


def _infinite(a: Ints) -> Bools:
    return (a == _MIN) | (a == _MAX)


def _times(a: Ints, b: Ints) -> Ints:
    r = a * b
    over = (r // np.where(a == 0, 1, a) != b) | ((a == -1) & (b == _MIN))
    over |= _infinite(a) | _infinite(b)
    r = np.where(over, np.where((a < 0) == (b < 0), _MAX, _MIN), r)
    return np.where((a == 0) | (b == 0), 0, r)


def _floor_quotient(a: Ints, b: Ints) -> Ints:
    return np.where(_infinite(a), np.where((a < 0) == (b < 0), _MAX, _MIN), a // b)


def _trunc_quotient(a: Ints, b: Ints) -> Ints:
    q = a // b
    q = q + ((q < 0) & (q * b != a))
    return np.where(_infinite(a), np.where((a < 0) == (b < 0), _MAX, _MIN), q)


def _corners(a: I, b: I, f: Callable[[Ints, Ints], Ints]) -> I:
    values = [f(x, y) for x in a for y in b]
    low, high = values[0], values[0]
    for v in values[1:]:
        low, high = np.minimum(low, v), np.maximum(high, v)
    return low, high


def i_hull(*parts: I) -> I:
    """The least interval that holds all parts."""
    low, high = parts[0]
    for lo, hi in parts[1:]:
        low, high = np.minimum(low, lo), np.maximum(high, hi)
    return low, high


def i_add(a: I, b: I) -> I:
    """``a + b``, saturating."""
    return _add(a[0], b[0], _MIN), _add(a[1], b[1], _MAX)


def i_neg(a: I) -> I:
    """``-a``."""
    return _negated(a[1]), _negated(a[0])


def i_sub(a: I, b: I) -> I:
    """``a - b``, saturating."""
    return i_add(a, i_neg(b))


def i_mul(a: I, b: I) -> I:
    """``a * b``, saturating."""
    return _corners(a, b, _times)


def i_scale(a: I, c: int) -> I:
    """``a * c`` of a number."""
    factor = np.asarray(c, np.int64)
    low, high = _times(a[0], factor), _times(a[1], factor)
    return (high, low) if c < 0 else (low, high)


def i_minimum(a: I, b: I) -> I:
    """The smaller of the two."""
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])


def i_maximum(a: I, b: I) -> I:
    """The larger of the two."""
    return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])


def i_abs(a: I) -> I:
    """``|a|``."""
    low, high = i_neg(a)
    lo = np.where(a[0] >= 0, a[0], np.where(a[1] <= 0, low, 0))
    return lo, np.where(a[0] >= 0, a[1], np.where(a[1] <= 0, high, np.maximum(high, a[1])))


def i_sign(a: I) -> I:
    """-1, 0 or 1."""
    return np.sign(a[0]), np.sign(a[1])


def _plain_divisor(a: I, b: I) -> bool:
    """Whether one positive number divides bounded ones: the usual case, and quick."""
    one = b[0].ndim == b[1].ndim == 0 and 0 < b[0] == b[1] < _MAX
    return bool(one and a[0].size and a[0].min() > _MIN and a[1].max() < _MAX)


def _divided(a: I, b: I, f: Callable[[Ints, Ints], Ints]) -> I:
    if f is _floor_quotient and _plain_divisor(a, b):
        return a[0] // b[0], a[1] // b[0]
    zero = (b[0] <= 0) & (b[1] >= 0)
    low, high = _corners(a, (np.where(zero, 1, b[0]), np.where(zero, 1, b[1])), f)
    return np.where(zero, _MIN, low), np.where(zero, _MAX, high)


def i_floordiv(a: I, b: I) -> I:
    """``a // b`` rounded down; anything if `b` may be 0."""
    return _divided(a, b, _floor_quotient)


def i_truncdiv(a: I, b: I) -> I:
    """``a / b`` rounded towards 0; anything if `b` may be 0."""
    return _divided(a, b, _trunc_quotient)


def i_remainder(a: I, b: I) -> I:
    """``a % b`` with the sign of `b`: exact while `a` stays within one period."""
    if _plain_divisor(a, b):
        q = a[0] // b[0]
        same, start = q == a[1] // b[0], q * b[0]
        return np.where(same, a[0] - start, 0), np.where(same, a[1] - start, b[0] - 1)
    zero = (b[0] <= 0) & (b[1] >= 0)
    divisor = np.where(zero, 1, b[0])
    low, high = np.where(b[0] > 0, 0, b[0] + 1), np.where(b[0] > 0, b[1] - 1, 0)
    q = _floor_quotient(a[0], divisor)
    one_period = (b[0] == b[1]) & ~_infinite(a[0]) & ~_infinite(a[1]) & (b[0] != _MIN)
    one_period &= q == _floor_quotient(a[1], divisor)
    low = np.where(one_period, a[0] - q * divisor, low)
    high = np.where(one_period, a[1] - q * divisor, high)
    itself = (b[0] > 0) & (a[0] >= 0) & (a[1] < b[0])
    low, high = np.where(itself, a[0], low), np.where(itself, a[1], high)
    return np.where(zero, _MIN, low), np.where(zero, _MAX, high)


def i_fmod(a: I, b: I) -> I:
    """``a % b`` with the sign of `a`."""
    zero = (b[0] <= 0) & (b[1] >= 0)
    m = i_abs(b)
    m = np.where(zero, 1, m[0]), np.where(zero, 1, m[1])
    plus, minus = i_remainder(a, m), i_neg(i_remainder(i_neg(a), m))
    limit = m[1] - 1
    low = np.where(a[0] >= 0, plus[0], np.where(a[1] <= 0, minus[0], np.maximum(a[0], -limit)))
    high = np.where(a[0] >= 0, plus[1], np.where(a[1] <= 0, minus[1], np.minimum(a[1], limit)))
    return np.where(zero, _MIN, low), np.where(zero, _MAX, high)


def _all_ones(x: Ints) -> Ints:
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _same_bits(a: I, b: I) -> I:
    low, high = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
    ones = _all_ones(np.maximum(np.where(low < 0, -1 - low, 0), np.where(high < 0, 0, high)))
    return np.where(low < 0, -1 - ones, 0), ones


def _bitwise(a: I, b: I, f: Callable[[Ints, Ints], Ints], low: Ints, high: Ints) -> I:
    single = (a[0] == a[1]) & (b[0] == b[1])
    exact = f(a[0], b[0])
    return np.where(single, exact, low), np.where(single, exact, high)


def i_and(a: I, b: I) -> I:
    """``a & b``."""
    low, high = _same_bits(a, b)
    plus_a, plus_b = a[0] >= 0, b[0] >= 0
    low = np.where(plus_a | plus_b, 0, low)
    high = np.where(plus_b, b[1], high)
    high = np.where(plus_a, np.where(plus_b, np.minimum(a[1], b[1]), a[1]), high)
    return _bitwise(a, b, np.bitwise_and, low, high)


def i_or(a: I, b: I) -> I:
    """``a | b``."""
    low, high = _same_bits(a, b)
    low = np.where((a[0] >= 0) & (b[0] >= 0), np.maximum(a[0], b[0]), low)
    return _bitwise(a, b, np.bitwise_or, low, high)


def i_xor(a: I, b: I) -> I:
    """``a ^ b``."""
    return _bitwise(a, b, np.bitwise_xor, *_same_bits(a, b))


def _shifted(a: I, b: I, f: Callable[[I, I], I]) -> I:
    out = (b[0] < 0) | (b[1] > 61)
    one = np.int64(1)
    low, high = f(a, (one << np.where(out, 0, b[0]), one << np.where(out, 0, b[1])))
    return np.where(out, _MIN, low), np.where(out, _MAX, high)


def i_shl(a: I, b: I) -> I:
    """``a << b``."""
    return _shifted(a, b, i_mul)


def i_shr(a: I, b: I) -> I:
    """``a >> b``, with the sign."""
    return _shifted(a, b, i_floordiv)


def fits(a: I, low: int, high: int) -> Bools:
    """Whether a machine integer of range [low, high] holds every value."""
    return (a[0] >= low) & (a[1] <= high) & (a[0] != _MIN) & (a[1] != _MAX)


def i_wrap(a: I, low: int, high: int) -> I:
    """`a` where it fits a machine integer of range [low, high], else that range."""
    ok = fits(a, low, high)
    return np.where(ok, a[0], np.int64(low)), np.where(ok, a[1], np.int64(high))


def i_where(c: T, a: I, b: I) -> I:
    """`a` where the condition must hold, `b` where it may not, else both."""
    low, high = i_hull(a, b)
    low = np.where(c[1], a[0], np.where(c[0], low, b[0]))
    return low, np.where(c[1], a[1], np.where(c[0], high, b[1]))


def i_const(value: int) -> I:
    """A number."""
    return point(value)


def i_top(low: int, high: int) -> I:
    """Anything from low to high."""
    return np.asarray(low, np.int64), np.asarray(high, np.int64)


def i_range(length: int) -> I:
    """Any of 0, 1, ... length - 1."""
    return i_top(0, length - 1)


def i_from_t(a: T) -> I:
    """A condition as 0 or 1."""
    return a[1].astype(np.int64), a[0].astype(np.int64)


def i_from_f(a: F, low: int, high: int) -> I:
    """A real rounded towards 0; [low, high] if it may not fit that."""
    ok = ~a[2] & (a[0] > -9e18) & (a[1] < 9e18)
    lo, hi = (np.where(ok, x, 0.0).astype(np.int64) for x in a[:2])
    ok &= (lo >= low) & (hi <= high)
    return np.where(ok, lo, np.int64(low)), np.where(ok, hi, np.int64(high))


def i_bit(any_bits: NDArray[np.uint64], all_bits: NDArray[np.uint64], at: I, width: int) -> I:
    """The range of bit number `at` of numbers with `any_bits` set in some, `all_bits` in all."""
    out = (at[0] < 0) | (at[1] >= width)
    low, high = (np.where(out, 0, x).astype(np.uint64) for x in at)
    ones = np.uint64(2**64 - 1)
    mask = (ones >> (np.uint64(63) - high)) & (ones << low)
    lo = ~out & ((all_bits & mask) == mask)
    return lo.astype(np.int64), (out | ((any_bits & mask) != 0)).astype(np.int64)


# --- conditions ----------------------------------------------------------------------------------


def t_const(value: int) -> T:
    """A condition that is known."""
    array = np.asarray(bool(value))
    return array, array


def t_top() -> T:
    """A condition of which nothing is known."""
    return np.asarray(True), np.asarray(False)


def t_not(a: T) -> T:
    """Not `a`."""
    return ~a[1], ~a[0]


def t_and(a: T, b: T) -> T:
    """Both."""
    return a[0] & b[0], a[1] & b[1]


def t_or(a: T, b: T) -> T:
    """Either."""
    return a[0] | b[0], a[1] | b[1]


def t_hull(*parts: T) -> T:
    """What is known of every part."""
    may, must = parts[0]
    for x, y in parts[1:]:
        may, must = may | x, must & y
    return may, must


def t_where(c: T, a: T, b: T) -> T:
    """`a` where the condition must hold, `b` where it may not, else both."""
    both = t_hull(a, b)
    may = np.where(c[1], a[0], np.where(c[0], both[0], b[0]))
    return may, np.where(c[1], a[1], np.where(c[0], both[1], b[1]))


def t_xor(a: T, b: T) -> T:
    """Exactly one."""
    return t_or(t_and(a, t_not(b)), t_and(t_not(a), b))


def t_from_i(a: I) -> T:
    """``a != 0``."""
    return (a[0] != 0) | (a[1] != 0), (a[0] > 0) | (a[1] < 0)


def t_from_t(a: T) -> T:
    """`a` itself."""
    return a


def t_from_f(a: F) -> T:
    """``a != 0``; NaN is not 0."""
    return (a[0] != 0) | (a[1] != 0) | a[2], (a[0] > 0) | (a[1] < 0)


def i_ge(a: I, b: I) -> T:
    """``a >= b``."""
    return a[1] >= b[0], a[0] >= b[1]


def i_gt(a: I, b: I) -> T:
    """``a > b``."""
    return a[1] > b[0], a[0] > b[1]


def i_le(a: I, b: I) -> T:
    """``a <= b``."""
    return i_ge(b, a)


def i_lt(a: I, b: I) -> T:
    """``a < b``."""
    return i_gt(b, a)


def i_eq(a: I, b: I) -> T:
    """``a == b``."""
    must = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]) & ~_infinite(a[0])
    return (a[0] <= b[1]) & (b[0] <= a[1]), must


def i_ne(a: I, b: I) -> T:
    """``a != b``."""
    return t_not(i_eq(a, b))
