"""Tile statistics against brute force, and their memory for a million tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.inspect.explanation.tiles import Counts, analyse
from flashattn_jit.variants.interval.tile_runs import MaskParams
from flashattn_jit.variants.params import Dims
from tests.harness.memory import peak_bytes


def bound(variant, heads, q_len, kv_len, q_offset):
    """The mask and its params for requests of these lengths."""
    dims = Dims(len(q_len), heads, heads, max(q_len), max(kv_len), 64, 64)
    found = variant.bind(dims, {})
    starts = [0] * len(q_len)
    params = MaskParams(
        found.tensors, found.scalars, q_len, kv_len, q_offset, q_token0=starts, kv_token0=starts
    )
    return found.ir.hook("mask_mod"), params


def brute_force(mask, heads, q_len, kv_len, q_offset, tile_q, tile_kv):
    """[heads, 3] counts of empty, partial and full tiles."""
    h, q, k = torch.meshgrid(
        torch.arange(heads), torch.arange(q_len) + q_offset, torch.arange(kv_len), indexing="ij"
    )
    kept = mask(torch.zeros((), dtype=torch.int32), h, q, k).expand(h.shape)
    counts = np.zeros((heads, 3), int)
    for head in range(heads):
        for rows in kept[head].split(tile_q, 0):
            for tile in rows.split(tile_kv, 1):
                counts[head, 0 if not tile.any() else 2 if tile.all() else 1] += 1
    return counts


def window_by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 * (h + 1))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_counts_equal_brute_force_for_every_head():
    mask, params = bound(fa.variant(mask_mod=window_by_head), 3, [100], [130], [30])
    tiles = analyse(mask, params, 3, 16, 24)
    expected = brute_force(window_by_head, 3, 100, 130, 30, 16, 24)
    assert tiles.per_head == tuple(Counts(*map(int, line)) for line in expected)
    assert tiles.counts == Counts(*map(int, expected.sum(0)))


def test_requests_of_different_lengths_are_summed():
    mask, params = bound(fa.variant(mask_mod=causal), 2, [50] * 3, [90, 90, 20], [40, 40, -30])
    tiles = analyse(mask, params, 2, 16, 16)
    expected = 2 * (
        2 * brute_force(causal, 1, 50, 90, 40, 16, 16) + brute_force(causal, 1, 50, 20, -30, 16, 16)
    )
    assert tiles.counts == Counts(*map(int, expected[0]))
    assert tiles.per_head == ()


def test_without_a_mask_every_tile_is_full():
    tiles = analyse(None, MaskParams((), (), [33], [65], [0]), 4, 16, 16)
    assert tiles.counts == Counts(0, 0, 4 * 3 * 5)
    assert tiles.counts.visited_share == 1.0


def test_coverage_is_the_share_of_visited_tiles():
    mask, params = bound(fa.variant(mask_mod=causal), 1, [640], [640], [0])
    tiles = analyse(mask, params, 1, 16, 16)
    fine = tiles.coverage(40, 40)
    assert np.array_equal(fine, np.tril(np.ones((40, 40))))
    coarse = tiles.coverage(7, 9)
    weights = np.outer(
        np.bincount(np.arange(40) * 7 // 40), np.diff([*-(-np.arange(9) * 40 // 9), 40])
    )
    assert coarse.shape == (7, 9)
    assert np.isclose((coarse * weights).sum(), fine.sum())


def test_the_map_shows_visited_tiles():
    mask, params = bound(fa.variant(mask_mod=causal), 1, [64], [64], [0])
    text = str(analyse(mask, params, 1, 16, 16))
    assert [line.strip() for line in text.splitlines()[-4:]] == [
        "|#   |",
        "|##  |",
        "|### |",
        "|####|",
    ]
    assert "10 (62.5%)" in text  # visited


@pytest.mark.parametrize("lengths", [(0, 50), (50, 0), (0, 0)])
def test_empty_problems_have_no_tiles(lengths):
    mask, params = bound(fa.variant(mask_mod=causal), 1, [lengths[0]], [lengths[1]], [0])
    tiles = analyse(mask, params, 1, 16, 16)
    assert tiles.counts.total == 0
    assert "visited" in str(tiles)


def test_a_million_tokens_need_no_quadratic_memory():
    mask, params = bound(fa.SlidingWindow(4096), 1, [2**20], [2**20], [0])

    def look():
        tiles = analyse(mask, params, 1, 128, 128)
        tiles.coverage(256, 256)
        assert tiles.counts.total == 2**26

    assert peak_bytes(look) < 64 << 20  # a byte for each tile would be 64 MiB
