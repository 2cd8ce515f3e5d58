"""Cascades: the levels found in page tables unfold to them and give the result of a flat batch.

Full-size lists of shapes are in tests/batch/test_prefixes.py.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from tests.batch.batches import Batch, indptr, level_of, share_prefix
from tests.batch.oracle import Math, check
from tests.harness.slowness import slowdown
from tests.harness.toolkit import needs_nvcc


def table(pages: list[list[int]], last: int = 4) -> fa.Paged:
    flat = torch.tensor([p for own in pages for p in own], dtype=torch.int32)
    lens = torch.tensor([last if own else 0 for own in pages], dtype=torch.int64)
    return fa.Paged(indptr([len(own) for own in pages]), flat, lens, 4)


def pages_of(level: fa.CascadeLevel, group: int) -> list[int]:
    starts = level.storage.page_indptr.tolist()
    return level.storage.page_indices[starts[group] : starts[group + 1]].tolist()


def unfolded(levels: list[fa.CascadeLevel], tokens: int, requests: int) -> list[list[int]]:
    """The pages that each token sees, from the outermost level to its request's own."""
    seen: list[list[int]] = [[] for _ in range(tokens)]
    for level in levels:
        starts = level.q_indptr.tolist()
        order = range(starts[-1]) if level.tokens is None else level.tokens.tolist()
        for group in range(len(starts) - 1):
            for entry in range(starts[group], starts[group + 1]):
                seen[order[entry]] += pages_of(level, group)
    return seen


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 3)), max_size=9
    ),
    least=st.integers(1, 3),
)
def test_levels_unfold_to_the_page_tables(requests, least: int) -> None:
    pages, rows = [p for p, _ in requests], [n for _, n in requests]
    starts = indptr(rows)
    levels = fa.cascade_levels(starts, table(pages), least)
    seen = unfolded(levels, sum(rows), len(rows))
    for b, own in enumerate(pages):
        for token in range(int(starts[b]), int(starts[b + 1])):
            assert seen[token] == own
        assert pages_of(levels[-1], b) or not own  # a request's last key is in its own level
    for level in levels[:-1]:
        for group in range(len(level.q_indptr) - 1):
            assert len(pages_of(level, group)) >= least
            entries = level.tokens[level.q_indptr[group] : level.q_indptr[group + 1]]
            build_requests = torch.searchsorted(starts[1:], entries, right=True).unique()
            assert len(build_requests) >= 2


def test_heads_nest_and_requests_come_in_any_order() -> None:
    pages = [[1, 2, 3, 9], [5], [1, 2, 3, 4, 8], [1, 2, 7], [1, 2, 3, 4, 6], [5, 5]]
    outer, middle, inner, own = fa.cascade_levels(indptr([1, 1, 2, 1, 1, 1]), table(pages))
    assert outer.tokens.tolist() == [0, 2, 3, 4, 5] and pages_of(outer, 0) == [1, 2]
    assert middle.tokens.tolist() == [0, 2, 3, 5] and pages_of(middle, 0) == [3]
    assert inner.tokens.tolist() == [2, 3, 5] and pages_of(inner, 0) == [4]
    assert [pages_of(own, b) for b in range(6)] == [[9], [5], [8], [7], [6], [5, 5]]
    coarse = fa.cascade_levels(indptr([1, 1, 2, 1, 1, 1]), table(pages), min_shared_pages=2)
    assert len(coarse) == 3
    assert pages_of(coarse[0], 0) == [1, 2] and pages_of(coarse[1], 0) == [3, 4]


def test_the_page_of_the_last_key_is_not_shared() -> None:
    same = table([[1, 2], [1, 2]])
    shared, own = fa.cascade_levels(indptr([1, 1]), same)
    assert pages_of(shared, 0) == [1]
    assert pages_of(own, 0) == pages_of(own, 1) == [2]
    assert own.storage.last_page_len.tolist() == [4, 4]
    assert len(fa.cascade_levels(indptr([1, 1]), table([[1], [1]]))) == 1
    assert len(fa.cascade_levels(indptr([0]), table([[]]))) == 1
    assert len(fa.cascade_levels(indptr([]), table([]))) == 1


