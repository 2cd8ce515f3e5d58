"""Shared prefixes: a cascade is the flat batch, chunks are the whole prompt, states merge.

FlashInfer's test_shared_prefix_kernels.py at full size. The bound is that of the semantics, and the
rms error of the composed call is at most 1.5 times that of the flat one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import Batch, indptr, level_of, share_prefix
from tests.batch.lists import DTYPES
from tests.batch.oracle import Errors, Math, check
from tests.batch.runs import attend, engine
from tests.ops.merge_oracle import merge_reference

FACTOR = 1.5


def cascaded(batch: Batch, variant: Any, levels: Any, **options: Any) -> Any:
    """(out, lse) through CascadeAttention."""
    made = fa.CascadeAttention(variant, **{**batch.options(), **options})
    made.plan(levels)
    return made.run(batch.q, batch.k, batch.v, return_lse=True)


def level(batch: Batch, begin: int, end: int, groups: Any) -> fa.CascadeLevel:
    return fa.CascadeLevel(*level_of(batch, begin, end, groups))


def assert_no_worse(composed: Errors, flat: Errors) -> None:
    """Within 1.5 times the flat call's error."""
    assert composed.ours <= FACTOR * flat.ours


SHARED = [
    pytest.param(mode, count, unique, shared, heads, dim, page, id=f"{mode}-{i}")
    for i, (mode, count, unique, shared, heads, dim, page) in enumerate(
        (
            ("decode", 12, 37, 128, (8, 8), 128, 1),
            ("append", 17, 17, 512, (16, 16), 128, 16),
            ("decode", 17, 17, 2048, (16, 4), 256, 16),
            ("append", 12, 37, 2048, (8, 8), 256, 1),
            ("decode", 12, 17, 512, (8, 2), 64, 16),
            ("append", 17, 37, 128, (16, 4), 64, 1),
        )
    )
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("mode", "count", "unique", "shared", "heads", "dim", "page"), SHARED)
def test_a_cascade_is_the_flat_batch(mode, count, unique, shared, heads, dim, page) -> None:
    q_len = 1 if mode == "decode" else unique
    batch = Batch((q_len,) * count, (shared + unique,) * count, heads, dim, DTYPES[dim], page)
    share_prefix(batch, shared)
    what = Math(causal=True)
    flat = check(batch, what, *attend(batch, what.variant(heads[0])))
    everyone = [range(count)]
    levels = [
        level(batch, 0, shared, everyone), level(batch, shared, -1, [[b] for b in range(count)])
    ]  # fmt: skip
    found = fa.cascade_levels(batch.q_indptr, batch.storage)
    assert len(found) == 2
    for each in (levels, found):
        composed = check(batch, what, *cascaded(batch, what.variant(heads[0]), each))
        assert_no_worse(composed, flat)


