"""In-place operations that torch refuses, or computes in a dtype of its own, are as in torch."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import variant
from tests.variants.trace.trace_oracle import DIMS, compare

pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*")
WHOLE = (torch.uint8, torch.int16, torch.int32, torch.int64)
VALUES = torch.tensor([5, 0, 3, 7, 2, 9, 100])
TWO = torch.tensor(2)
YES = torch.tensor(True)

OF_INTEGERS = {
    "//=": lambda x: operator.ifloordiv(x, 2),
    "<<=": lambda x: operator.ilshift(x, 1),
    ">>=": lambda x: operator.irshift(x, TWO),
    "^=": lambda x: operator.ixor(x, 3),
    "+= bool": lambda x: operator.iadd(x, YES),
    "*= bool": lambda x: x.mul_(x > 2),
    "%=": lambda x: operator.imod(x, 3),
    "**=": lambda x: operator.ipow(x, 2),
    "alpha": lambda x: x.sub_(1, alpha=2),
    "clamp_": lambda x: x.clamp_(1, 4),
    "fill_": lambda x: x.fill_(2.5),
    "copy_": lambda x: x.copy_(x * 0.7),
    "masked_fill_": lambda x: x.masked_fill_(x > 3, 2.5),
    "eq_": lambda x: x.eq_(5),
    "gt_": lambda x: x.gt_(2.5),
    "logical_and_": lambda x: x.logical_and_(x - 5),
    "div_, floor": lambda x: x.div_(2, rounding_mode="floor"),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 2.5, inplace=True),
    "threshold": lambda x: F.threshold(x, 2, 3, inplace=True),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "round_": lambda x: x.round_(),
}
OF_BOOLEANS = {
    "|=": lambda x: operator.ior(x, YES),
    "&=": lambda x: operator.iand(x, x ^ True),
    "^=": lambda x: operator.ixor(x, True),
    "+=": lambda x: operator.iadd(x, YES),
    "*=": lambda x: operator.imul(x, YES),
    "gt_": lambda x: x.gt_(0),
    "copy_": lambda x: x.copy_(x * 2),
    "fill_": lambda x: x.fill_(2.5),
    "logical_not_": lambda x: x.logical_not_(),
}
OF_FLOATS = {
    "+= int": lambda x: operator.iadd(x, TWO),
    "+= bool": lambda x: operator.iadd(x, YES),
    "*= double": lambda x: operator.imul(x, torch.tensor([0.1], dtype=torch.float64)[0]),
    "gt_": lambda x: x.gt_(0),
    "logical_not_": lambda x: x.logical_not_(),
    "//=": lambda x: operator.ifloordiv(x, 2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.5, inplace=True),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers(name):
    change = OF_INTEGERS[name]
    compare(lambda s, b, h, q, k: change(k - q + 9))
    for dtype in WHOLE:
        values = VALUES.to(dtype)
        compare(lambda s, b, h, q, k, values=values: change(values[k] + 0))


@pytest.mark.parametrize("name", OF_BOOLEANS)
def test_booleans(name):
    compare(lambda s, b, h, q, k: OF_BOOLEANS[name](q > k))


@pytest.mark.parametrize("name", OF_FLOATS)
def test_floats(name):
    compare(lambda s, b, h, q, k: OF_FLOATS[name](s * 2))
    compare(lambda s, b, h, q, k: OF_FLOATS[name](s.double()))


def test_hardtanh_keeps_integers():
    bounds = (-1.7, 2.5)
    compare(lambda s, b, h, q, k: F.hardtanh(k - q, *bounds))
    compare(lambda s, b, h, q, k: F.hardtanh(k - q, max_val=2.5) + F.hardtanh(s, min_val=-3.0))


REFUSED = {
    "/=": lambda x: operator.itruediv(x, 2),
    "+= float": lambda x: operator.iadd(x, 1.5),
    "+= tensor": lambda x: x.add_(torch.tensor(1.5)),
    "-= vector": lambda x: x.sub_(x * 0.5),
    "//= float": lambda x: operator.ifloordiv(x, 2.0),
    "%= float": lambda x: operator.imod(x, 2.5),
    "**= float": lambda x: operator.ipow(x, 0.5),
    "clamp_": lambda x: x.clamp_(2.5),
    "clamp_, max": lambda x: torch.clamp_(x, max=2.5),
    "clamp_min_": lambda x: x.clamp_min_(2.5),
    "div_, floor": lambda x: x.div_(2.5, rounding_mode="floor"),
    "sqrt_": lambda x: x.sqrt_(),
    "exp_": torch.exp_,
    "sigmoid_": lambda x: x.sigmoid_(),
    "hypot_": lambda x: x.hypot_(torch.tensor(3.0)),
    "float_power_": lambda x: x.float_power_(2),
}
REFUSED_FOR_BOOLEANS = {
    "+= int": lambda x: operator.iadd(x, 1),
    "*= int": lambda x: operator.imul(x, TWO),
    "&= int": lambda x: operator.iand(x, 1),
    "&= 0-dim int": lambda x: operator.iand(x, TWO),
    "<<=": lambda x: operator.ilshift(x, 1),
    "clamp_": lambda x: x.clamp_(0),
    "/=": lambda x: operator.itruediv(x, 2),
    "+= float": lambda x: operator.iadd(x, 0.5),
}


def assert_refused(change, values, first):
    """`change` of eager `values` raises, and of what `first` makes of positions in a hook too."""
    with pytest.raises(RuntimeError, match=r"can't be cast|requires dtype"):
        change(values.clone())
    with pytest.raises(TraceError, match=r"can't be cast to .*write `x = x / y` in place of"):
        variant(score_mod=lambda s, b, h, q, k: s + change(first(q, k))).bind(DIMS)


@pytest.mark.parametrize("name", REFUSED)
def test_results_that_an_integer_cannot_hold(name):
    assert_refused(REFUSED[name], VALUES, lambda q, k: k)
    assert_refused(REFUSED[name], VALUES.to(torch.uint8), lambda q, k: k.to(torch.uint8))


@pytest.mark.parametrize("name", REFUSED_FOR_BOOLEANS)
def test_results_that_a_boolean_cannot_hold(name):
    assert_refused(REFUSED_FOR_BOOLEANS[name], VALUES > 2, lambda q, k: q > k)


def test_float_power_needs_doubles():
    assert_refused(lambda x: x.float_power_(2), torch.ones(3), lambda q, k: k.float())
    compare(lambda s, b, h, q, k: s.double().float_power_(2))
