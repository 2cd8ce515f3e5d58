"""Plans follow the mask's interval form: no visible key is left out, hidden ones cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.arguments.calls import bind_tensors
from flashattn_jit.planner.tiles import Problem, build_requests, choose
from flashattn_jit.variants.binding import bind
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant

from .batch_plans import Level, Planned, Ragged, make, small_kinds

_DOCUMENT = torch.arange(4096) // 300

MASKS: dict[str, tuple[object, Callable[[int, int, int], bool]]] = {
    "full": (fa.Full(), lambda b, i, j: True),
    "causal": (fa.Causal(), lambda b, i, j: j <= i),
    "window": (fa.SlidingWindow(40), lambda b, i, j: i - 40 < j <= i),
    "both sides": (fa.SlidingWindow(30, causal=False), lambda b, i, j: i - 30 <= j <= i + 30),
    "sink and window": (
        lambda b, h, i, j: (j <= i) & ((j < 4) | (i - j < 50)),
        lambda b, i, j: j <= i and (j < 4 or i - j < 50),
    ),
    "by request": (lambda b, h, i, j: j <= i - 100 * b, lambda b, i, j: j <= i - 100 * b),
    "documents": (
        lambda b, h, i, j: _DOCUMENT[i] == _DOCUMENT[j],
        lambda b, i, j: i % 4096 // 300 == j // 300,  # negative indices wrap
    ),
    "nothing": (lambda b, h, i, j: j < 0, lambda b, i, j: False),
}


def classified(name: str) -> tuple[tuple, dict[str, object], object]:
    """Kinds with a compiled module, and the options with which its mask is costed."""
    variant = as_variant(MASKS[name][0])
    bound = bind(variant, Dims(), {})
    known = bound.structure
    problem = Problem((1,), (1,), 1, 1, 32, 32, "float32", "float32", "float32")
    spec = choose(known.ir, problem, "cpu:generic", (), name)
    _, module = load_stepping(build_requests(spec))
    addresses, layouts, held = bind_tensors(known, bound.tensors)
    mask = (
        addresses, layouts, bound.scalars, known.scalar_kinds, known.mask_is_contiguous,
        known.mask_reads_request,
    )  # fmt: skip
    return small_kinds(module), {"mask": mask}, (bound, held)


@pytest.fixture(scope="module")
def masks() -> dict[str, tuple]:
    return {name: classified(name) for name in MASKS}


def check_visible(planned: Planned, name: str, offsets: list[int], kv_len: list[int]) -> None:
    """Asserts that a row's ranges ascend without overlap and hold every key that it sees."""
    sees = MASKS[name][1]
    results = planned.results()
    for b, length in enumerate(kv_len):
        for row, token in enumerate(planned.tokens(b)):
            ranges = results[(token, 0)]
            for (_, end), (begin, _) in pairwise(ranges):
                assert end <= begin
            covered = np.zeros(length, bool)
            for begin, end in ranges:
                covered[begin:end] = True
            visible = np.array([sees(b, offsets[b] + row, j) for j in range(length)], bool)
            assert not (visible & ~covered).any()


shapes = st.lists(
    st.tuples(st.sampled_from([1, 1, 3, 40, 130]), st.integers(0, 500)), min_size=1, max_size=3
)


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=12, deadline=None)
@given(shape=shapes, workers=st.integers(1, 6), invariant=st.booleans(), end=st.booleans())
def test_no_visible_key_is_left_out(masks, name, shape, workers, invariant, end):
    kinds, options, _held = masks[name]
    q_len, kv_len = [q for q, _ in shape], [k for _, k in shape]
    offsets = None if end else [(7 * i) % 50 for i in range(len(shape))]
    planned = make(
        q_len, Ragged(kv_len), heads=(2, 1), workers=workers, kinds=kinds, q_offset=offsets,
        batch_invariant=invariant, split_keys=(64, 64), **options,
    )  # fmt: skip
    first = [k - q for q, k in shape] if end else offsets
    check_visible(planned, name, first, kv_len)


@pytest.mark.parametrize("name", ["causal", "window", "sink and window", "by request"])
def test_shared_levels_follow_the_mask(masks, name):
    kinds, options, _held = masks[name]
    levels = [Level([range(61), range(61, 63)], Ragged([200, 150]))]
    planned = make(
        [60, 1, 1, 1], Ragged([70, 3, 20, 1]), levels=levels, heads=(2, 1), kinds=kinds, **options
    )
    check_visible(planned, name, [210, 202, 169, 150], [270, 203, 170, 151])


