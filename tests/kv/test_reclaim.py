"""`fa.kv.dead_pages` against brute force over all pairs of later queries and keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa

MAX_LEN = 160
HEADS = 4
Mask = Callable[..., Any]


def brute_force(mask: Mask, q_from: int, kv_len: int, size: int) -> np.ndarray:
    """Dead pages, with the mask evaluated by torch for every head, later query and key."""
    pages = -(-kv_len // size)
    h = torch.arange(HEADS)[:, None, None]
    q = torch.arange(q_from, MAX_LEN)[None, :, None]
    k = torch.arange(pages * size)[None, None, :]
    kept = torch.as_tensor(mask(torch.tensor(0), h, q, k)).broadcast_to(
        HEADS, len(q[0]), len(k[0, 0])
    )
    return ~kept.any(0).any(0).view(pages, size).any(1).numpy()


def found(variant: Any, q_from: int, kv_len: int, size: int, **params: object) -> np.ndarray:
    return fa.kv.dead_pages(
        variant, q_from, kv_len, MAX_LEN, size, num_q_heads=HEADS, **params
    ).numpy()


def ahead(low: int, high: int) -> Mask:
    return lambda b, h, q, k: (low <= q - k) & (q - k < high)


LIBRARY: list[tuple[fa.Variant, Mask]] = [
    (fa.Causal(), ahead(0, 10**6)),
    (fa.SlidingWindow(17), ahead(0, 17)),
    (fa.SlidingWindow(9, causal=False), ahead(-9, 10)),
    (fa.Chunked(24), lambda b, h, q, k: (k <= q) & (q // 24 == k // 24)),
    (
        fa.StreamingLLM(window=20, num_sinks=5),
        lambda b, h, q, k: (k <= q) & ((q - k < 20) | (k < 5)),
    ),
    (fa.Dilated(40, 8), lambda b, h, q, k: (k <= q) & (q - k <= 40) & ((q - k) % 8 == 0)),
    (fa.BlockCausal(16), lambda b, h, q, k: k // 16 <= q // 16),
    (fa.BlockDiffusion(80, 16), fa.BlockDiffusion(80, 16).mask_mod),
    (fa.Natten(150, 9), fa.Natten(150, 9).mask_mod),
    (fa.Natten((10, 16), (3, 5)), fa.Natten((10, 16), (3, 5)).mask_mod),
    (
        fa.Dilated(32, 4) | fa.SlidingWindow(6).named("near"),
        lambda b, h, q, k: (k <= q) & ((q - k < 6) | ((q - k <= 32) & ((q - k) % 4 == 0))),
    ),
    (
        fa.Chunked(32) & fa.SlidingWindow(10),
        lambda b, h, q, k: (k <= q) & (q - k < 10) & (q // 32 == k // 32),
    ),
    (~fa.Causal(), lambda b, h, q, k: k > q),
]


@pytest.mark.parametrize(("variant", "mask"), LIBRARY, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("size", [1, 4, 16])
def test_exact_for_masks_of_the_library(variant: fa.Variant, mask: Mask, size: int) -> None:
    for q_from in range(0, MAX_LEN, 7):
        for kv_len in {q_from, max(0, q_from - 3), min(MAX_LEN, q_from + 9)}:
            wanted = brute_force(mask, q_from, kv_len, size)
            assert (found(variant, q_from, kv_len, size) == wanted).all(), (q_from, kv_len)


def test_windows_that_differ_between_heads_keep_the_longest() -> None:
    mask = fa.variant(mask_mod=lambda b, h, q, k: (k <= q) & (q - k < 8 * (h + 1)))
    dead = found(mask, 100, 100, 4)
    assert (
        dead == brute_force(lambda b, h, q, k: (k <= q) & (q - k < 8 * (h + 1)), 100, 100, 4)
    ).all()
    assert dead.sum() == (100 - 31) // 4


def random_mask(pick: random.Random) -> tuple[str, Mask]:
    """A conjunction or disjunction of limits as models use them, some of them nested."""
    table = torch.tensor([pick.randrange(4) for _ in range(MAX_LEN + 32)]).sort().values
    limits = [
        lambda n: (f"k <= q + {n % 5 - 2}", lambda b, h, q, k: k <= q + (n % 5 - 2)),
        lambda n: (f"q - k < {n}", lambda b, h, q, k: q - k < n),
        lambda n: (f"q - k < {n} * (h + 1)", lambda b, h, q, k: q - k < n * (h + 1)),
        lambda n: (f"k < {n // 4}", lambda b, h, q, k: k < n // 4),
        lambda n: (f"q // {n} == k // {n}", lambda b, h, q, k: q // n == k // n),
        lambda n: (f"q // {n} - k // {n} < 2", lambda b, h, q, k: q // n - k // n < 2),
        lambda n: ("(q - k) % 4 == 0", lambda b, h, q, k: (q - k) % 4 == 0),
        lambda n: (f"k % {n} < 3", lambda b, h, q, k: k % n < 3),
        lambda n: ("table[q] == table[k]", lambda b, h, q, k: table[q] == table[k]),
    ]  # fmt: skip

    def limit() -> tuple[str, Mask]:
        return pick.choice(limits)(pick.randrange(5, 60))

    def joined(left: tuple[str, Mask], right: tuple[str, Mask]) -> tuple[str, Mask]:
        (a, f), (b, g) = left, right
        if pick.random() < 0.65:
            return f"({a} & {b})", lambda *x: f(*x) & g(*x)
        return f"({a} | {b})", lambda *x: f(*x) | g(*x)

    made = limit()
    for _ in range(pick.randrange(4)):
        made = joined(made, limit())
    return made


def test_never_frees_a_live_page_and_misses_few_dead_ones() -> None:
    pick = random.Random(1)
    dead = missed = 0
    for _ in range(200):
        text, mask = random_mask(pick)
        variant, size = fa.variant(mask_mod=mask), pick.choice([1, 4, 16])
        for _ in range(6):
            q_from = pick.randrange(MAX_LEN)
            wanted = brute_force(mask, q_from, q_from, size)
            got = found(variant, q_from, q_from, size)
            assert not (got & ~wanted).any(), f"{text}: a live page was given up at {q_from}"
            dead += int(wanted.sum())
            missed += int((wanted & ~got).sum())
    assert dead > 2000, "the masks give nothing up"
    print(f"missed {missed} of {dead} dead pages")
    assert missed <= 0.05 * dead, f"missed {missed} of {dead} dead pages"


def test_dead_pages_stay_dead() -> None:
    """What reclaim and the hit rule rest on."""
    pick = random.Random(2)
    for _ in range(60):
        text, mask = random_mask(pick)
        variant = fa.variant(mask_mod=mask)
        before = np.zeros(MAX_LEN // 4, bool)
        for q_from in range(0, MAX_LEN, 5):
            now = found(variant, q_from, MAX_LEN, 4)
            assert (now >= before).all(), f"{text}: a dead page came back at {q_from}"
            before = now


def test_masks_that_cannot_be_judged_for_all_sequences() -> None:
    with pytest.raises(fa.ParamError, match="mask_params"):
        found(fa.DocumentMask(), 10, 10, 4)
    with pytest.raises(fa.InputError, match='reclaim="never"'):
        found(fa.PrefixLM(), 10, 10, 4, prefix_len=torch.tensor([3]))
    with pytest.raises(fa.InputError, match='reclaim="never"'):
        found(fa.DocumentMask(), 10, 10, 4, documents=torch.zeros(1, MAX_LEN, dtype=torch.int64))
    for variant in (fa.PrefixLM(), fa.DocumentMask()):
        group = fa.kv.Group((0,), 1, 8, variant=variant, reclaim="never")
        fa.kv.Cache(fa.kv.Spec((group,)), 4, max_kv_len=32)
    assert not found(fa.variant(mask_mod=fa.cpp("return kv_idx + 3 > q_idx;")), 90, 90, 4).any()
    assert not found(None, 90, 90, 4).any()


def test_lengths_of_the_batch_give_nothing_up() -> None:
    """`fa.kv_len` changes with every step."""
    mask = fa.variant(mask_mod=lambda b, h, q, k: k >= fa.kv_len(b) - 8)
    assert not found(mask, 90, 90, 4).any()


@pytest.mark.parametrize("name", ["q_from", "kv_len", "max_kv_len", "page_size"])
def test_numbers_out_of_range(name: str) -> None:
    given = {"q_from": 3, "kv_len": 5, "max_kv_len": 9, "page_size": 2}
    with pytest.raises(fa.InputError, match=name):
        fa.kv.dead_pages(fa.Causal(), **{**given, name: -1})
    if name == "max_kv_len":  # rounded up to pages, it does not fit 32 bits
        with pytest.raises(fa.InputError, match=name):
            fa.kv.dead_pages(fa.Causal(), **{**given, name: 2**31 - 1})
