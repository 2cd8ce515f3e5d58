"""Random expressions: the traced graph gives what eager torch gives, in value and dtype."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.variants.trace.trace_oracle import compare

TABLE = torch.tensor([0.5, -1.5, 2.0, 0.0, 3.25, -0.0, 7.0])
INTS = torch.tensor([3, -2, 0, 5, 1, -7, 2])
BYTES = torch.tensor([3, 200, 0, 5, 1, 255, 2], dtype=torch.uint8)
SHORTS = torch.tensor([3, -200, 0, 5, 1, 300, 2], dtype=torch.int16)
DOUBLES = TABLE.double() / 3
FLAGS = INTS > 0
ZERO_DIM = torch.tensor(2)
ZERO_DIM_FLOAT = torch.tensor(0.75)
WHOLE, REAL = 3, 0.4
SEEDS = 25

_FLOATS = ("s", "TABLE[k]", "DOUBLES[q]", "ZERO_DIM_FLOAT", "s.double()")
_INTEGERS = ("q", "k", "h", "b", "INTS[k]", "SHORTS[q]", "BYTES[k]", "ZERO_DIM", "q.long()")
_BOOLS = ("FLAGS[k]", "(q >= k)", "(s > 0)", "torch.tensor(True)")
_INT_NUMBERS = ("2", "1", "0", "-1", "5", "WHOLE")
_NUMBERS = (*_INT_NUMBERS, "0.5", "-2.25", "0.0", "1.0", "REAL")


class Maker:
    """Expressions that are valid torch: whether each is boolean, integer or floating is known."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def bool_(self, depth: int) -> str:
        r = self.r
        if depth <= 0:
            return r.choice(_BOOLS)
        kind = r.randrange(5)
        if kind == 0:
            a, b = self.bool_(depth - 1), self.bool_(depth - 1)
            return f"({a} {r.choice(('&', '|', '^', '==', '!='))} {b})"
        if kind == 1:
            return f"(~{self.bool_(depth - 1)})"
        if kind == 2:
            name = r.choice(("and", "or", "xor"))
            return f"torch.logical_{name}({self.any_(depth - 1)}, {self.any_(depth - 1)})"
        if kind == 3:
            number = r.choice(_NUMBERS)
            return f"({number} {r.choice(('<', '<=', '>', '>='))} {self.number_(depth - 1)})"
        a, b = self.number_(depth - 1), self.number_(depth - 1)
        return f"({a} {r.choice(('<', '<=', '>', '>=', '==', '!='))} {b})"

    def int_(self, depth: int) -> str:
        r = self.r
        if depth <= 0:
            return r.choice(_INTEGERS)
        a = self.int_(depth - 1)
        kind = r.randrange(7)
        if kind == 0:
            return f"({a} {r.choice(('+', '-', '*', '&', '|', '^'))} {self.int_(depth - 1)})"
        if kind == 1:
            return f"({a} {r.choice(('+', '-', '*', '&'))} {r.choice(_INT_NUMBERS)})"
        if kind == 2:
            return f"({r.choice(_INT_NUMBERS)} {r.choice(('+', '-', '*'))} {a})"
        if kind == 3:
            return f"({a} {r.choice(('//', '%'))} {r.choice(('2', '-3', '7', 'WHOLE'))})"
        if kind == 4:
            return f"torch.where({self.bool_(depth - 1)}, {a}, {r.choice(_INT_NUMBERS)})"
        if kind == 5:
            return f"{a}.clamp({r.choice(('-3', '0'))}, {r.choice(('4', '90'))})"
        return f"{a}.to(torch.{r.choice(('int32', 'int64', 'int16'))})"

    def float_(self, depth: int) -> str:
        r = self.r
        if depth <= 0:
            return r.choice(_FLOATS)
        a = self.float_(depth - 1)
        kind = r.randrange(9)
        if kind == 0:
            if r.random() < 0.3:
                return f"({a} {r.choice(('+', '*'))} {self.bool_(depth - 1)})"
            return f"({a} {r.choice(('+', '-', '*'))} {self.number_(depth - 1)})"
        if kind == 1:
            return f"({r.choice(_NUMBERS)} {r.choice(('+', '-', '*'))} {a})"
        if kind == 2:
            return f"({self.int_(depth - 1)} / ({self.int_(depth - 1)}.long().abs() + 1))"
        if kind == 3:
            name = r.choice(("tanh", "sigmoid", "sin", "floor", "trunc"))
            return f"torch.{name}({self.number_(depth - 1)}.float())"
        if kind == 4:
            return f"torch.where({self.bool_(depth - 1)}, {a}, {self.number_(depth - 1)})"
        if kind == 5:
            return f"torch.where({self.bool_(depth - 1)}, {a}, {r.choice(_NUMBERS)})"
        if kind == 6:
            return f"torch.{r.choice(('maximum', 'minimum'))}({a}, {self.any_(depth - 1)})"
        if kind == 7:
            return f"(({a}).clamp(-9, 9) ** {r.choice(('2', '3', '1', '0'))})"
        return f"(-{a}).abs()"

    def number_(self, depth: int) -> str:
        return self.int_(depth) if self.r.random() < 0.4 else self.float_(depth)

    def any_(self, depth: int) -> str:
        return self.bool_(depth) if self.r.random() < 0.2 else self.number_(depth)


@pytest.mark.parametrize("block", range(10))
def test_random_expressions(block):
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        maker = Maker(seed)
        text = maker.any_(4)
        fn = eval(f"lambda s, b, h, q, k: {text}", globals())
        try:
            compare(fn, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {text}\n{error}") from error


def test_the_expressions_are_varied():
    texts = "".join(Maker(seed).any_(4) for seed in range(250))
    for word in ("where", "clamp", "%", "BYTES", "REAL", "logical_xor", "**", "ZERO_DIM_FLOAT"):
        assert word in texts
    assert math.isfinite(REAL)
