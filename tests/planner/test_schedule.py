"""Dense calls on threads: every query row and key once, evenly, and the same way every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit import _C

from .batch_plans import (
    CPU_KINDS,
    CPU_MERGE_NS,
    FEW_ROW,
    PREFILL,
    Dense,
    Planned,
    Ragged,
    check_whole,
    make,
)

HEADS = [(4, 4), (4, 2), (5, 1), (7, 1)]

kv_lengths = st.lists(st.integers(0, 700), max_size=4)


def on_threads(q_len: int, kv_len: list[int], heads=(4, 2), workers=2, **options) -> Planned:
    """A plan with the costs of a CPU."""
    own = {
        "kinds": CPU_KINDS, "merge_ns": CPU_MERGE_NS, "head_dim_v": 128, "share_workers": True,
    }  # fmt: skip
    return make(
        [q_len] * len(kv_len), Dense(kv_len), heads=heads, workers=workers, **{**own, **options}
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 300), kv_lengths, st.sampled_from(HEADS), st.integers(1, 5),
    st.sampled_from([(CPU_KINDS, CPU_MERGE_NS), ((PREFILL, FEW_ROW), 0.0)]), st.booleans(),
)  # fmt: skip
def test_every_pair_is_computed_once(q_len, kv_len, heads, workers, costs, share):
    """`check_whole`: partial states lie side by side, without gaps or overlaps, and all are
    merged."""
    kinds, merge_ns = costs
    planned = on_threads(
        q_len, kv_len, heads, workers, kinds=kinds, merge_ns=merge_ns, share_workers=share
    )
    check_whole(planned, kv_len)
    for kind in (0, 1):
        for item in planned.work[kind]:
            assert (q_len * heads[0] // heads[1] <= 8) == (kind == 1)
            assert item["row_end"] - item["row_begin"] <= kinds[kind].tile_q
            assert item["kv_begin"] % kinds[kind].tile_kv == 0


def test_long_decode_is_split_over_workers():
    planned = on_threads(1, [65536], (1, 1))
    assert len(planned.merges) == 1 and planned.plan.most_splits >= 2
    assert planned.plan.critical_ns * 2 < planned.plan.total_ns * 1.1


@pytest.mark.parametrize("kv_len", [128, 256, 500])
def test_short_keys_are_not_split(kv_len):
    """Below two parts of 256 keys, which cost more in merging than they gain."""
    assert on_threads(1, [kv_len], (1, 1)).plan.most_splits == 1


@pytest.mark.parametrize("q_len", [1, 5, 64])
def test_many_units_are_not_split(q_len):
    assert not on_threads(q_len, [4096] * 4, (8, 8)).merges


@pytest.mark.parametrize("kv_len", [[4096] * 8, [9000, 700, 5000], [65536], [300] * 5])
def test_the_heads_of_a_token_are_read_by_one_worker(kv_len):
    planned = on_threads(1, kv_len, (8, 4), workers=3)
    check_whole(planned, kv_len)
    for items in planned.lists(1):
        heads = [item["head_begin"] for item in items]
        assert heads == [0, 2, 4, 6] * (len(items) // 4)
        for first in range(0, len(items), 4):
            keys = {(i["request"], i["kv_begin"], i["kv_end"]) for i in items[first : first + 4]}
            assert len(keys) == 1
    loads = planned.loads()
    assert max(loads) <= 1.25 * sum(loads) / 3


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 60]), st.integers(1, 3000)), min_size=1, max_size=6
    ),
    st.sampled_from([(8, 8), (4, 2), (32, 32), (32, 8), (3, 3)]), st.integers(2, 9),
)  # fmt: skip
def test_keeping_heads_together_costs_a_quarter_of_the_time_of_few_rows(requests, heads, workers):
    q_len, kv_len = [q for q, _ in requests], [max(q, k) for q, k in requests]
    plans = [
        make(
            q_len, Ragged(kv_len), heads=heads, workers=workers, kinds=CPU_KINDS,
            merge_ns=CPU_MERGE_NS, head_dim_v=128, share_workers=True, heads_apart=apart,
        )
        for apart in (False, True)
    ]  # fmt: skip
    together, apart = (p.plan.critical_ns + CPU_MERGE_NS * bool(p.merges) for p in plans)
    few = sum(plans[1].plan.load_ns(1)) / workers
    assert together <= apart + 0.25 * few + 1.0
    check_whole(plans[0], kv_len)


@pytest.mark.parametrize(
    ("kv_len", "options"), [([4096] * 4, {"heads_apart": True}), ([200], {}), ([200] * 3, {})]
)
def test_heads_are_divided_where_that_ends_earlier_or_they_are_apart(kv_len, options):
    planned = on_threads(1, kv_len, (4, 4), **options)
    check_whole(planned, kv_len)
    heads = [{item["head_begin"] for item in items} for items in planned.lists(1)]
    assert heads == [{0, 1}, {2, 3}]


def test_work_does_not_depend_on_what_ran_before():
    def whole() -> tuple:
        plan = on_threads(70, [500, 900], workers=3).plan
        return (plan.work(0), plan.work(1), plan.merge_work, plan.worker_indptr(0),
                plan.partial_rows)  # fmt: skip

    first = whole()
    on_threads(3, [9])
    assert whole() == first


def test_longest_work_comes_first():
    planned = on_threads(96, [64, 640], workers=1)
    requests = [item["request"] for item in planned.items]
    assert requests == sorted(requests, reverse=True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), kv_lengths, st.sampled_from(HEADS), st.sampled_from([1, 3, 48, 128, 1000]),
    st.integers(1, 5), st.sampled_from([CPU_KINDS, (PREFILL, FEW_ROW)]),
)  # fmt: skip
def test_items_stay_inside_blocks_of_a_block_mask(q_len, kv_len, heads, block, workers, kinds):
    planned = on_threads(q_len, kv_len, heads, workers, kinds=kinds, row_block=block)
    check_whole(planned, kv_len)
    for item in planned.items:
        first, last = (
            row // item["head_count"] for row in (item["row_begin"], item["row_end"] - 1)
        )
        assert first // block == last // block


def test_blocks_are_tiles_of_a_block_mask_where_they_are_no_larger():
    planned = on_threads(192, [192], row_block=48)
    rows = sorted({(item["row_begin"], item["row_end"]) for item in planned.items})
    assert rows == [(0, 96), (96, 192), (192, 288), (288, 384)]


@pytest.mark.parametrize("name", ["tile_q", "row_granule", "tile_kv", "min_chunk"])
def test_tiles_below_one_are_refused(name):
    sizes = {"tile_q": 96, "row_granule": 16, "tile_kv": 96, "min_chunk": 256} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}.* of a kind must be positive"):
        kind = _C.Kind(None, **sizes, item_ns=1.0, load_ns=1.0, pair_ns=1.0, state_ns=1.0)
        on_threads(8, [8], kinds=(kind, None), few_rows=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": 0}, "num_workers must be positive"),
        ({"row_block": -1}, "row_block must not be negative"),
    ],
)
def test_options_below_their_least_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        on_threads(8, [8], **options)
