"""Range extremes are exact for every range, and tables follow their tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashattn_jit.variants.range_table import (
    RangeTable,
    RangeTableSpec,
    block_extremes,
    build_tables,
    range_table,
)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_every_range(length: int, dtype: str) -> None:
    rng = np.random.default_rng(length)
    rows = rng.integers(0, 200, (3, length)).astype(dtype)
    row = rng.integers(0, 3, 2000)
    lo = rng.integers(0, length, 2000)
    hi = np.minimum(lo + rng.integers(0, length, 2000), length - 1)
    low, high, nan = RangeTable(rows).query(row, lo, hi)
    spans = [rows[r, a : b + 1] for r, a, b in zip(row, lo, hi, strict=True)]
    assert (low == [s.min() for s in spans]).all()
    assert (high == [s.max() for s in spans]).all()
    assert not nan.any()
    if dtype != "float32":
        every, some, _ = RangeTable(rows, "bits").query(row, lo, hi)
        assert (every == [np.bitwise_and.reduce(s) for s in spans]).all()
        assert (some == [np.bitwise_or.reduce(s) for s in spans]).all()


def test_nan_is_reported_for_the_ranges_that_hold_one() -> None:
    rows = np.arange(300.0).reshape(1, 300)
    rows[0, 100] = np.nan
    table = RangeTable(rows)
    zero = np.zeros(3, np.int64)
    _, _, nan = table.query(zero, np.array([0, 100, 101]), np.array([99, 100, 299]))
    assert nan.tolist() == [False, True, False]


def test_queries_broadcast() -> None:
    table = RangeTable(np.arange(200).reshape(1, 200))
    zero = np.asarray(0)
    low, high, _ = table.query(zero, np.arange(10)[:, None], np.arange(100, 107))
    assert low[3, 2] == 3 and high[3, 2] == 102


def test_a_table_is_kept_while_its_tensor_is_unchanged() -> None:
    tensor = torch.arange(500)
    first = range_table(tensor, 0)
    assert range_table(tensor, 0) is first
    tensor[3] = 9
    second = range_table(tensor, 0)
    assert second is not first
    low, high, _ = second.query(np.asarray(0), np.asarray(3), np.asarray(3))
    assert low == high == 9


def test_inference_tensors_are_never_stale() -> None:
    with torch.inference_mode():
        tensor = torch.arange(2000)
        assert block_extremes(tensor, 0)[1][0] == 63
        tensor[5] = 5000
        assert block_extremes(tensor, 0)[1][0] == 5000


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float32])
def test_block_extremes(dtype: torch.dtype) -> None:
    tensor = (torch.rand(3, 1100, 2, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    lo, hi = build_tables([RangeTableSpec(0, 1)], [tensor])
    assert lo.shape == hi.shape == (3, 18, 2)
    values = tensor.to(torch.float32)
    assert torch.equal(lo[:, 17].float(), values[:, 1088:].amin(1))
    assert torch.equal(hi[:, 2].float(), values[:, 128:192].amax(1))


def test_short_dims_have_no_table() -> None:
    assert all(t.numel() == 0 for t in block_extremes(torch.arange(1000), 0))
