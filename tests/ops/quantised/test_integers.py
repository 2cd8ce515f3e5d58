"""int8 keys and values against bf16 queries: products of integers on CPUs that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference
from tests.harness.rotation import other_target
from tests.ops.cases import HOST_TARGETS, assert_close, normal

INT8 = fa.kv.Format("int8")
TARGETS = [HOST_TARGETS[-1], other_target()]


def check(q: torch.Tensor, k: Any, v: Any, variant: Any = None, target: str | None = None) -> None:
    out = fa.attention(q, k, v, variant, target=target)
    exact, eager = (
        attention_reference(q, k.dequantize(), v.dequantize(), variant, dtype=dtype)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close(out, exact, eager)


def tensors(rows: int, dim: int, dim_v: int, keys: int = 150) -> tuple[torch.Tensor, ...]:
    sizes = ((2, 2 * rows, 1, dim), (2, 2, keys, dim), (2, 2, keys, dim_v))
    q, k, v = (normal(i, *size) for i, size in enumerate(sizes))
    return q.bfloat16(), k, v


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (192, 64), (256, 256), (128, 40)])
def test_groups_of_any_size(dim, dim_v, target) -> None:
    for rows in (1, 2, 3, 4, 7, 8):  # query heads of a KV head
        q, k, v = tensors(rows, dim, dim_v)
        check(q, *(INT8.quantize(x, heads_dim=1) for x in (k, v)), target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_many_magnitudes(target) -> None:
    q, k, v = (x.float() for x in tensors(4, 128, 128))
    q[..., 7] *= 1000.0  # an outlier, which most keys do not meet
    k[:, :, 1:, 7] = 0.0
    q[:, 1] = 0.0
    q[:, 2] *= 1e-38
    k[:, :, 3] *= 1e4
    v[:, :, 5] *= 1e-6
    v[:, :, 9] *= 1e5
    k, v = (INT8.quantize(x, heads_dim=1) for x in (k, v))
    check((q / 300).bfloat16(), k, v, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_weights_of_a_pointwise_normaliser(target) -> None:
    """They are of either sign, and far from 1."""
    for fn in (lambda s: s, lambda s: s * 1e-6, lambda s: torch.relu(s) * 100.0):
        q, k, v = tensors(4, 64, 64)
        k, v = (INT8.quantize(x, heads_dim=1) for x in (k, v))
        check(q, k, v, fa.variant(normalizer=fa.Pointwise(fn)), target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_extreme_codes(target) -> None:
    """-128 too, in every lane: sums of 256 such products fit."""
    codes = torch.full((1, 1, 64, 256), -128, dtype=torch.int8)
    codes[:, :, 1::2] = 127
    stored = fa.kv.Stored(codes, torch.tensor(1.0))
    q = torch.full((1, 4, 1, 256), 3e-3).bfloat16()
    check(q, stored, stored, target=target)
    check(-q, stored, stored, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_that_is_not_finite_changes_no_other(target) -> None:
    q, k, v = tensors(4, 128, 128)
    k, v = (INT8.quantize(x, heads_dim=1) for x in (k, v))
    clean = fa.attention(q, k, v, target=target)
    q[0, 1, 0, 5], q[1, 2, 0, 9] = float("nan"), float("inf")
    out = fa.attention(q, k, v, target=target)
    assert out[0, 1].isnan().all() and out[1, 2].isnan().all()
    out[0, 1], out[1, 2] = clean[0, 1], clean[1, 2]
    assert torch.equal(out, clean)
