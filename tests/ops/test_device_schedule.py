"""Schedules for a device's slots: complete, deterministic, split only where that gains time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_schedule import coverage, lengths, make

SLOTS = 264  # two blocks on each of 132 multiprocessors


def plan(q_len, kv_len, q_heads=8, kv_heads=8, *, tile_q=128, min_chunk=256, workers=SLOTS):
    """tile_kv 64, full tiles."""
    return make(
        q_len, kv_len, q_heads, kv_heads, workers, tile_q=tile_q, row_granule=tile_q, tile_kv=64,
        min_chunk=min_chunk, device=True,
    )  # fmt: skip


def decode(kv_len, q_heads=8, kv_heads=8, **options):
    return plan([1] * len(kv_len), kv_len, q_heads, kv_heads, tile_q=16, min_chunk=128, **options)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([(4, 4), (4, 2), (5, 1), (7, 1)]), st.integers(1, 40))
def test_every_pair_is_computed_once(shape, heads, workers):
    q_len, kv_len = zip(*shape, strict=True)
    items, merges, result = plan(q_len, kv_len, *heads, workers=workers, tile_q=16, min_chunk=64)
    for counts in coverage(items, q_len, kv_len, heads[0]):
        assert (counts == 1).all()
    rows = sum(w["row_end"] - w["row_begin"] for w in items if w["partial"] >= 0)
    assert rows == result["partial_rows"]
    assert {int(m[6]) for m in merges} <= set(range(2, result["most_splits"] + 1))


def test_long_keys_of_one_request_fill_the_slots_in_one_wave():
    items, merges, _ = decode([65536])
    assert len(merges) == 8 and 0.9 * SLOTS <= len(items) <= SLOTS
    longest = max(w["kv_end"] - w["kv_begin"] for w in items)
    assert longest <= 65536 * 8 / SLOTS + 64


@pytest.mark.parametrize("tiles", [SLOTS, 3 * SLOTS, 12 * SLOTS + 36])
def test_equal_tiles_that_fill_the_slots_are_not_split(tiles):
    items, merges, _ = plan([128] * tiles, [4096] * tiles, 1, 1)
    assert len(items) == tiles and len(merges) == 0


def test_a_batch_that_fills_the_slots_is_not_split():
    items, merges, _ = decode([1024] * 64)
    assert len(items) == 512 and len(merges) == 0


def test_short_keys_are_not_split():
    """Below two chunks of keys, and where the merge would take as long as the keys."""
    for kv_len in (64, 128, 200):
        assert len(decode([kv_len])[1]) == 0


def test_one_long_request_among_short_ones_is_the_only_one_split():
    items, merges, result = decode([32768, *[128] * 100], 8, 8)
    assert {int(m[0]) for m in merges} == {0}
    assert all(w["partial"] < 0 for w in items if w["request"] > 0)
    assert result["critical_cost"] < 16 * 32768 / 8


def test_few_prefill_tiles_share_the_device():
    items, merges, _ = plan([512], [16384], 8, 8)  # 32 tiles for 264 slots
    assert len(merges) == 32 and len(items) <= SLOTS


def test_tiles_are_full_but_the_last():
    items, _, _ = plan([300], [512], 2, 2)
    rows = sorted({(w["row_begin"], w["row_end"]) for w in items})
    assert rows == [(0, 128), (128, 256), (256, 300)]


def test_the_same_problem_has_the_same_schedule():
    first, second = (decode([5000, 70, 0, 900], 8, 2)[2] for _ in range(2))
    assert first == second
