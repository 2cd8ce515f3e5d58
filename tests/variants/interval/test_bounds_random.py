"""Whatever a mask computes, a tile called empty keeps no pair and a tile called full keeps all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashattn_jit.variants.interval.simplify import simplify
from flashattn_jit.variants.interval.tile_runs import Grid, tile_runs
from flashattn_jit.variants.ir.ir import format_graph

from .bounds_oracle import Mask, brute_force, classify_grid, dense_mask, format_program, traced
from .bounds_random import RandomMask
from .tile_states import dense_states, runs_of_row


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
    runs = dense_states(tile_runs(mask.graph, mask.params, grid))
    # Refinement may decide a tile that is partial as one box; it never changes a decided state.
    assert ((runs == dense) | (dense == 1)).all()
    refined = np.broadcast_to(runs, expected.shape)
    assert ((refined == 1) | (refined == expected)).all(), "\n".join(text)


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip
@given(masks(), st.integers(0, 40), st.integers(1, 30), st.integers(1, 70))
def test_runs_of_a_row_hold_every_kept_key(mask: Mask, q0: int, rows: int, kv_len: int) -> None:
    """Tiles of one key, and of all rows."""
    grid = Grid(q0, q0 + rows, 0, kv_len, rows, 1)
    kept = np.flatnonzero(dense_mask(mask, grid)[0, 0].any(0))
    runs = list(runs_of_row(tile_runs(mask.graph, mask.params, grid), 0, 0, 0))
    visited = np.concatenate([np.arange(begin, end) for begin, end, _ in runs] or [[]])
    assert np.isin(kept, visited).all()


@pytest.mark.parametrize("tile_kv", [1, 8, 64])
def test_keys_that_a_row_of_a_window_visits(tile_kv: int) -> None:
    def visited(fn: Any) -> list[tuple[int, int]]:
        """Runs of key tiles that queries 300 to 309 visit, whatever their states."""
        mask = traced(fn)
        grid = Grid(300, 310, 0, 1000, 10, tile_kv)
        runs: list[tuple[int, int]] = []
        for begin, end, _ in runs_of_row(tile_runs(mask.graph, mask.params, grid), 0, 0, 0):
            joins = runs and runs[-1][1] == begin
            runs[-1:] = [(runs[-1][0], end)] if joins else [*runs[-1:], (begin, end)]
        return runs

    window = (201 // tile_kv, -(-310 // tile_kv))
    assert visited(lambda b, h, q, k: (q >= k) & (q - k < 100)) == [window]
    sink = visited(lambda b, h, q, k: (q >= k) & ((q - k < 100) | (k < 4)))
    assert sink == [(0, -(-4 // tile_kv)), window]
    assert visited(lambda b, h, q, k: k > q + 5000) == []
