"""Long calls under masks that keep little of the keys, in the emulator against a CPU kernel.

Items of more than 64 key tiles are classified by chunks (`common/kv_walk.h`); those of wgmma find
their tiles by a warp of its own. Ends are no multiples of a tile, and some rows keep no key.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.batch.runs import attend
from tests.harness import rotation

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MODES = ("late", "early", "random:7")
KEYS = 13000


def segments(seed: int, count: int) -> Tensor:
    """A number of each position; they change at `count` positions, and recur."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, KEYS, (count,), generator=generator).sort().values
    return torch.searchsorted(ends, torch.arange(KEYS), right=True) % 9


def documents(seed: int) -> Mask:
    ids = segments(seed, 12)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def documents_without_end(seed: int) -> Mask:
    """Not causal, and rows of the numbers 3 and 5 keep no key."""
    ids = segments(seed, 40)
    of_rows = torch.where((ids == 3) | (ids == 5), -1, ids)
    return lambda b, h, q_idx, kv_idx: of_rows[q_idx] == ids[kv_idx]


def one_key(seed: int) -> Mask:
    """A key for each 50 rows."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, KEYS, (KEYS,), generator=generator)
    return lambda b, h, q_idx, kv_idx: kv_idx == keys[q_idx // 50]


def islands(seed: int) -> Mask:
    """By position alone: stretches of 300 keys, and another half for odd heads."""
    width = 1500 + seed * 700
    return lambda b, h, q_idx, kv_idx: (kv_idx + h % 2 * (width // 2)) % width < 300


def blocks(seed: int) -> Mask:
    """Blocks of 200 keys that 90 rows keep whole, a few of each."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(KEYS // 90 + 1, KEYS // 200 + 1, generator=generator) < 0.06
    return lambda b, h, q_idx, kv_idx: kept[q_idx // 90, kv_idx // 200]


def prefix(seed: int) -> Mask:
    """Many full tiles: causal, or before a position."""
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 900 * seed)


MASKS = (documents, documents_without_end, one_key, islands, blocks, prefix)
SHAPES = ((150, KEYS, 64), (70, KEYS, 128), (3, KEYS, 64), (1, KEYS, 128), (300, 5003, 64))
"""Rows, keys, head dim; the fourth is decoding."""

CASES = [(m, s, t) for m in MASKS for s in SHAPES for t in ("sm_80", "sm_90")]
IN_TURN = rotation.chosen(CASES, 10, lambda case: (case[2], case[1][0] > 16))


def close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("make", "shape", "target"), IN_TURN,
    ids=lambda x: x.__name__ if callable(x) else str(x),
)  # fmt: skip
def test_dense_calls(
    make: Callable[[int], Mask],
    shape: tuple[int, int, int],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = rotation.seed() % 1000
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", MODES[seed % 3])
    q_len, kv_len, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2, q_len, head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(1, 1, kv_len, head_dim, generator=generator).bfloat16() for _ in range(2))
    mod = make(seed % 4)
    offset = random.Random(seed).randrange(kv_len - q_len + 1)
    options = {"q_offset": offset, "return_lse": True}
    close(
        fa.attention(q, k, v, mod, target=f"emulated:{target}", **options),
        fa.attention(q.float(), k.float(), v.float(), mod, **options),
    )


BATCHES = [(p, t) for p in (None, 16, 1) for t in ("sm_80", "sm_90")]


@pytest.mark.parametrize(("page_size", "target"), rotation.chosen(BATCHES, 3))
def test_batches(page_size: int | None, target: str) -> None:
    """Requests of few rows and of many, of few keys and of many, one with none; pages."""
    seed = rotation.seed() % 1000
    batch = Batch(
        (5, 1, 140, 0, 64), (KEYS, 7000, 9001, 40, 64), (2, 1), 64, torch.bfloat16, page_size,
        seed=seed,
    )  # fmt: skip
    exact = replace(batch, dtype=torch.float32)
    exact.k, exact.v, exact.q = batch.k.float(), batch.v.float(), batch.q.float()
    mod = documents(seed % 4)
    close(attend(batch, mod, target=f"emulated:{target}"), attend(exact, mod))
