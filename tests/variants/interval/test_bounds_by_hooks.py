"""The interval form against hooks called as functions, pair by pair: no tracer, no IR, no vmap.

The other tests of the interval form start from the traced graph, which the interval form starts
from as well: a mask that was traced wrongly would agree with itself there.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_jit.variants.interval.terms import EMPTY, FULL
from flashattn_jit.variants.interval.tile_runs import Grid
from flashattn_jit.variants.params import Dims
from tests.registry.case import Case, Shape
from tests.registry.masks import MASK_CASES

from .bounds_oracle import classify_grid, traced

SHAPE = Shape(2, 2, 1, 21, 23, 16, 16)
TILES = ((1, 1), (4, 5), (16, 16))
CASES = [
    c for c in MASK_CASES if c.interval != "none" and "builtin" not in c.tags and c.fits(SHAPE)
]


def kept_pairs(mod: Any, shape: Shape) -> np.ndarray[Any, Any]:
    """The hook's result of every pair, bool [batch, num_q_heads, q_len, kv_len]."""
    sizes = (shape.batch, shape.num_q_heads, shape.q_len, shape.kv_len)
    kept = [
        bool(mod(*(torch.tensor(i, dtype=torch.int32) for i in at)))
        for at in itertools.product(*map(range, sizes))
    ]
    return np.array(kept).reshape(sizes)


def test_there_are_masks_to_look_at() -> None:
    assert len(CASES) > 30


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_tiles_are_what_the_hook_says(case: Case) -> None:
    mod, _ = case.build(SHAPE)
    kept = kept_pairs(mod, SHAPE)
    mask = traced(mod, Dims(*SHAPE))
    for tile_q, tile_kv in TILES:
        grid = Grid(0, SHAPE.q_len, 0, SHAPE.kv_len, tile_q, tile_kv, 0, SHAPE.batch, 0,
                    SHAPE.num_q_heads)  # fmt: skip
        states = np.broadcast_to(
            classify_grid(mask.graph, mask.params, grid),
            (SHAPE.batch, SHAPE.num_q_heads, grid.num_q_tiles, grid.num_kv_tiles),
        )
        for x, y in itertools.product(range(grid.num_q_tiles), range(grid.num_kv_tiles)):
            tile = kept[:, :, x * tile_q : (x + 1) * tile_q, y * tile_kv : (y + 1) * tile_kv]
            assert not (states[:, :, x, y] == EMPTY)[tile.any((2, 3))].any(), (x, y)
            assert not (states[:, :, x, y] == FULL)[~tile.all((2, 3))].any(), (x, y)
