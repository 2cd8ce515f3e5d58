"""In-place operations on another dtype or on parts of one memory, which torch may refuse."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import variant
from tests.variants.trace.test_trace_views import DIMS as ROWS
from tests.variants.trace.test_trace_views import assert_rows_equal_eager
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


def test_a_value_may_have_leading_dims_of_one_element():
    def hook(x, b, h, i):
        x[:4] = (x[4:] * 2)[None, None]
        x[5] = x[:1][None]
        return x

    assert_rows_equal_eager(hook)


def test_bytes_of_captured_rows_are_those_of_the_row():
    table = torch.arange(12.0).view(3, 4).half()
    assert_rows_equal_eager(lambda x, b, h, i: x * table[i].nbytes)


OVERLAPS = {
    "+=": lambda x: operator.iadd(x[1:], x[:-1]),
    "alpha": lambda x: x[:-1].sub_(x[1:], alpha=2),
    "assigned": lambda x: operator.setitem(x, slice(1, None), x[:-1]),
    "copied": lambda x: x[1:].copy_(x[:-1]),
    "element": lambda x: operator.itruediv(x, x[3]),
    "bound": lambda x: x.clamp_(max=x[3]),
    "broadcast": lambda x: x.view(2, 4).mul_(x[:4]),
    "transposed": lambda x: operator.iadd(x[:4].view(2, 2), x[:4].view(2, 2).t()),
    "transposed, assigned": lambda x: operator.setitem(x[:4].view(2, 2).t(), ..., x[:4].view(2, 2)),
    "transposed whole": lambda x: [y.t().copy_(y) for y in [x[:4].clone().view(2, 2)]],
    "list": lambda x: operator.setitem(x, [1, 2], x[:2]),
    "lerp_": lambda x: x.lerp_(x[0], 0.5),
    "ge_": lambda x: x.ge_(x[0]),
}
UNORDERED = {
    "steps": lambda x: operator.iadd(x[:6:2], x[2::2]),
    "expanded": lambda x: x.mul_(x[1:2].expand(8)),
    "first of steps": lambda x: operator.iadd(x[::2], x[2]),
}
"""torch computes these in the order that its kernel happens to have."""


@pytest.mark.parametrize("name", [*OVERLAPS, *UNORDERED])
def test_parts_of_one_memory_that_overlap(name):
    change = {**OVERLAPS, **UNORDERED}[name]
    if name in OVERLAPS:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            change(torch.arange(8.0))
    with pytest.raises(TraceError, match=r"a single memory location; .*`x\[1:\] \+= x\[:-1\]\.cl"):
        variant(query_mod=lambda x, b, h, i: x + (change(x), 1)[1]).bind(ROWS)


APART = {
    "itself": lambda x: operator.iadd(x, x),
    "whole": lambda x: operator.iadd(x, x[:]),
    "a part": lambda x: operator.imul(x[2:5], x[2:5]),
    "halves": lambda x: operator.iadd(x[:4], x[4:]),
    "halves, assigned": lambda x: operator.setitem(x, slice(4), x[4:]),
    "steps": lambda x: operator.iadd(x[::2], x[1::2]),
    "columns": lambda x: operator.isub(x.view(2, 4)[:, 2:], x.view(2, 4)[:, :2]),
    "column": lambda x: operator.isub(x.view(2, 4)[:, 1:], x.view(2, 4)[:, :1]),
    "other element": lambda x: operator.isub(x[1:], x[0]),
    "element": lambda x: operator.iadd(x[0], x[0]),
    "clone": lambda x: operator.iadd(x[1:], x[:-1].clone()),
    "computed": lambda x: operator.isub(x, x.amax()),
    "filled with an element": lambda x: x.fill_(x[3]),
    "set to an element": lambda x: operator.setitem(x, ..., x[3]),
    "set to a slice": lambda x: operator.setitem(x, ..., x[0:1]),
    "masked": lambda x: x.masked_fill_(x > 0, x[3]),
    "augmented": lambda x: operator.setitem(x, slice(2), operator.iadd(x[:2], 1)),
    "three": lambda x: x.addcmul_(x, x),
    "list": lambda x: operator.setitem(x, [1, 2], x[[0, 1]]),
    "flipped": lambda x: operator.setitem(x, ..., x.flip(0)),
    "twice one value": lambda x: operator.setitem(x.view(2, 4), (slice(None), [1, 1]), 2.0),
    "twice an element": lambda x: operator.setitem(x, [2, 0, 2], x.sum()),
}


@pytest.mark.parametrize("name", APART)
def test_parts_of_one_memory_that_do_not_overlap(name):
    def hook(x, b, h, i):
        APART[name](x)
        return x

    assert_rows_equal_eager(hook)


def test_an_index_that_occurs_twice():
    def hook(x, b, h, i):
        x[[1, 1]] = x[2:4] * 2
        return x

    with pytest.raises(TraceError, match=r"with an index that occurs twice.*every index once"):
        variant(query_mod=hook).bind(ROWS)
