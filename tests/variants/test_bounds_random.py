"""Whatever a mask computes, a tile called empty keeps no pair and a tile called full keeps all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashattn_jit.variants.bounds import Grid, classify_grid, kv_bounds, tile_runs
from flashattn_jit.variants.bounds_simplify import format_program, simplify
from flashattn_jit.variants.ir import format_graph

from .bounds_oracle import Mask, brute_force, dense_mask
from .bounds_random import RandomMask


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    depth = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 50))
    return RandomMask(lambda n: draw(st.integers(0, n - 1)), seed).finish(depth)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    q, k = draw(st.integers(-20, 10)), draw(st.integers(0, 5))
    q_len, kv_len = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    tiles = st.sampled_from([1, 4, 16, 33])
    return Grid(q, q + q_len, k, k + kv_len, draw(tiles), draw(tiles), 0, 2, 0, 3)


@settings(max_examples=400, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip
@given(masks(), grids())
def test_sound(mask: Mask, grid: Grid) -> None:
    expected = brute_force(mask, grid)
    dense = classify_grid(mask.graph, mask.params, grid)
    got = np.broadcast_to(dense, expected.shape)
    wrong = (got != 1) & (got != expected)
    text = [*format_graph(mask.graph), *format_program(simplify(mask.graph))]
    assert not wrong.any(), "\n".join(text)
    runs = tile_runs(mask.graph, mask.params, grid).dense()
    # Refinement may prove more of a tile than one look at it does, never less or otherwise.
    assert ((runs == dense) | (dense == 1)).all()
    refined = np.broadcast_to(runs, expected.shape)
    assert ((refined == 1) | (refined == expected)).all(), "\n".join(text)


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip
@given(masks(), st.integers(0, 40), st.integers(1, 30), st.integers(1, 70))
def test_kv_bounds_hold_every_kept_key(mask: Mask, q0: int, rows: int, kv_len: int) -> None:
    grid = Grid(q0, q0 + rows, 0, kv_len, 1, 1)
    kept = np.flatnonzero(dense_mask(mask, grid)[0, 0].any(0))
    found = kv_bounds(mask.graph, mask.params, 0, 0, q0, q0 + rows, kv_len)
    if len(kept):
        assert found.lo <= kept[0] and kept[-1] < found.hi


@pytest.mark.parametrize("tile_kv", [1, 8, 64])
def test_kv_bounds_of_a_window(tile_kv: int) -> None:
    from .bounds_oracle import traced

    mask = traced(lambda b, h, q, k: (q >= k) & (q - k < 100))
    found = kv_bounds(mask.graph, mask.params, 0, 0, 300, 310, 1000, tile_kv)
    assert found.lo == 201 // tile_kv * tile_kv and found.hi == min(
        1000, -(-310 // tile_kv) * tile_kv
    )
    assert found.contiguous
    sink = traced(lambda b, h, q, k: (q >= k) & ((q - k < 100) | (k < 4)))
    found = kv_bounds(sink.graph, sink.params, 0, 0, 300, 310, 1000, tile_kv)
    assert (found.lo, found.contiguous) == (0, False)
    nothing = traced(lambda b, h, q, k: k > q + 5000)
    assert kv_bounds(nothing.graph, nothing.params, 0, 0, 300, 310, 1000, tile_kv).hi == 0