def visited(planned: Planned) -> int:
    """Keys of all items."""
    return sum(item["kv_end"] - item["kv_begin"] for item in planned.items)


def test_dead_keys_cost_nothing(masks):
    decode = {"heads": (1, 1), "workers": 1}
    for name, most in (("causal", 4096), ("window", 40 + 2 * 15), ("nothing", 0)):
        kinds, options, _held = masks[name]
        planned = make([1], Ragged([4096]), kinds=kinds, **decode, **options)
        assert visited(planned) <= most
    # The two ends of a window with sinks are the cost, though the items span all keys.
    kinds, options, _held = masks["sink and window"]
    planned = make([1], Ragged([4096]), kinds=kinds, **decode, **options)
    assert planned.plan.total_ns < 0.1 * make([1], Ragged([4096]), **decode).plan.total_ns


def test_a_causal_prefill_costs_half(masks):
    kinds, options, _held = masks["causal"]
    shape = ([4096], Ragged([4096]))
    causal = make(*shape, kinds=kinds, **options).plan.total_ns
    assert causal == pytest.approx(make(*shape).plan.total_ns / 2, rel=0.05)


def test_uneven_masks_are_balanced_by_what_is_visited(masks):
    """Items of sinks and items of windows cost what their visible keys cost."""
    kinds, options, _held = masks["sink and window"]
    planned = make([2048], Ragged([2048]), heads=(1, 1), workers=4, kinds=kinds, **options)
    loads = planned.plan.load_ns(0)
    assert max(loads) < 1.1 * sum(loads) / len(loads)


@pytest.mark.parametrize("name", ["causal", "window", "sink and window", "documents"])
def test_a_request_is_costed_alike_in_any_batch(masks, name):
    """Its parts are then the same bit for bit: the search for them starts at another key in another
    batch, and must end at the same one."""
    kinds, options, _held = masks[name]
    options = {**options, "batch_invariant": True, "split_keys": (64, 64), "kinds": kinds}
    rng = np.random.default_rng(3)
    q_len = [int(n) for n in rng.choice([1, 1, 5, 70], 12)]
    kv_len = [int(n) for n in rng.integers(1, 900, 12)]
    batch = make(q_len, Ragged(kv_len), **options)
    fields = ("head_begin", "row_begin", "row_end", "kv_begin", "kv_end")
    total = 0.0
    for b in range(12):
        alone = make([q_len[b]], Ragged([kv_len[b]]), workers=1, **options)
        parts = {tuple(i[f] for f in fields) for i in batch.items if i["request"] == b}
        assert parts == {tuple(i[f] for f in fields) for i in alone.items}
        total += alone.plan.total_ns
    assert batch.plan.total_ns == pytest.approx(total)


@pytest.mark.parametrize("name", ["sink and window", "documents"])
def test_batch_invariant_cuts_are_at_positions_wherever_the_keys_begin(masks, name):
    kinds, options, _held = masks[name]
    options = {**options, "batch_invariant": True, "split_keys": (64, 64), "kinds": kinds}
    planned = make([1, 130], Ragged([700, 890]), heads=(1, 1), **options)
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in planned.items:
        rows = (item["request"], item["row_begin"])
        parts.setdefault(rows, []).append((item["kv_begin"], item["kv_end"]))
    cuts = [end for part in parts.values() for _, end in sorted(part)[:-1]]
    assert cuts and all(cut % 64 == 0 for cut in cuts)
    assert name != "documents" or min(begin for begin, _ in parts[(0, 0)]) % 64


def test_the_longest_request_that_there_can_be(masks):
    """Cells of a mask reach beyond the largest int32, its keys do not."""
    most = 2**31 - 1
    for name in ("sink and window", "window", "causal"):
        kinds, options, _held = masks[name]
        planned = make([1], Ragged([most]), heads=(1, 1), workers=8, kinds=kinds, **options)
        for ranges in planned.results().values():
            covered = [end for begin, end in ranges if begin <= most - 1 < end]
            assert covered == [most] and all(0 <= begin < end for begin, end in ranges)
            assert name == "window" or any(begin == 0 for begin, _ in ranges)