def test_levels_of_a_large_batch_take_milliseconds() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randperm(100_000, generator=generator)[:900].tolist() for _ in range(8)]
    paged = table([heads[i % 8] + list(range(10**6 + 100 * i, 10**6 + 100 * i + 100))
                   for i in range(256)])  # fmt: skip
    rows = indptr([1] * 256)
    best = 1e9
    for _ in range(5):
        start = time.thread_time()
        levels = fa.cascade_levels(rows, paged)
        best = min(best, time.thread_time() - start)
    assert len(levels) == 2 and levels[0].q_indptr.tolist() == list(range(0, 257, 32))
    assert best < 0.02 * slowdown()


# --- results --------------------------------------------------------------------------------------


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", ["cpu", pytest.param("emulated:sm_80", marks=needs_nvcc)])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (3, 1, 20, 2)], ids=["decode", "mixed"])
def test_found_levels_give_the_flat_result(rows, target: str) -> None:
    dtype = torch.float32 if target == "cpu" else torch.bfloat16
    b = Batch(rows, (90, 100, 120, 70), (4, 2), 64, dtype, 16)
    share_prefix(b, 64)
    share_prefix(b, 80, (0, 2))
    levels = fa.cascade_levels(b.q_indptr, b.storage)
    assert len(levels) == 3
    what = Math(causal=True, sink=True)
    where = None if target == "cpu" else target
    cascade = fa.CascadeAttention(what.variant(4), **b.options(), target=where)
    cascade.plan(levels)
    out, lse = cascade.run(b.q, b.k, b.v, return_lse=True)
    check(b, what, out, lse)
    partial, state = cascade.run(b.q, b.k, b.v, partial=True)
    flat = fa.BatchAttention(what.variant(4), **b.options(), target=where)
    flat.plan(b.q_indptr, b.storage)
    wanted, wanted_lse = flat.run(b.q, b.k, b.v, partial=True)
    tolerance = 1e-5 if target == "cpu" else 2e-2
    torch.testing.assert_close(partial, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, wanted_lse, rtol=tolerance, atol=tolerance)


