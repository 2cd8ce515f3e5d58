"""Transposed, split and viewed rows of captured tensors are as in eager torch."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import pytest
import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import variant
from tests.variants.trace.trace_oracle import DIMS, compare

G = torch.Generator().manual_seed(0)
ROWS = torch.randn(8, 8, generator=G)
MATRICES = torch.randn(8, 2, 4, generator=G)
DEEP = torch.randn(8, 2, 2, 3, generator=G)
WEIGHT = torch.arange(1.0, 9.0)

TRANSPOSED = {
    "mT": lambda s, b, h, q, k: s + (MATRICES[q].mT.reshape(-1) * WEIGHT).sum(),
    "mT of more dims": lambda s, b, h, q, k: s + (DEEP[k].mT[1] * WEIGHT[:2]).sum(),
    "T": lambda s, b, h, q, k: s * (MATRICES[q].T.flatten() * WEIGHT).sum(),
    "H": lambda s, b, h, q, k: s + MATRICES[k].H[3, 1] - MATRICES[q].H.sum(1)[2],
    "mH": lambda s, b, h, q, k: s + DEEP[q].mH[1, 2, 0],
    "in place": lambda s, b, h, q, k: s + (MATRICES[q] * 1).mT.mul_(WEIGHT[:2]).sum(),
    "of the whole": lambda s, b, h, q, k: s + MATRICES.mT[q, k % 4].sum() + ROWS.H[k, q],
    "of a constant index": lambda s, b, h, q, k: s + DEEP[1].mH[1, 2, k % 2],
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposes_of_captured_rows(name):
    compare(TRANSPOSED[name])


@pytest.mark.filterwarnings("ignore:The use of .x.T. on tensors of dimension other than 2")
def test_t_of_rows_that_are_no_matrices():
    compare(lambda s, b, h, q, k: s + DEEP[q].T[2, 1, 0] + ROWS[k].T[1])


def test_vectors_have_no_transposes():
    for name in ("mT", "mH", "H"):
        with pytest.raises(RuntimeError, match="only supported on matrices"):
            getattr(ROWS[0], name)
        with pytest.raises(TraceError):
            variant(score_mod=lambda s, b, h, q, k, n=name: getattr(ROWS[q], n)[0]).bind(DIMS)


def test_attributes_that_are_tensors_are_named():
    with pytest.raises(TraceError, match=r"`Tensor\.real`"):
        variant(score_mod=lambda s, b, h, q, k: s + ROWS[q].real[0]).bind(DIMS)


SPLIT = {
    "split_size": lambda s, b, h, q, k: s + (ROWS[q] * 2).split(split_size=3)[2].sum(),
    "sections": lambda s, b, h, q, k: s + (ROWS[q] * 2).split(split_size=[3, 5], dim=-1)[1][2],
    "captured": lambda s, b, h, q, k: s + ROWS[q].split(split_size=4)[1][0],
    "whole": lambda s, b, h, q, k: s + ROWS.split(split_size=4, dim=1)[1][k, q % 4],
    "function": lambda s, b, h, q, k: s + torch.split(ROWS[k], split_size_or_sections=5)[1].sum(),
    "position": lambda s, b, h, q, k: s + torch.split(MATRICES[k], 3, 1)[1].sum(),
    "view of its dtype": lambda s, b, h, q, k: s + (ROWS[q] * 2).view(torch.float32)[1],
    "view of its dtype by name": lambda s, b, h, q, k: s + k.view(dtype=torch.int64),
    "view, size": lambda s, b, h, q, k: s + (ROWS[q] * 2).view(size=(2, 4))[1].sum(),
    "viewed and changed": lambda s, b, h, q, k: s.view(torch.float32).add_(1) + s,
}


@pytest.mark.parametrize("name", SPLIT)
def test_split_and_view_have_the_arguments_of_torch(name):
    compare(SPLIT[name])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(torch.int32),
        lambda x: x.view(dtype=torch.int32),
        lambda x: (x * 2).view(torch.uint8),
    ],
)
def test_the_bits_of_a_value_cannot_be_viewed(view):
    message = r"`view\(torch\.\w+\)`, .* bits .*`x\.to\(torch\.\w+\)`"
    with pytest.raises(TraceError, match=message):
        variant(score_mod=lambda s, b, h, q, k: s + view(ROWS[q]).sum()).bind(DIMS)


def test_split_needs_a_size():
    with pytest.raises(TraceError, match=r"TypeError.*split"):
        variant(score_mod=lambda s, b, h, q, k: s + (ROWS[q] * 2).split()[0].sum()).bind(DIMS)
