"""Dims, reductions, norms and `isin`: as in eager torch, what torch refuses included."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import variant
from tests.variants.trace.test_trace_views import DIMS, assert_rows_equal_eager
from tests.variants.trace.trace_oracle import compare

TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
BYTES = (TABLE[0] * 3).abs().to(torch.uint8)

OF_ROWS = {
    "no dims are all dims": lambda y: y.sum([]) + y.amax(()) + y.mean(dim=[]) + y.norm(dim=[]),
    "any and all of no dims": lambda y: (y > 0).any([]) * y + (y > 1).all(()).sum(),
    "negative dims": lambda y: y.sum(-2) - y.amin(-1, keepdim=True) + y.mean((-1, -2)),
    "joined": lambda y: torch.cat([y, y * 2], -2).sum(0) + torch.stack([y, -y], -1).amax(2),
    "joined, axis": lambda y: torch.cat([y, y * 2], axis=1).view(2, 2, 4).sum(0),
    "axis": lambda y: y.sum(axis=0) + torch.mean(y, axis=1, keepdims=True) + y.softmax(axis=0),
    "bytes": lambda y: y * y.nbytes + TABLE[0].nbytes,
    "scalars": lambda y: y.sum().sum(-1) + y.amax().softmax(0) + y.mean(),
    "mean to double": lambda y: y.mean(dtype=torch.float64) + y.int().mean(0, dtype=torch.float64),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_reductions_of_rows(name):
    assert_rows_equal_eager(lambda x, b, h, i: x + OF_ROWS[name](x.view(2, 4)).sum())


OUT_OF_RANGE = {
    "sum": lambda y: y.sum(5),
    "sum of several": lambda y: y.sum((0, 2)),
    "sum of a scalar": lambda y: y.sum().sum(1),
    "prod": lambda y: y.prod(-3),
    "mean": lambda y: y.mean(2),
    "amax": lambda y: y.amax(2),
    "amin": lambda y: y.amin((-3,)),
    "any": lambda y: (y > 0).any(2),
    "all": lambda y: (y > 0).all(-3),
    "std": lambda y: y.std(2),
    "var": lambda y: y.var((0, 3)),
    "softmax": lambda y: y.softmax(2),
    "softmax of a scalar": lambda y: y.sum().softmax(1),
    "log_softmax": lambda y: F.log_softmax(y, dim=-3),
    "logsumexp": lambda y: y.logsumexp(2),
    "normalize": lambda y: F.normalize(y, dim=2),
    "norm": lambda y: y.norm(dim=2),
    "vector_norm": lambda y: torch.linalg.vector_norm(y, 1, 2),
    "count_nonzero": lambda y: torch.count_nonzero(y, dim=2),
    "cat": lambda y: torch.cat([y, y], 2),
    "stack": lambda y: torch.stack([y, y], 3),
    "stack below": lambda y: torch.stack([y, y], -4),
    "transpose": lambda y: y.transpose(0, 2),
    "permute": lambda y: y.permute(0, 2),
    "unsqueeze": lambda y: y.unsqueeze(3),
    "squeeze": lambda y: y.squeeze(2),
    "flip": lambda y: y.flip(2),
    "roll": lambda y: y.roll(1, 2),
    "select": lambda y: y.select(2, 0),
    "narrow": lambda y: y.narrow(2, 0, 1),
    "chunk": lambda y: y.chunk(2, 2)[0],
    "split": lambda y: y.split(2, 2)[0],
    "unbind": lambda y: y.unbind(2)[0],
    "flatten": lambda y: y.flatten(0, 2),
    "unflatten": lambda y: y.unflatten(2, (2, 2)),
    "movedim": lambda y: y.movedim(0, 2),
    "repeat_interleave": lambda y: y.repeat_interleave(2, 2),
}


def assert_refused_as_by_torch(change, error, message):
    """`change` of a 2-D value raises `error` in eager torch, and a `TraceError` in a hook."""
    with pytest.raises(error):
        change(torch.arange(8.0).view(2, 4))
    with pytest.raises(TraceError, match=message):
        variant(query_mod=lambda x, b, h, i: x + change(x.view(2, 4)).sum()).bind(DIMS)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_dims_that_a_value_does_not_have(name):
    message = r"Dimension out of range \(expected to be in range of \[-\d, \d\].*x\.ndim - 1"
    assert_refused_as_by_torch(OUT_OF_RANGE[name], IndexError, message)


@pytest.mark.parametrize("change", [lambda y: y.sum((0, 0)), lambda y: y.amax((1, -1))])
def test_dims_that_are_named_twice(change):
    assert_refused_as_by_torch(change, RuntimeError, "multiple times in the list.*every dim once")


def test_any_of_bytes_is_a_byte():
    compare(lambda s, b, h, q, k: s + (BYTES[k] * BYTES).any().add(255))
    compare(lambda s, b, h, q, k: (BYTES[k] * BYTES).all(0))


INF = float("inf")
NORMS = {
    "matrix": lambda y: torch.linalg.norm(y) + torch.linalg.norm(y, "fro"),
    "matrix, 1": lambda y: torch.linalg.norm(y, 1) + torch.linalg.norm(y, ord=-1),
    "matrix, inf": lambda y: torch.linalg.norm(y, INF) + torch.linalg.norm(y, -INF),
    "dims": lambda y: torch.linalg.norm(y, 1, (1, 0)) + torch.linalg.norm(y, INF, (-1, 0)),
    "dims, kept": lambda y: torch.linalg.norm(y, INF, (1, 0), True) * y,
    "one dim": lambda y: torch.linalg.norm(y, 1, 1).sum() + torch.linalg.norm(y, 2, (0,)),
    "one dim, inf": lambda y: torch.linalg.norm(y, INF, 0) - torch.linalg.norm(y, -INF, -1).sum(),
    "all dims": lambda y: torch.linalg.norm(y.view(2, 2, 2)) + torch.linalg.norm(y, dim=(0, 1)),
    "vector": lambda y: torch.linalg.norm(y[0], 1) + torch.linalg.norm(y[1], -INF),
    "of each": lambda y: torch.linalg.matrix_norm(y.view(2, 2, 2), 1, keepdim=True) * y[0, 0],
    "of each, inf": lambda y: torch.linalg.matrix_norm(y.view(2, 2, 2), INF, (0, 2)),
    "of each, -1": lambda y: torch.linalg.matrix_norm(y.view(2, 2, 2), -1, (2, 1)),
    "matrix_norm": lambda y: torch.linalg.matrix_norm(y) * torch.linalg.matrix_norm(y, "fro"),
    "vector_norm": lambda y: torch.linalg.vector_norm(y, 1) - torch.linalg.vector_norm(y, -INF),
    "vector_norm of a matrix": lambda y: torch.linalg.vector_norm(y, dim=(0, 1)) + y.norm(p=2),
    "norm of all": lambda y: y.norm(1) + y.norm(INF, (0, 1)) + torch.norm(y, dim=(1, 0)),
    "norm, fro": lambda y: torch.norm(y, "fro", 1).sum() + torch.norm(y.view(2, 2, 2)),
    "double": lambda y: y.norm(dtype=torch.float64) + torch.linalg.norm(y, dtype=torch.double),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    assert_rows_equal_eager(lambda x, b, h, i: x * NORMS[name](x.view(2, 4)).sum())


def test_norms_have_the_dtype_of_torch():
    compare(lambda s, b, h, q, k: (TABLE[q, :3] * s).norm(dtype=torch.float64))
    compare(lambda s, b, h, q, k: torch.linalg.norm(TABLE[:2] * s, 1, dtype=torch.float64))


@pytest.mark.parametrize("order", [2, -2, "nuc"])
def test_norms_of_singular_values_are_refused(order):
    for norm in (torch.linalg.norm, torch.linalg.matrix_norm):
        with pytest.raises(TraceError, match=r"a matrix norm of order.*torch\.linalg\.vector_norm"):
            variant(query_mod=lambda x, b, h, i, f=norm: x * f(x.view(2, 4), order)).bind(DIMS)


REFUSED_NORMS = {
    "order": (lambda y: torch.linalg.norm(y, 3), "a matrix norm of order 3"),
    "three dims": (lambda y: torch.linalg.norm(y.view(2, 2, 2), 1), "over 3 dims.*vector_norm"),
    "a vector": (lambda y: torch.linalg.norm(y[0], "fro"), "give two dims of a matrix"),
    "a scalar": (lambda y: torch.linalg.norm(y.sum(), 2), "over 0 dims"),
    "fro of three": (lambda y: y.view(2, 2, 2).norm(dim=(0, 1, 2)), "give two dims of a matrix"),
    "integers": (lambda y: y.int().norm(), r"a norm of integers.*`\.float\(\)`"),
    "a text": (lambda y: y.norm("inf"), "a matrix norm of order inf"),
}


@pytest.mark.parametrize("name", REFUSED_NORMS)
def test_norms_that_torch_refuses(name):
    change, message = REFUSED_NORMS[name]
    assert_refused_as_by_torch(change, RuntimeError, message)


FEW, MANY = torch.tensor([3, 1, 5]), torch.tensor([1, 2, 2, 9, 5, 4, 11, 13, 15, 17, 19])
ISIN = {
    "vector": lambda s, b, h, q, k: s + torch.isin(torch.stack([q, k]), FEW).all(),
    "each": lambda s, b, h, q, k: s + torch.isin(torch.stack([q, k]), FEW).int()[0],
    "inverted": lambda s, b, h, q, k: torch.isin(torch.stack([q, k, h]), FEW, invert=True).sum(),
    "unique": lambda s, b, h, q, k: torch.isin(q, FEW, assume_unique=True) | (k > 3),
    "many": lambda s, b, h, q, k: s * torch.isin(torch.stack([q, k]), MANY).sum() + q,
    "matrix": lambda s, b, h, q, k: torch.isin(FEW + q, torch.stack([q, k, b, h]).view(2, 2)).sum(),
    "computed": lambda s, b, h, q, k: torch.isin(q, torch.stack([k, h, b + 2])),
    "number": lambda s, b, h, q, k: torch.isin(k, 3) | torch.isin(2, torch.stack([q, h])),
    "number of a vector": lambda s, b, h, q, k: torch.isin(torch.stack([q, k]), 1).any() + s,
    "scalars": lambda s, b, h, q, k: torch.isin(q, k, invert=True),
    "floats": lambda s, b, h, q, k: torch.isin(torch.stack([s, s.round()]), FEW / 2).sum() + q,
    "of doubles": lambda s, b, h, q, k: torch.isin(TABLE[q, :3], TABLE[k].double()).sum() + s,
    "of bytes": lambda s, b, h, q, k: torch.isin(k + 254, FEW.to(torch.uint8)),
    "of many bytes": lambda s, b, h, q, k: torch.isin(k + 254, MANY.to(torch.uint8)),
    "not a number": lambda s, b, h, q, k: torch.isin(s.log(), torch.stack([s.log(), s])),
}


@pytest.mark.filterwarnings("ignore:.*batching rule.*")
@pytest.mark.parametrize("name", ISIN)
def test_isin(name):
    compare(ISIN[name])
