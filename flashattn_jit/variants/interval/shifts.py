"""By which distances a box may move along the diagonal of a mask without changing its state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from .simplify import Clause, Program
from .terms import MOST_UNSATURATED


class Shift(NamedTuple):
    """Boxes whose queries and keys are at positions from `first` on have the state of the box that
    is a multiple of `period` further, for queries and keys alike."""

    first: int
    period: int


def shift_of(program: Program, scalars: Sequence[int | float]) -> Shift | None:
    """The shift of a mask whose scalar params have these values; None where none was proved.

    Sums, and quotients by a constant, of values that move with the box move with it: a shift of s
    adds ``rate * s`` to both ends of their intervals, if the period is a multiple of the divisors.
    Comparisons of values of one rate, and functions of values that do not move, are then the same.
    A bound of an index by a constant is the same for all boxes behind the constant.
    """
    proof = _Proof(program, scalars)
    try:
        for node, _, _ in program.guards:
            proof.expect(proof.rate(node) == 0)
        for period in program.periods:
            proof.divide(Fraction(1), period.divisor)
        for clause in (*program.keep, *program.drop):
            proof.check(clause)
    except _NoProof:
        return None
    return Shift(proof.first, proof.period)


class _NoProof(Exception):
    """A value may change in a way that is not known."""


class _Proof:
    def __init__(self, program: Program, scalars: Sequence[int | float]) -> None:
        self.program, self.scalars = program, scalars
        self.first, self.period = 0, 1
        self._rates: dict[int, Fraction] = {}

    def expect(self, holds: bool) -> None:
        if not holds:
            raise _NoProof

    def check(self, clause: Clause) -> None:
        for bound in clause.bounds:
            rate = self.rate(bound.value)
            for limit in (*bound.lows, *bound.highs, *bound.excludes):
                if self.rate(limit) != rate:
                    self.expect(bound.value in (self.program.q, self.program.k))
                    self.first = max(self.first, self.constant(limit) + 1)
        for test in clause.tests:
            self.expect(self.rate(test.term) == 0)
        for group in clause.nested:
            for inner in group:
                self.check(inner)

    def rate(self, node: int) -> Fraction:
        """What a shift by 1 adds to the value of a node."""
        if node not in self._rates:
            self._rates[node] = self._rate(node)
        return self._rates[node]

    def _rate(self, node: int) -> Fraction:
        if node in (self.program.q, self.program.k):
            return Fraction(1)
        own = self.program.nodes[node]
        rates = [self.rate(x) for x in own.args]
        if not any(rates):
            return Fraction(0)
        if own.op == "linear":
            coefs = own.attr("coefs")
            assert isinstance(coefs, tuple)
            size = sum(abs(c) * self.size(x) for c, x in zip(coefs, own.args, strict=True))
            self.expect(size + abs(own.int_attr("const")) < MOST_UNSATURATED)
            return sum((c * r for c, r in zip(coefs, rates, strict=True)), Fraction(0))
        self.expect(own.op in ("floordiv", "remainder") and rates[1] == 0)
        quotient = self.divide(rates[0], own.args[1])
        return quotient if own.op == "floordiv" else Fraction(0)

    def size(self, node: int) -> int:
        """The largest magnitude of a value."""
        if self.program.nodes[node].op == "scalar":
            return abs(self.constant(node))
        return max(map(abs, self.program.ranges[node]))

    def divide(self, rate: Fraction, divisor: int) -> Fraction:
        """The rate of a quotient; shifts become multiples of its period."""
        value = self.constant(divisor)
        self.expect(value > 0)
        quotient = rate / value
        self.period = math.lcm(self.period, quotient.denominator)
        return quotient

    def constant(self, node: int) -> int:
        """The value of a node that reads no index and no tensor."""
        own = self.program.nodes[node]
        value: object = None
        if own.op == "const":
            value = own.attr("value")
        elif own.op == "scalar":
            value = self.scalars[own.int_attr("slot")]
        elif own.op == "linear":
            coefs = own.attr("coefs")
            assert isinstance(coefs, tuple)
            parts = zip(coefs, map(self.constant, own.args), strict=True)
            value = own.int_attr("const") + sum(c * x for c, x in parts)
        if not isinstance(value, int):
            raise _NoProof
        return value
