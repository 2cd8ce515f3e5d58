"""Values that are infinite or NaN: they change the dims that they belong to, and no others."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_jit as fa
from tests.ops.cases import HOST_TARGETS

INF, NAN = math.inf, math.nan
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 130)  # last keys in every place of pairs and tiles
ROWS = (1, 2, 5, 9, 17, 40)  # on AMX: of one tile, of two, of two blocks, of prefill


def keys_and_values(length: int, dims: tuple[int, int], apart: int) -> tuple[torch.Tensor, ...]:
    """k and v [1, 2, length, dim] whose rows are `apart` elements wider than their dims."""
    generator = torch.Generator().manual_seed(length)
    return tuple(
        torch.randn(1, 2, length, dim + apart, generator=generator).bfloat16()[..., :dim]
        for dim in dims
    )


@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 96), (256, 256), (288, 288)], ids=str)
def test_neighbours_of_infinite_values_are_finite(target: str, dims: tuple[int, int]) -> None:
    for length in LENGTHS:
        k, v = keys_and_values(length, dims, 32 * (length % 2))
        v[0, 0, length - 1, 3] = INF  # of the last key, which may lack a partner
        v[0, 0, length // 2, 8] = NAN
        v[0, 1, 0, 6], v[0, 1, length - 1, 6] = (INF, -INF) if length > 1 else (-INF, -INF)
        for rows in ROWS:
            q = torch.randn(1, 2 * rows, 1, dims[0]).bfloat16()
            out = fa.attention(q, k, v, target=target)
            weights = (q.double() @ k.double().repeat_interleave(rows, 1).mT) * dims[0] ** -0.5
            exact = weights.softmax(-1) @ v.double().repeat_interleave(rows, 1)
            case = f"{length} keys, {rows} rows"
            close = torch.isclose(out.double(), exact, atol=3e-2, rtol=3e-2, equal_nan=True)
            assert close.all(), f"{case}: {(~close).nonzero()[:4].tolist()}"
            assert out[0, :rows, 0, 3].eq(INF).all() and out[0, :rows, 0, 2].isfinite().all()
