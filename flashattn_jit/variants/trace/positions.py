"""Bounds of integers that hooks compute from positions.

In torch the indices of a mod are int64. Kernels compute with them in 32 bits where the result fits
for all positions up to `MOST`, and in 64 bits from the first operation on whose result may not:
``(q_idx * 70_000 + kv_idx) % 7``. A value that a hook converts with `.int()` itself, or reads from
an int32 tensor, wraps as it does in torch; dtypes of results are torch's, with positions as int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MOST = 2**26
"""Formulas of positions below it are exact."""

MOST_NUMBER = 2**30
"""Captured numbers up to it may be int32 in formulas of positions; for others they are traced
again."""

_INT32_MAX = 2**31 - 1


class Bound(NamedTuple):
    """The largest magnitude of an integer.

    most: whatever the captured numbers are. now: for those of this trace, which are `sources`.
    """

    most: int
    now: int
    sources: frozenset[Any] = frozenset()


UNKNOWN = Bound(MOST, MOST)
ANY_INT32 = Bound(2**31, 2**31)
INDEX_BOUNDS = {
    "q_idx": UNKNOWN, "kv_idx": UNKNOWN, "b": Bound(2**20, 2**20), "h": Bound(2**16, 2**16),
    "kv_h": Bound(2**16, 2**16),
}  # fmt: skip
"""What an index of a hook is taken for."""


def fits_int32(most: int) -> bool:
    """Whether integers up to this magnitude have 32 bits."""
    return most <= _INT32_MAX


def largest(bounds: Iterable[Bound]) -> Bound:
    """The bound of any of several integers."""
    most, now, sources = zip(*bounds, strict=True)
    return Bound(max(most), max(now), frozenset[Any]().union(*sources))


def bound_of(
    op: str, operands: Sequence[Bound], constants: Sequence[int | None],
    numbers: Sequence[int | None],
) -> Bound:  # fmt: skip
    """The bound of an integer operation's result.

    constants: of each operand, its value where it is a constant. numbers: likewise, or its value in
    this trace where it is a captured number.
    """
    return Bound(
        _most_of(op, [x.most for x in operands], constants),
        _most_of(op, [x.now for x in operands], numbers),
        frozenset[Any]().union(*(x.sources for x in operands)),
    )


def _most_of(op: str, operands: list[int], values: Sequence[int | None]) -> int:
    most, last, divisor = max(operands), operands[-1], values[-1]
    if op in ("add", "sub"):
        return sum(operands)
    if op == "mul":
        return operands[0] * last
    if op == "pow":
        return int(operands[0] ** min(last, 64))
    if op == "shl":
        return operands[0] << min(last, 63)
    if op in ("floordiv", "truncdiv") and divisor:
        return operands[0] // abs(divisor) + 1
    if op in ("remainder", "fmod") and divisor:
        return abs(divisor)
    if op == "and" and (masks := [c for c in values if c is not None and c >= 0]):
        return min(masks)
    if op == "not":
        return most + 1
    if op in ("and", "or", "xor"):
        return 1 << most.bit_length()  # of negative numbers: -5 & -4 is -8
    return most  # neg, abs, sign, where, minimum, maximum, shr, divisions by unknown numbers