MATHS = {
    "full": Math(), "window": Math(window=150), "sink": Math(causal=True, sink=True),
    "rope": Math(causal=True, rope=True), "cap": Math(causal=True, cap=20.0),
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", MATHS)
def test_three_levels_of_requests_of_all_kinds(name: str) -> None:
    """All share 64 keys, two groups share 48 more; windows end inside of the shared keys."""
    what = MATHS[name]
    batch = Batch((1, 30, 5, 1, 7), (130, 142, 250, 120, 119), (8, 2), 64, page_size=16)
    share_prefix(batch, 64)
    share_prefix(batch, 112, (0, 1, 2))
    share_prefix(batch, 112, (3, 4))
    flat = check(batch, what, *attend(batch, what.variant(8)))
    levels = [
        level(batch, 0, 64, [range(5)]), level(batch, 64, 112, [(0, 1, 2), (3, 4)]),
        level(batch, 112, -1, [[b] for b in range(5)]),
    ]  # fmt: skip
    found = fa.cascade_levels(batch.q_indptr, batch.storage)
    assert len(found) == 3
    for each in (levels, found):
        assert_no_worse(check(batch, what, *cascaded(batch, what.variant(8), each)), flat)


def test_requests_that_share_nothing_are_found_as_one_level() -> None:
    batch = Batch((1, 9), (40, 33), (4, 2), 64, page_size=16)
    levels = fa.cascade_levels(batch.q_indptr, batch.storage)
    assert len(levels) == 1
    what = Math(causal=True)
    check(batch, what, *cascaded(batch, what.variant(4), levels))


@pytest.mark.parametrize("chunk", [48, 128, 500])
@pytest.mark.parametrize("name", ["full", "window", "rope"])
def test_chunks_are_the_whole_prompt(chunk: int, name: str) -> None:
    what = replace(MATHS[name], causal=True)
    batch = Batch((700,), (700,), (8, 2), 64, page_size=16)
    variant = what.variant(8)
    out, lse = attend(batch, variant)
    whole = check(batch, what, out, lse)
    made, parts = engine(batch, variant), []
    for begin in range(0, 700, chunk):
        end = min(begin + chunk, 700)
        _, paged = level_of(batch, 0, end, [[0]])
        made.plan(indptr([end - begin]), paged)
        parts.append(made.run(batch.q[begin:end], batch.k, batch.v, return_lse=True))
    outs, lses = zip(*parts, strict=True)
    assert_no_worse(check(batch, what, torch.cat(outs), torch.cat(lses)), whole)


@pytest.mark.parametrize("rows", [1, 8])
def test_chunks_of_few_rows_are_as_exact_as_the_whole_over_many_keys(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) for n in (64, 8192, 8192))
    expected = fa.Full().reference(q.double(), k.double(), v.double())
    chunks = torch.cat([fa.attention(part, k, v) for part in q.split(rows, 2)], 2)
    error, whole = ((x - expected).square().mean().sqrt() for x in (chunks, fa.attention(q, k, v)))
    assert error <= FACTOR * whole


@pytest.mark.parametrize("page", [0, 16])
def test_partial_states_of_two_storages_merge_to_the_whole(page: int) -> None:
    batch = Batch((5, 1), (96, 640), (8, 2), 64, page_size=16)
    what, cut = Math(causal=True), (32, 512)
    whole = check(batch, what, *attend(batch, what.variant(8)))
    states = []
    for half in range(2):
        lens = [(cut[b], batch.kv_len[b] - cut[b])[half] for b in range(2)]
        # The keys of this half have positions from 0 on; q_offset is relative to them.
        offset = torch.tensor([batch.kv_len[b] - batch.q_len[b] - (cut[b] if half else 0)
                               for b in range(2)])  # fmt: skip
        keys = [batch.keys(b) for b in range(2)]
        parts = [tuple(t[: cut[b]] if not half else t[cut[b] :] for t in keys[b]) for b in range(2)]
        own = Batch(batch.q_len, tuple(lens), (8, 2), 64, page_size=page)
        for b, (k, v) in enumerate(parts):
            own.k[own.index(b)], own.v[own.index(b)] = k, v
        made = engine(own, what.variant(8))
        made.plan(own.q_indptr, own.storage, q_offset=offset)
        states.append(made.run(batch.q, own.k, own.v, partial=True))
    out, lse = fa.merge_states(*zip(*states, strict=True))
    assert_no_worse(check(batch, what, out, lse), whole)


def test_states_merge_where_some_have_no_keys() -> None:
    """Fifty random merges in which states without keys hold NaN."""
    generator = torch.Generator().manual_seed(7)
    for turn in range(50):
        shape = (1 + turn % 13, 1 + turn % 4, 8 * (1 + turn % 5))
        outs = [torch.randn(shape, generator=generator) for _ in range(2 + turn % 3)]
        lses = [4 * torch.randn(shape[:2], generator=generator) for _ in outs]
        clean = [o.double() for o in outs]
        for out, lse in zip(outs, lses, strict=True):
            gone = torch.rand(shape[:2], generator=generator) < 0.3
            lse[gone], out[gone] = -torch.inf, torch.nan
        out, lse = fa.merge_states(outs, lses)
        exact, exact_lse = merge_reference(clean, [x.double() for x in lses])
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
