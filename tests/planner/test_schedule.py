"""The schedule covers every query row and key exactly once, evenly, and the same way every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit import _C

FIELDS = ("request", "head_begin", "head_count", "row_begin", "row_end", "kv_begin", "kv_end",
          "partial")  # fmt: skip


def make(q_len, kv_len, q_heads=4, kv_heads=2, workers=2, block_mask=None, **options):
    problem = _C.Problem(
        num_requests=len(q_len), num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=8,
        head_dim_v=8, q_len=tuple(q_len), kv_len=tuple(kv_len), block_mask=block_mask,
    )  # fmt: skip
    settings = {
        "tile_q": 96,
        "row_granule": 16,
        "tile_kv": 32,
        "min_chunk": 64,
        "num_workers": workers,
    }
    result = _C.schedule(None, problem, **{**settings, **options})
    work = np.frombuffer(result["work"], np.int32).reshape(-1, 8)
    merges = np.frombuffer(result["merge_work"], np.int32).reshape(-1, 8)
    return [dict(zip(FIELDS, map(int, row), strict=True)) for row in work], merges, result


def coverage(items, q_len, kv_len, q_heads):
    """How often each (request, head, query row, key) is computed."""
    seen = [np.zeros((q_heads, q, k), np.int32) for q, k in zip(q_len, kv_len, strict=True)]
    for w in items:
        rows = np.arange(w["row_begin"], w["row_end"])
        q, h = rows // w["head_count"], w["head_begin"] + rows % w["head_count"]
        seen[w["request"]][h, q, w["kv_begin"] : w["kv_end"]] += 1
    return seen


lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 700)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([(4, 4), (4, 2), (5, 1), (7, 1)]), st.integers(1, 5))
def test_every_pair_is_computed_once(shape, heads, workers):
    q_len, kv_len = zip(*shape, strict=True)
    items, merges, result = make(q_len, kv_len, *heads, workers=workers)
    for counts in coverage(items, q_len, kv_len, heads[0]):
        assert (counts == 1).all()
    # Partial states lie side by side, without gaps or overlaps, and are all merged.
    spans = sorted(
        (w["partial"], w["row_end"] - w["row_begin"]) for w in items if w["partial"] >= 0
    )
    end = 0
    for begin, rows in spans:
        assert begin == end
        end += rows
    assert end == result["partial_rows"]
    assert sum(m[6] * (m[4] - m[3]) for m in merges) == end


def test_long_decode_is_split_over_workers():
    _items, merges, result = make([1], [65536], 1, 1, workers=2, row_granule=1, tile_q=8)
    assert len(merges) == 1 and result["most_splits"] >= 2
    assert result["critical_cost"] * 2 < result["total_cost"] * 1.1


def test_many_units_are_not_split():
    _, merges, _ = make([1] * 4, [4096] * 4, 8, 8, workers=2, row_granule=1, tile_q=8)
    assert len(merges) == 0


def test_work_does_not_depend_on_what_ran_before():
    first = make([100, 7], [500, 900])[2]
    make([3], [9])
    assert make([100, 7], [500, 900])[2] == first


def test_longest_work_comes_first():
    items, _, _ = make([96, 96], [64, 640], workers=1)
    assert [w["request"] for w in items] == sorted((w["request"] for w in items), reverse=True)


def test_items_stay_inside_blocks_of_a_block_mask():
    mask = ((1, 1, 4, 4), (16, 0, 4, 1), 48, 48)
    items, _, _ = make([192], [192], block_mask=mask)
    for w in items:
        first, last = w["row_begin"] // w["head_count"], (w["row_end"] - 1) // w["head_count"]
        assert first // 48 == last // 48
    assert all((c == 1).all() for c in coverage(items, [192], [192], 4))


@pytest.mark.parametrize("name", ["tile_q", "row_granule", "tile_kv", "min_chunk", "num_workers"])
def test_options_below_one_are_refused(name):
    with pytest.raises(ValueError, match=name):
        make([8], [8], **({"workers": 0} if name == "num_workers" else {name: 0}))
