"""Dense calls on a device's slots: complete, deterministic, split only where that gains time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit.planner.tiles import Costs, choose_rows, coefficients
from flashattn_jit.variants.ir.ir import VariantIR

from .batch_plans import (
    FEW_ROW,
    PREFILL,
    Dense,
    Paged,
    Planned,
    check_whole,
    device_options,
    make,
    span,
)

SLOTS = 264  # two blocks on each of 132 multiprocessors


def plan(q_len: int, kv_len: list[int], heads=(8, 8), **options) -> Planned:
    """A plan with the costs of an H100."""
    rows = q_len * heads[0] // heads[1]
    return make(
        [q_len] * len(kv_len), Dense(kv_len), heads=heads,
        **{**device_options("sm_90", rows, SLOTS), **options},
    )  # fmt: skip


def decode(kv_len: list[int], heads=(8, 8), **options) -> Planned:
    return plan(1, kv_len, heads, **options)


def few_row_costs() -> Costs:
    """Those of `decode`."""
    spec = choose_rows(VariantIR(()), (128, 128), ("bfloat16",) * 3, "sm_90", 1)
    return coefficients(spec, "sm_90")


def keys(items: list[dict[str, int]]) -> int:
    return sum(item["kv_end"] - item["kv_begin"] for item in items)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 300), st.lists(st.integers(0, 700), max_size=4),
    st.sampled_from([(4, 4), (4, 2), (5, 1), (7, 1)]), st.integers(1, 40), st.booleans(),
)  # fmt: skip
def test_every_pair_is_computed_once(q_len, kv_len, heads, workers, small):
    few = {"kinds": (PREFILL, FEW_ROW), "few_rows": 8, "merge_ns": 0.0} if small else {}
    planned = plan(q_len, kv_len, heads, workers=workers, **few)
    check_whole(planned, kv_len)
    splits = {merge["num_splits"] for merge in planned.merges}
    assert splits <= set(range(2, planned.plan.most_splits + 1))


def test_long_keys_of_one_request_fill_the_slots_evenly():
    planned = decode([65536])
    assert len(planned.merges) == 8
    loads = [keys(items) for items in planned.lists(1)]
    assert max(loads) <= 65536 * 8 / SLOTS + 64
    assert sum(load > 0 for load in loads) >= 0.9 * SLOTS
    assert sum(len(items) > 1 for items in planned.lists(1)) <= 8, "a list is one item, or nearly"


@pytest.mark.parametrize("tiles", [SLOTS, 3 * SLOTS])
def test_equal_tiles_that_fill_the_slots_are_not_split(tiles):
    planned = plan(128, [4096] * tiles, (1, 1))
    assert len(planned.items) == tiles and not planned.merges


def test_of_equal_tiles_what_full_rounds_leave_over_is_shared_where_that_gains():
    """12 rounds and 36 tiles: not for 512 keys, whose time is seven times that of a merge."""
    tiles = 12 * SLOTS + 36
    assert not plan(128, [512] * tiles, (1, 1)).merges
    planned = plan(128, [4096] * tiles, (1, 1))
    assert len(planned.merges) <= 36
    whole = 13 * plan(128, [4096], (1, 1), merge_ns=1e9).plan.total_ns
    assert planned.plan.critical_ns + 3000 < 0.95 * whole


def test_a_batch_that_fills_the_slots_is_not_split():
    planned = decode([1024] * 64)
    assert len(planned.items) == 512 and not planned.merges


@pytest.mark.parametrize("count", [1, 4, 8, 16, 32, 64])
def test_a_batch_that_saturates_the_memory_is_not_split(count):
    """58 of 264 blocks do: so many bytes are in flight to them."""
    assert bool(decode([8192] * count).merges) == (count * 8 < 58)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=40), st.sampled_from([(8, 8), (6, 3)]),
    st.integers(1, 300),
)  # fmt: skip
def test_the_end_of_a_plan_is_that_of_workers_that_share_the_bandwidth(kv_len, heads, workers):
    """Against a simulation of the loads, of which the latency of one item is not shared."""
    planned = decode(kv_len, heads, workers=workers)
    costs = few_row_costs()
    left = [load - costs.item_ns for load in planned.plan.load_ns(1) if load > 0]
    time = costs.item_ns if any(x > 1e-3 for x in left) else 0.0
    while left := [x for x in left if x > 1e-3]:
        rate = min(workers / len(left), costs.load_ns / costs.alone_ns)
        step = min(left) / rate
        left, time = [x - step * rate for x in left], time + step
    assert planned.plan.critical_ns == pytest.approx(time, rel=1e-3, abs=1)


@pytest.mark.parametrize("kv_len", [64, 128, 200])
def test_short_keys_are_not_split(kv_len):
    """Below two chunks of keys, and where the merge would take as long as the keys."""
    assert not decode([kv_len]).merges


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("workers", [7, 264, 395, 396])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (6, 6)])
def test_the_kv_heads_of_a_request_start_together(heads, workers, page_size):
    """A page holds the keys of all kv heads, 2 KiB where it has one key and eight heads. No other
    request starts between them, so a page is read whole at one time."""
    lengths = [int(n) for n in np.random.default_rng(workers).integers(1, 3000, 200)]
    planned = make(
        [1] * len(lengths), Paged(lengths, page_size), heads=heads,
        **{**device_options("sm_90", heads[0] // heads[1], workers), "merge_ns": 1e9},
    )  # fmt: skip
    assert not planned.merges
    costs = few_row_costs()
    starts: dict[int, list[float]] = {}
    for items in planned.lists(1):
        start = 0.0
        for item in items:
            starts.setdefault(item["request"], []).append(start)
            start += costs.item_ns + keys([item]) * costs.load_ns
    assert {len(of) for of in starts.values()} == {heads[1]}
    spans = sorted((min(of), max(of)) for of in starts.values())
    assert all(last <= first + 1e-3 for (_, last), (first, _) in pairwise(spans))


def test_the_parts_of_a_cut_request_start_together_in_all_kv_heads():
    """Of a number of workers that the kv heads divide."""
    planned = make([1], Paged([32768], 1), heads=(8, 8), **device_options("sm_90", 1, SLOTS))
    assert planned.merges
    lists = [[(i["kv_begin"], i["kv_end"]) for i in items] for items in planned.lists(1)]
    each = SLOTS // 8
    assert all(lists[h * each : (h + 1) * each] == lists[:each] for h in range(8))
    assert [i["head_begin"] for i in planned.items] == sorted(
        i["head_begin"] for i in planned.items
    )


def test_one_long_request_among_short_ones_is_cut_and_the_others_even_out():
    planned = decode([32768, *[128] * 100])
    splits = {0: 0, 1: 0}
    for merge in planned.merges:
        short = int(merge["request"] > 0)
        splits[short] = max(splits[short], merge["num_splits"])
    assert splits[0] >= 16 and splits[1] <= 2
    assert sum(item["partial"] >= 0 for item in planned.items) <= 2 * SLOTS
    assert sum(merge["request"] > 0 for merge in planned.merges) < 0.05 * 800
    loads = planned.plan.load_ns(1)
    assert max(loads) < 1.04 * sum(loads) / SLOTS


def in_flight(planned: Planned) -> list[set[tuple[int, int]]]:
    """The (request, head) that workers are at, at each start of an item; a key costs the same."""
    spans = []
    for items in planned.lists(0):
        start = 0
        for item in items:
            end = start + item["kv_end"] - item["kv_begin"]
            spans.append((start, end, (item["request"], item["head_begin"])))
            start = end
    return [
        {of for begin, end, of in spans if begin <= now < end}
        for now in sorted({begin for begin, _, _ in spans})
    ]


def test_prefill_is_at_few_heads_at_a_time():
    """A head's 16k keys are 8 MiB and the L2 of an H100 50: 4 heads, and the next 4 at a border.
    The last tenth is assigned longest first, here of one more head of each quarter."""
    planned = plan(16384, [16384], (16, 16), workers=132)
    assert not planned.merges and len(planned.items) == 16 * 128
    heads = [len(now) for now in in_flight(planned)]
    assert max(heads) <= 8 and sorted(heads)[len(heads) // 2] <= 4


def test_prefill_is_at_few_heads_at_a_time_if_each_has_its_lists():
    """As above, by causal lists of each head."""
    blocks, count = 128, np.tile(np.arange(1, 129), 16).astype(np.int32)
    begin = np.repeat(np.arange(16) * blocks, blocks).astype(np.int32)
    planned = make(
        [128 * blocks], Dense([128 * blocks]), heads=(16, 16),
        lists=(128, 128, True, span(begin), span(count), 16 * blocks),
        **device_options("sm_90", 128 * blocks, 132),
    )  # fmt: skip
    assert not planned.merges and len(planned.items) == 16 * blocks
    heads = [len(now) for now in in_flight(planned)]
    assert max(heads) <= 8 and sorted(heads)[len(heads) // 2] <= 4


def test_few_prefill_tiles_share_the_device():
    planned = plan(512, [16384])  # 32 tiles for 264 slots
    assert len(planned.merges) == 32 and len(planned.items) <= SLOTS
    assert sum(bool(items) for items in planned.lists(0)) >= 0.9 * SLOTS


def test_tiles_are_full_but_the_last():
    rows = {(i["row_begin"], i["row_end"]) for i in plan(300, [512], (2, 2)).items}
    assert sorted(rows) == [(0, 128), (128, 256), (256, 300)]


def test_the_same_call_has_the_same_plan():
    def whole() -> tuple:
        made = decode([5000, 70, 0, 900], (8, 2)).plan
        return made.work(1), made.merge_work, made.worker_indptr(1), made.partial_rows

    first = whole()
    decode([7])
    assert whole() == first
