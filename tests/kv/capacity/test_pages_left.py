"""Pages that are left as a sequence grows, against the deadness of each page at each length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.kv.capacity.pages_left import pages_left
from flashattn_jit.kv.reclaim import MaskPages

SLOPES = torch.tensor([3, 40])
DOCUMENTS = torch.arange(4096) // 300


def masked(mask: object) -> fa.Variant:
    return fa.variant(mask_mod=mask)  # type: ignore[arg-type]


MASKS = {
    "causal": (fa.Causal(), (0, 1)),
    "window": (fa.SlidingWindow(33), (0, 1)),
    "chunks": (fa.Chunked(50), (0, 50)),
    "window and chunks": (fa.SlidingWindow(33) & fa.Chunked(50), (0, 50)),
    "sinks": (fa.StreamingLLM(70, 9), (10, 1)),
    "dilated": (fa.Dilated(90, 16) & fa.Causal(), (0, 1)),
    "keys that stay": (masked(lambda b, h, q, k: (q - k < 40) | (k % 48 < 3)), (0, 48)),
    "chunks before": (masked(lambda b, h, q, k: (k <= q) & (q // 24 - k // 24 < 3)), (0, 24)),
    "sinks and chunks": (masked(lambda b, h, q, k: (k < 37) | (q // 30 == k // 30)), (38, 30)),
    "heads": (masked(lambda b, h, q, k: (k <= q) & (q - k < SLOPES[h])), (0, 1)),
    "quotients": (masked(lambda b, h, q, k: q // 16 * 3 - k // 16 * 3 < 9), (0, 16)),
    "far": (masked(lambda b, h, q, k: (q - k < 20) | (q - k == (1 << 20) - 400)), (0, 1)),
    "squares": (masked(lambda b, h, q, k: q * q - k * k < 900), None),
    "xor": (masked(lambda b, h, q, k: (q ^ k) < 64), None),
    "two rates": (masked(lambda b, h, q, k: 2 * k >= q), None),
    "documents": (
        masked(lambda b, h, q, k: DOCUMENTS[q.clamp(0, 4095)] == DOCUMENTS[k.clamp(0, 4095)]), None,
    ),
}  # fmt: skip


def group_of(name: str, reclaim: str = "holes") -> fa.kv.Group:
    variant = MASKS[name][0]
    return fa.kv.Group((0,), 1, 8, num_q_heads=2, variant=variant, reclaim=reclaim)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("reclaim", ["holes", "compact"])
@pytest.mark.parametrize("name", MASKS)
def test_pages_at_every_length(name: str, reclaim: str, size: int) -> None:
    group, most = group_of(name, reclaim), 256
    mask = MaskPages(group, size, 1 << 20)
    left = [0]
    for n in range(1, most + 1):
        pages = left[-1] + 1 if reclaim == "compact" else n
        left.append(pages - int(mask.given_up(pages * size, pages).sum()))
    found = pages_left(group, size, most)
    if found is None:
        assert left == [*range(most + 1)]
        return
    assert [found.at(n) for n in range(most + 1)] == left
    assert [found.most(n) for n in range(1, most + 1)] == [
        max(left[:n]) for n in range(1, most + 1)
    ]


@pytest.mark.parametrize("name", MASKS)
def test_boxes_that_shift(name: str) -> None:
    wanted = MASKS[name][1]
    mask = MaskPages(group_of(name), 4, 1 << 20)
    shift = mask.shift()
    assert shift == wanted
    if shift is None:
        return
    rng = np.random.default_rng(7)
    for _ in range(200):
        q, first, keys, queries = (int(x) for x in rng.integers(1, 300, 4))
        q, first = q + shift.first, first - (-shift.first // 4)
        by = int(rng.integers(1, 50)) * shift.period * 4
        boxes = [
            mask.read(q + s, first + s // 4, first + s // 4 + keys, q + s + queries)
            for s in (0, by)
        ]
        assert (boxes[0] == boxes[1]).all()


@pytest.mark.parametrize("kv_len", [10**7, 1 << 29, (1 << 30) + 1, 2**31 - 20])
def test_lengths_that_no_loop_over_pages_reaches(kv_len: int) -> None:
    def estimate(variant: fa.Variant, reclaim: str = "holes") -> tuple[int, int]:
        group = fa.kv.Group((0,), 1, 8, variant=variant, reclaim=reclaim)  # type: ignore[arg-type]
        (found,) = fa.kv.estimate(fa.kv.Spec((group,), 16), kv_len).groups
        return found.pages, found.keys

    whole = -(-kv_len // 16)
    assert estimate(fa.Causal()) == (whole, kv_len)
    judged = kv_len <= 1 << 29  # for twice the positions
    seen = kv_len <= (1 << 30) + 1
    for variant, pages, keys in (
        (fa.SlidingWindow(4096), 257, 4096), (fa.StreamingLLM(4096, 4), 258, 4100),
        (fa.Chunked(8192), 512, (kv_len - 1) % 8192 + 1),
    ):  # fmt: skip
        expected = (pages if judged else whole, keys if seen else kv_len)
        assert estimate(variant) == expected
    pages, keys = estimate(fa.StreamingLLM(4096, 4), "compact")
    assert (pages, keys) == (258 if judged else whole, 4100 if seen else kv_len)
