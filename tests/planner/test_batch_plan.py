"""Plans of batches: every pair of row and key once, evenly, within bounds, the same every time."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit import _C

from .batch_plans import (
    CPU_KINDS,
    FEW_ROW,
    PREFILL,
    SMALL_KINDS,
    Level,
    Paged,
    Planned,
    Ragged,
    array,
    check_whole,
    make,
    small_cost,
    span,
)

HEADS = [(4, 4), (4, 2), (5, 1), (6, 3), (7, 1)]

requests = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 2, 7, 33, 90]), st.sampled_from([0, 1, 15, 100, 700, 1501])
    ),
    max_size=6,
)


def storage(kv_len: list[int], page_size: int) -> Ragged | Paged:
    return Paged(kv_len, page_size) if page_size else Ragged(kv_len)


@settings(max_examples=150, deadline=None)
@given(
    requests, st.sampled_from(HEADS), st.integers(1, 12), st.sampled_from([0, 1, 16]),
    st.booleans(), st.sampled_from([(0, 0), (64, 128), (0, 64)]),
)  # fmt: skip
def test_every_row_sees_every_key_once_and_in_order(shape, heads, workers, page, share, split):
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]
    planned = make(
        q_len, storage(kv_len, page), heads=heads, workers=workers, share_workers=share,
        batch_invariant=split != (0, 0), split_keys=split,
    )  # fmt: skip
    check_whole(planned, kv_len)
    for kind in (0, 1):
        own = (PREFILL, FEW_ROW)[kind]
        tile_q, tile_kv = own.tile_q, own.tile_kv
        ends = planned.plan.worker_indptr(kind)
        assert len(ends) == workers + 1 and ends[0] == 0 and ends == sorted(ends)
        assert ends[-1] == len(planned.work[kind])
        for item in planned.work[kind]:
            rows = q_len[item["request"]] * heads[0] // heads[1]
            assert (rows <= 8) == (kind == 1), "the kind is the request's own"
            assert 0 < item["row_end"] - item["row_begin"] <= tile_q
            assert item["kv_begin"] % tile_kv == 0 and item["head_count"] == heads[0] // heads[1]


@settings(max_examples=150, deadline=None)
@given(requests, st.sampled_from(HEADS), st.integers(1, 12), st.booleans())
def test_at_most_two_partial_tiles_of_a_head_a_worker(shape, heads, workers, share):
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]
    planned = make(q_len, Ragged(kv_len), heads=heads, workers=workers, share_workers=share)
    partial = [sum(item["partial"] >= 0 for item in items) for items in planned.work]
    tiles = [sum(partial)] if share else partial
    most = 2 * workers * (heads[1] if share else 1)  # threads cut few rows of all heads at once
    assert all(count <= most for count in tiles)
    rows = sum(n * kind.tile_q for n, kind in zip(partial, (PREFILL, FEW_ROW), strict=True))
    assert planned.plan.partial_rows <= rows
    for work in planned.work:
        for item in work:
            chunk = item["kv_end"] - item["kv_begin"]
            assert item["partial"] < 0 or chunk >= PREFILL.min_chunk, (
                "a cut leaves at least min_chunk"
            )


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from(HEADS), st.integers(1, 12), st.booleans())
def test_no_worker_has_more_than_the_mean_and_the_longest_item(shape, heads, workers, share):
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]
    planned = make(q_len, Ragged(kv_len), heads=heads, workers=workers, share_workers=share)
    costs = [[small_cost(kind, item) for item in planned.work[kind]] for kind in (0, 1)]
    for kind in (0, 1):
        loads = [sum(small_cost(kind, item) for item in items) for items in planned.lists(kind)]
        assert loads == pytest.approx(planned.plan.load_ns(kind), rel=1e-4)
    groups = [planned.loads()] if share else [planned.plan.load_ns(k) for k in (0, 1)]
    longest = (
        [max([*costs[0], *costs[1]], default=0)] if share else [max(c, default=0) for c in costs]
    )
    for loads, item in zip(groups, longest, strict=True):
        assert max(loads) <= sum(loads) / workers * 1.001 + item * 1.001
    assert planned.plan.total_ns == pytest.approx(sum(map(sum, groups)), rel=1e-4, abs=1e-3)
    assert planned.plan.critical_ns == pytest.approx(sum(map(max, groups)), rel=1e-4, abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(
    requests, st.sampled_from([*HEADS, (16, 16)]), st.integers(1, 24),
    st.sampled_from([1e-9, 1.0, 16.0, 100.0, 1000.0, 1e4, float("inf")]),
)  # fmt: skip
def test_sections_change_the_order_of_the_work_alone(shape, heads, workers, cached_keys):
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]
    with_cache, without = (
        make(
            q_len, Ragged(kv_len), heads=heads, workers=workers,
            kinds=(_C.Kind(None, **{**SMALL_KINDS[0], "cached_keys": keys}), FEW_ROW),
        )
        for keys in (cached_keys, 0.0)
    )  # fmt: skip
    check_whole(with_cache, kv_len)
    if not with_cache.merges and not without.merges:
        ours, others = (sorted(tuple(x.values()) for x in p.work[0]) for p in (with_cache, without))
        assert ours == others
    longest, other = (max(p.plan.load_ns(0)) for p in (with_cache, without))
    assert longest <= 1.036 * other


CUDA_KINDS = (
    _C.Kind(None, tile_q=128, row_granule=128, tile_kv=64, min_chunk=256, item_ns=2000.0,
            load_ns=47.0, pair_ns=0.27, state_ns=96.0),
    _C.Kind(None, tile_q=16, row_granule=16, tile_kv=64, min_chunk=128, item_ns=2000.0,
            load_ns=71.0, pair_ns=0.41, state_ns=144.0),
)  # fmt: skip


def zipf(count: int) -> list[int]:
    weights = 1 / np.arange(1, count + 1)
    return [max(1, int(n)) for n in weights / weights.sum() * count * 1024]


def distributions(count: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(count)
    return {
        "constant": [1024] * count,
        "uniform": [int(n) for n in rng.integers(512, 1025, count)],
        "Zipf": zipf(count),
    }


@pytest.mark.parametrize("count", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", ["constant", "uniform", "Zipf"])
def test_decode_is_balanced_on_264_workers(name, count):
    planned = make(
        [1] * count, Ragged(distributions(count)[name]), heads=(32, 32), workers=264,
        kinds=CUDA_KINDS, few_rows=16, limits=(count, count, 1 << 20, 0),
    )  # fmt: skip
    loads = planned.plan.load_ns(1)
    assert max(loads) < 1.08 * sum(loads) / len(loads)


@pytest.mark.parametrize("count", [16, 64, 256])
@pytest.mark.parametrize("name", ["constant", "uniform", "Zipf"])
@pytest.mark.parametrize("heads", [(32, 8), (5, 1)])
def test_batches_are_balanced_on_two_threads(name, count, heads):
    kv_len = distributions(count)[name]
    q_len = [1 if i % 4 else 40 for i in range(count)]
    planned = make(
        q_len, Ragged(kv_len), heads=heads, workers=2, kinds=CPU_KINDS, share_workers=True
    )
    loads = planned.loads()
    assert max(loads) < 1.05 * sum(loads) / len(loads)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_longest_requests_are_given_out_first(order):
    """All are too short to be cut; in order of arrival the long one could come last, on top."""
    kv_len = [[60, 20, 20, 20], [20, 20, 20, 60], [20, 60, 20, 20]][order]
    planned = make([1] * 4, Ragged(kv_len), heads=(1, 1), workers=2)
    assert planned.plan.most_splits == 1
    for begin, end in pairwise(planned.plan.worker_indptr(1)):
        keys = [item["kv_end"] for item in planned.work[1][begin:end]]
        assert keys in ([60], [20, 20, 20])


def test_a_long_request_is_split_over_all_workers():
    planned = make([1], Ragged([1 << 17]), heads=(8, 1), workers=(1, 132), kinds=CUDA_KINDS)
    loads = planned.plan.load_ns(1)
    assert max(loads) < 1.08 * sum(loads) / len(loads), "16 tiles each, of 15.5"
    check_whole(planned, [1 << 17])


def test_nothing_is_cut_where_a_merge_costs_more_than_it_gains():
    shape = {"heads": (1, 1), "workers": 2, "kinds": (None, FEW_ROW)}
    assert make([1], Ragged([512]), **shape).plan.most_splits == 2
    assert make([1], Ragged([512]), merge_ns=5000.0, **shape).plan.most_splits == 1
    assert make([1], Ragged([60]), **shape).plan.most_splits == 1


def test_splits_are_each_requests_own():
    planned = make([1, 1, 1], Ragged([32, 32, 8192]), heads=(1, 1), workers=4)
    assert {m["request"] for m in planned.merges} == {2}


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from(HEADS), st.integers(1, 9), st.booleans())
def test_the_same_batch_has_the_same_plan(shape, heads, workers, share):
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]

    def whole() -> tuple:
        p = make(q_len, Ragged(kv_len), heads=heads, workers=workers, share_workers=share).plan
        return (p.work(0), p.work(1), p.merge_work, p.worker_indptr(0), p.worker_indptr(1))

    first = whole()
    make([3, 1], Ragged([900, 5000]), heads=heads, workers=workers)
    assert whole() == first


def cuts(planned: Planned, request: int) -> list[tuple[int, ...]]:
    """The parts of a request, wherever they run."""
    names = ("head_begin", "row_begin", "row_end", "kv_begin", "kv_end")
    found = [
        (*(item[n] for n in names), item["partial"] >= 0)
        for item in planned.items if item["request"] == request
    ]  # fmt: skip
    return sorted(found)


@settings(max_examples=80, deadline=None)
@given(requests, st.sampled_from(HEADS), st.integers(1, 9), st.randoms(use_true_random=False))
def test_batch_invariant_cuts_are_each_requests_own(shape, heads, workers, rng: random.Random):
    settings = {"heads": heads, "batch_invariant": True, "split_keys": (96, 64)}
    order = list(range(len(shape)))
    rng.shuffle(order)
    batch = make(
        [shape[i][0] for i in order], Ragged([shape[i][1] for i in order]), workers=workers,
        **settings,
    )  # fmt: skip
    for position, i in enumerate(order):
        alone = make([shape[i][0]], Paged([shape[i][1]], 16), workers=1, **settings)
        assert cuts(batch, position) == cuts(alone, 0)
        for *_, begin, end, _partial in cuts(alone, 0):
            split = 96 if shape[i][0] * heads[0] // heads[1] > 8 else 64
            assert begin % split == 0 and (end % split == 0 or end == shape[i][1])


# --- shared levels ----------------------------------------------------------------------------


@st.composite
def cascades(draw) -> tuple[list[int], list[int], list[Level], list[int]]:
    """(q_len, own keys, levels, all keys) of requests whose groups are runs of whole requests."""
    shape = draw(st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 7, 40]), st.sampled_from([0, 1, 5, 100, 300])),
        min_size=1, max_size=6,
    ))  # fmt: skip
    q_len, own = [q for q, _ in shape], [k for _, k in shape]
    first = [0, *np.cumsum(q_len)]
    before, levels = [0] * len(shape), []
    for _ in range(draw(st.integers(1, 3))):
        groups: dict[tuple[int, int], list[int]] = {}
        for b in draw(st.permutations(range(len(shape)))):
            groups.setdefault((before[b], draw(st.integers(0, 1))), []).append(b)
        tokens, keys = [], []
        for (_, alone), members in groups.items():
            if alone and draw(st.booleans()):
                continue  # in no group of the level
            keys.append(draw(st.sampled_from([0, 3, 50, 200])))
            tokens.append([t for b in members for t in range(first[b], first[b + 1])])
            for b in members:
                before[b] += keys[-1] if q_len[b] else 0
        levels.append(Level(tokens, Ragged(keys)))
    return q_len, own, levels, [a + b for a, b in zip(own, before, strict=True)]


@settings(max_examples=150, deadline=None)
@given(
    cascades(), st.sampled_from([(4, 2), (3, 1)]), st.integers(1, 9), st.booleans(),
    st.sampled_from([(0, 0), (64, 128)]),
)  # fmt: skip
def test_levels_and_own_keys_are_merged_outer_to_inner(cascade, heads, workers, share, split):
    q_len, own, levels, kv_len = cascade
    planned = make(
        q_len, Ragged(own), levels=levels, heads=heads, workers=workers, share_workers=share,
        batch_invariant=split != (0, 0), split_keys=split,
    )  # fmt: skip
    assert planned.batch.kv_len[: len(q_len)] == kv_len
    check_whole(planned, kv_len)


def test_groups_of_all_tokens_need_no_list_of_them():
    listed = Level([[0, 1, 2], [3, 4]], Ragged([64, 32]))
    plain = Level([[0, 1, 2], [3, 4]], Ragged([64, 32]), consecutive=True)
    plans = [make([1] * 5, Ragged([9] * 5), levels=[level]) for level in (listed, plain)]
    for planned in plans:
        check_whole(planned, [73, 73, 73, 41, 41])
    assert plans[0].plan.work(1) == plans[1].plan.work(1)


def test_rows_with_one_state_only_are_final():
    level = Level([[0, 1]], Ragged([64]))
    planned = make([1, 1, 1], Ragged([0, 0, 50]), levels=[level], heads=(1, 1), workers=1)
    assert all(item["partial"] < 0 for item in planned.items) and not planned.merges
    check_whole(planned, [64, 64, 50])


# --- key lists --------------------------------------------------------------------------------


def with_lists(q_len, per_row, q_block, key_block, *, per_head=False, entries=1000, **options):
    """A plan over lists: per_row holds (begin, count) of every block row, of every head."""
    begin, count = (array([r[i] for r in per_row]) for i in (0, 1))
    lists = (q_block, key_block, per_head, span(begin), span(count), entries)
    planned = make(q_len, Ragged([4096] * len(q_len)), lists=lists, **options)
    return planned, (begin, count)


def check_lists(planned, q_len, per_row, q_block, key_block, per_head) -> None:
    results, group = planned.results(), planned.heads[0] // planned.heads[1]
    blocks = [-(-q // q_block) for q in q_len]
    for b in range(len(q_len)):
        for row, token in enumerate(planned.tokens(b)):
            for head in range(planned.heads[0]):
                number = sum(blocks[:b]) + row // q_block
                if per_head:
                    number += head // group * sum(blocks)
                begin, count = per_row[number]
                at = begin * key_block
                for first, last in results.pop((token, head)):
                    assert first == at
                    at = last
                assert at == (begin + count) * key_block
    assert not results


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 3, 20, 50]), min_size=1, max_size=4),
    st.sampled_from([1, 4, 16]), st.sampled_from([1, 16, 64]), st.booleans(), st.integers(1, 8),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_row_sees_its_list_once(q_len, q_block, key_block, per_head, workers, rng):
    rows = sum(-(-q // q_block) for q in q_len) * (2 if per_head else 1)
    per_row = [rng.choice([(0, 40), (40, 3), (7, 0), (0, 40), (100, 900)]) for _ in range(rows)]
    planned, _held = with_lists(
        q_len, per_row, q_block, key_block, per_head=per_head, workers=workers
    )
    check_lists(planned, q_len, per_row, q_block, key_block, per_head)
    for kind, items in enumerate(planned.work):
        for item in items:
            few = min(q_block, q_len[item["request"]]) * 2 <= 8
            assert few == (kind == 1)


def test_neighbouring_block_rows_of_one_list_are_one_tile():
    planned, _held = with_lists([64], [(0, 4)] * 8 + [(4, 4)] * 8, 4, 16, heads=(1, 1), workers=1,
                                kinds=(PREFILL, None), few_rows=0)  # fmt: skip
    assert [(i["row_begin"], i["row_end"]) for i in planned.items] == [(0, 32), (32, 64)]


# --- limits -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    cascades(), st.sampled_from([(4, 2), (3, 1)]), st.integers(1, 9), st.booleans(),
    st.sampled_from([(0, 0), (64, 128)]), st.booleans(),
)  # fmt: skip
def test_any_plan_fits_what_its_limits_reserve(cascade, heads, workers, share, split, shared):
    q_len, own, levels, kv_len = cascade
    limits = (len(q_len), sum(q_len) or 1, max(kv_len) or 1, 0)
    options = {
        "share_workers": share, "batch_invariant": split != (0, 0), "split_keys": split,
        "num_levels": len(levels) if shared else 0,
    }  # fmt: skip
    planned = make(
        q_len, Ragged(own), levels=levels if shared else (), heads=heads, workers=workers,
        limits=limits, **options,
    )  # fmt: skip
    check_whole(planned, kv_len if shared else own)
    plan, capacity = planned.plan, planned.plan.capacity
    assert all(len(w) <= c for w, c in zip(planned.work, capacity["work"], strict=True))
    assert plan.partial_rows <= capacity["partial_rows"]
    assert len(planned.merges) <= capacity["merge_work"]
    assert len(plan.merge_sources) <= capacity["merge_sources"]
    assert (
        max((m["row_end"] - m["row_begin"] for m in planned.merges), default=0)
        <= capacity["max_merge_rows"]
    )
    of_limits = _C.PlanOptions(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim_v=8, few_rows=8,
        num_workers=(workers, workers), limits=limits, **options,
    )  # fmt: skip
    assert plan.workspace_bytes == _C.BatchPlan.workspace_bound((PREFILL, FEW_ROW), of_limits)
    empty = make([], Ragged([]), heads=heads, workers=workers, limits=limits, **options)
    assert empty.plan.capacity == capacity, "the layout is the limits', not the batch's"


def test_the_bound_is_two_tiles_a_worker():
    capacity = make([1], Ragged([5]), workers=(7, 9), limits=(4, 64, 1000, 0)).plan.capacity
    few = 4 * 8 * 2  # rows of all requests of at most 8, of both kv heads: less than 9 tiles
    assert capacity["partial_rows"] == 2 * 7 * PREFILL.tile_q + 9 * FEW_ROW.tile_q + few


def test_the_bound_of_a_cascade_is_a_state_a_row_and_level_and_a_tile_a_cut():
    limits = {"workers": (7, 9), "limits": (4, 64, 1000, 0), "heads": (4, 4), "num_levels": 2}
    capacity = make([64], Ragged([5]), kinds=(PREFILL, None), few_rows=0, **limits).plan.capacity
    assert capacity["partial_rows"] == 64 * 4 * (2 + 1) + 7 * PREFILL.tile_q


def test_packed_rows_that_do_not_fit_32_bits_are_refused() -> None:
    # Rows are rounded up to whole tiles and granules.
    tile = 2**20
    kind = _C.Kind(None, tile_q=tile, row_granule=16, tile_kv=64, min_chunk=64, item_ns=1.0,
                   load_ns=1.0, pair_ns=1.0, state_ns=1.0)  # fmt: skip
    most = 2**31 - 1 - tile
    planned = make([most], Ragged([1]), heads=(1, 1), kinds=(kind, kind))
    ends = sorted(item["row_end"] for item in planned.items)
    assert len(ends) == -(-most // tile) and ends[0] > 0 and ends[-1] == most
    for q_len, heads in ((most + 1, 1), (2**31 - 1, 1), (2**20, 2**11), (1, 2**31 - 1)):
        with pytest.raises(ValueError, match=rf"q_len={q_len} x {heads} heads per kv head, which"):
            make([q_len], Ragged([1]), heads=(heads, 1), kinds=(kind, kind))