def test_ragged_levels_lie_one_after_another() -> None:
    """Keys of the outermost level first; tokens of a group are those of two requests."""
    shared, own = 40, (10, 5, 30)
    b = Batch((1, 2, 3), tuple(shared + n for n in own), (4, 2), 64)
    common = torch.randn(shared, 2, 64), torch.randn(shared, 2, 64)
    parts = [torch.randn(n, 2, 64) for n in own], [torch.randn(n, 2, 64) for n in own]
    k, v = (torch.cat([c, *p]) for c, p in zip(common, parts, strict=True))
    levels = [
        fa.CascadeLevel(torch.tensor([0, 6]), fa.Ragged(torch.tensor([0, shared]))),
        fa.CascadeLevel(b.q_indptr, fa.Ragged(indptr(own))),
    ]
    cascade = fa.CascadeAttention(fa.Causal(), **b.options())
    cascade.plan(levels)
    out, lse = cascade.run(b.q, k, v, return_lse=True)

    def keys(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([common[0], parts[0][i]]), torch.cat([common[1], parts[1][i]])

    check(b, Math(causal=True), out, lse, keys=keys)


def test_levels_have_pages_of_their_own_size() -> None:
    """Four levels in pages of 64, 48, 32 and 16: the result is that of pages of 16."""
    generator = torch.Generator().manual_seed(0)
    rows = ([0, 6], [0, 6], [0, 1, 3, 6], [0, 1, 3, 6])
    pages = ([[1, 3]], [[9]], [[2], [], [12, 9]], [[40], [41, 42], [43]])
    keys, sizes = ([100], [40], [32, 0, 51], [5, 30, 16]), (64, 48, 32, 16)
    k, v = (torch.full((48, 16, 2, 64), torch.nan) for _ in range(2))
    own, cut = [], []
    for starts, tables, lengths, size in zip(rows, pages, keys, sizes, strict=True):
        small = []
        for table, length in zip(tables, lengths, strict=True):
            at = torch.tensor(table, dtype=torch.long)[:, None] * size + torch.arange(size)
            at = at.flatten()[:length]
            for cache in (k, v):
                cache[at // 16, at % 16] = torch.randn(length, 2, 64, generator=generator)
            small.append((at[::16] // 16).tolist())
        for levels, of, step in ((own, tables, size), (cut, small, 16)):
            last = [(n - 1) % step + 1 if n else 0 for n in lengths]
            flat = torch.tensor([page for table in of for page in table], dtype=torch.int32)
            storage = fa.Paged(indptr([len(t) for t in of]), flat, torch.tensor(last), step)
            levels.append(fa.CascadeLevel(torch.tensor(starts), storage))
    q = torch.randn(6, 4, 64, generator=generator)
    cascade = fa.CascadeAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=torch.float32
    )
    cascade.plan(cut)
    expected = cascade.run(q, k, v)
    assert torch.isfinite(expected).all()
    cascade.plan(own)
    assert torch.equal(cascade.run(q, k, v), expected)


def test_levels_by_hand_and_params_of_the_mask() -> None:
    b = Batch((2, 1, 1, 3), (100, 80, 70, 90), (4, 2), 64, page_size=16)
    share_prefix(b, 32)
    share_prefix(b, 64, (2, 3))
    levels = [
        fa.CascadeLevel(*level_of(b, 0, 32, [(0, 1, 2, 3)])),
        fa.CascadeLevel(*level_of(b, 32, 64, [(2, 3)]), torch.tensor([3, 4, 5, 6])),
    ]
    own = [level_of(b, begin, -1, [(i,)])[1] for i, begin in enumerate((32, 32, 64, 64))]
    counts = [int(p.page_indptr[-1]) for p in own]
    storage = fa.Paged(
        indptr(counts), torch.cat([p.page_indices for p in own]),
        torch.cat([p.last_page_len for p in own]), 16,
    )  # fmt: skip
    cascade = fa.CascadeAttention(fa.SlidingWindow(), **b.options())
    for window in (50, 200):
        cascade.plan([*levels, fa.CascadeLevel(b.q_indptr, storage)], window=window)
        out, lse = cascade.run(b.q, b.k, b.v, return_lse=True)
        check(b, Math(window=window), out, lse)


def test_one_level_is_the_batch_itself() -> None:
    b = Batch((1, 20), (60, 40), (4, 2), 64, page_size=16)
    cascade = fa.CascadeAttention(fa.Causal(), **b.options())
    cascade.plan(fa.cascade_levels(b.q_indptr, b.storage))
    flat = fa.BatchAttention(fa.Causal(), **b.options())
    flat.plan(b.q_indptr, b.storage)
    assert torch.equal(cascade.run(b.q, b.k, b.v), flat.run(b.q, b.k, b.v))


def test_limits_bound_cascades() -> None:
    limits = fa.Limits(max_requests=8, max_q_tokens=64, max_kv_len=256, max_pages=64)
    b = Batch((1, 1, 8), (100, 120, 90), (4, 2), 64, page_size=16)
    share_prefix(b, 64)
    cascade = fa.CascadeAttention(fa.Causal(), **b.options(), limits=limits)
    plan = cascade.plan(fa.cascade_levels(b.q_indptr, b.storage))
    check(b, Math(causal=True), *cascade.run(b.q, b.k, b.v, return_lse=True))
    assert plan.workspace_bytes <= cascade.workspace_bytes(num_levels=1)
