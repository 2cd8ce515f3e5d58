"""Tables of extremes match their tensor, and are made anew when it changes."""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.variants.interval.range_tables import BLOCK, block_extremes, build_tables
from flashattn_jit.variants.interval.simplify import RangeTableSpec


def test_a_table_is_kept_while_its_tensor_is_unchanged() -> None:
    tensor = torch.arange(1500)
    first = block_extremes(tensor, 0)
    assert all(a is b for a, b in zip(block_extremes(tensor, 0), first, strict=True))
    tensor[3] = 900
    second = block_extremes(tensor, 0)
    assert second[1] is not first[1]
    assert first[1][0] == 63 and second[1][0] == 900


def test_inference_tensors_are_never_stale() -> None:
    with torch.inference_mode():
        tensor = torch.arange(2000)
        assert block_extremes(tensor, 0)[1][0] == 63
        tensor[5] = 5000
        assert block_extremes(tensor, 0)[1][0] == 5000


@pytest.mark.parametrize("length", [1024, 1087, 1088, 1089])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float32])
def test_block_extremes(dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.rand(3, length, 2, generator=generator) * 100).to(dtype)
    lo, hi = build_tables([RangeTableSpec(0, 1)], [tensor])
    blocks = -(-length // BLOCK)
    assert lo.shape == hi.shape == (3, blocks, 2)
    values = tensor.to(torch.float32)
    for i in range(blocks):
        block = values[:, i * BLOCK : (i + 1) * BLOCK]
        assert torch.equal(lo[:, i].float(), block.amin(1))
        assert torch.equal(hi[:, i].float(), block.amax(1))


def test_a_block_with_nan_has_nan_extremes() -> None:
    tensor = torch.arange(1300.0)
    tensor[100] = float("nan")
    lo, hi = block_extremes(tensor, 0)
    assert lo.isnan().tolist() == hi.isnan().tolist() == [i == 1 for i in range(21)]


def test_short_dims_have_no_table() -> None:
    assert all(t.numel() == 0 for t in block_extremes(torch.arange(1000), 0))
