"""Variants of FlashInfer's test_modular_fmha_prefill.py that are more than masks, at its sizes.

Its sinks, soft caps, windows and plain calls are in tests/batch/lists.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import Batch, indptr
from tests.batch.runs import engine
from tests.harness import rotation
from tests.ops.cases import assert_close

REACH = 100


def tanh_sigmoid(bias: float) -> fa.Variant:
    """The logistic function of biased scores, computed by tanh."""
    return fa.variant(normalizer=fa.Pointwise(lambda s: 0.5 * torch.tanh(0.5 * (s + bias)) + 0.5))


def table() -> fa.Variant:
    generator = torch.Generator().manual_seed(0)
    return fa.RelativeTable(table=torch.randn(8, 2 * REACH + 1, generator=generator), reach=REACH)


VARIANTS: dict[str, tuple[Any, tuple[int, int, int], int]] = {
    "sigmoid": (lambda: fa.Sigmoid(bias=-2.0), (9, 177, 544), 16),
    "tanh sigmoid -5": (lambda: tanh_sigmoid(-5.0), (9, 177, 129), 16),
    "tanh sigmoid -2": (lambda: tanh_sigmoid(-2.0), (9, 256, 17), 16),
    "tanh sigmoid 1": (lambda: tanh_sigmoid(1.0), (1, 177, 977), 16),
    "alibi": (fa.ALiBi, (9, 177, 128), 16),
    "relative": (table, (9, 256, 256), 0),
    "output times two": (
        lambda: fa.variant(output_mod=lambda out, lse, b, h, q_idx: 2 * out), (2, 256, 256), 16,
    ),
}  # fmt: skip
"""(variant, (requests, q_len, kv_len), page size)."""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", rotation.chosen(list(VARIANTS), 2))
def test_full_size(name: str) -> None:
    make, (count, q_len, kv_len), page_size = VARIANTS[name]
    batch = Batch((q_len,) * count, (kv_len,) * count, (8, 8), 128, torch.bfloat16, page_size)
    variant = make()
    made = engine(batch, variant)
    made.plan(batch.q_indptr, batch.storage)
    softmax = "sigmoid" not in name
    got = made.run(batch.q, batch.k, batch.v, return_lse=softmax)
    call = (batch.q, *batch.packed_keys(), batch.q_indptr, indptr(batch.kv_len), variant)
    exact, lse = varlen_reference(*call)
    eager, _ = varlen_reference(*call, dtype=batch.dtype)
    assert_close(got[0] if softmax else got, exact, eager)
    if softmax:
        torch.testing.assert_close(got[1].double(), lse.double(), rtol=2e-5, atol=2e-5)
