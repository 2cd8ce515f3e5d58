"""Simplified masks: cancelled terms, merged bounds, bounded size."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import time

import pytest
import torch

from flashattn_jit.variants.interval.cpp import lower_classify
from flashattn_jit.variants.interval.simplify import simplify
from flashattn_jit.variants.interval.tile_runs import Grid

from .bounds_oracle import format_program, traced
from .test_bounds_masks import check

DOC = torch.arange(64) // 10
OFFSETS = torch.arange(0, 70, 10)
CAUSAL = ["keep if 0 <= q_idx - kv_idx", "drop if q_idx - kv_idx <= -1"]


def text(fn) -> list[str]:
    return [
        line for line in format_program(simplify(traced(fn).graph)) if not line.startswith("assum")
    ]


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: ~(k > q),
        lambda b, h, q, k: 3 * k - 3 * q < 1,
        lambda b, h, q, k: (q - 5) - (k - 5) >= 0,
        lambda b, h, q, k: q - OFFSETS[DOC[q]] >= k - OFFSETS[DOC[q]],
        lambda b, h, q, k: q + (h - b) >= k + (h - b),
        lambda b, h, q, k: torch.where(q >= k, True, False),
        lambda b, h, q, k: (q >= k).to(torch.int32) == 1,
        lambda b, h, q, k: (q >= k) & (q >= k - 3) & (q * 2 >= k * 2 - 1),
    ],
)
def test_one_mask_written_in_many_ways(fn) -> None:
    assert text(fn) == CAUSAL


def test_a_document_cancels_its_offsets_on_both_sides() -> None:
    def jagged(b, h, q, k):
        inside = q - OFFSETS[DOC[q]] >= k - OFFSETS[DOC[k]]
        return (DOC[q] == DOC[k]) & inside

    keep, *drop = text(jagged)
    assert "0 <= q_idx - kv_idx" in keep and keep.count("tensor") == 2
    assert len(drop) == 2


def test_contradictions_and_tautologies_vanish() -> None:
    assert text(lambda b, h, q, k: (q >= k) & (q < k)) == ["keep never", "drop if always"]
    assert text(lambda b, h, q, k: (q >= k) | (q < k)) == ["keep if always", "drop never"]
    assert text(lambda b, h, q, k: k >= 0) == ["keep if always", "drop never"]
    assert text(lambda b, h, q, k: (2 * q - 2 * k) == 1) == ["keep never", "drop if always"]


def test_bits_become_arithmetic() -> None:
    assert text(lambda b, h, q, k: (q >> 5) == (k >> 5)) == text(
        lambda b, h, q, k: q // 32 == k // 32
    )
    assert text(lambda b, h, q, k: (k & 63) == 3) == text(lambda b, h, q, k: k % 64 == 3)


def rectangles(n):
    def mask(b, h, q, k):
        kept = q < 0
        for i in range(n):
            kept = kept | ((q >= 7 * i) & (q < 7 * i + 7) & (k >= 7 * i) & (k < 7 * i + 7))
        return kept

    return mask


def alternating(n):
    def mask(b, h, q, k):
        kept = q >= k
        for i in range(n):
            kept = (kept | (k < 3 * i)) if i % 2 else (kept & (q > 5 * i - 90))
        return kept

    return mask


def exclusive(n):
    def mask(b, h, q, k):
        kept = q >= k
        for i in range(n):
            kept = kept ^ ((q // (i + 2)) % 2 == 0)
        return kept

    return mask


def chosen(n):
    def mask(b, h, q, k):
        limit = k
        for i in range(n):
            limit = torch.where(h == i, k + i, limit)
        return limit <= q

    return mask


@pytest.mark.parametrize("n", [3, 12, 40])
@pytest.mark.parametrize("make", [rectangles, alternating, exclusive, chosen])
def test_large_masks_stay_small(make, n: int) -> None:
    """Multiplied out, cases would grow without bound; past a limit they are not multiplied out."""
    mask = traced(make(n))
    start = time.thread_time()
    simplify(mask.graph)
    body = lower_classify(mask.graph, mask.tensors)
    assert time.thread_time() - start < 2
    assert len(body) < 300_000
    check(
        mask, Grid(0, 60, 0, 70, 16, 16, 0, 1, 0, 3), exact=make in (rectangles, chosen) and n < 40
    )
