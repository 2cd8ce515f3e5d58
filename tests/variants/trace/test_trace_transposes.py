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
