"""Workers compute the items of their lists; merges read states at any index; padding is skipped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.planner.tiles import choose_rows
from flashattn_jit.variants.variant import Dims
from tests.cuda.by_hand.launches import ByHand, ints
from tests.cuda.by_hand.requests import GROUP, KV_HEADS, PADDING, WRONG, Batch, Item, Request
from tests.harness import rotation

KINDS = ("prefill", "few_row")
TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100")
ROTATING = [
    pytest.param(kind, TARGETS[(2 * i + j) % len(TARGETS)], copies, id=f"{kind}-{copies}")
    for i, kind in enumerate(KINDS)
    for j, copies in enumerate(("late", "early"))
]
WGMMA = "prefill_wgmma"
ALL_KINDS = (*KINDS, WGMMA)


def target_of(kind: str) -> str:
    """A target that has such kernels."""
    return "sm_90" if kind == WGMMA else "sm_80"


def build_requests(kind: str) -> list[Request]:
    """Long and short requests, one without rows and one without keys."""
    if kind == "few_row":
        return [
            Request(1, 200, 199), Request(3, 40, 37), Request(0, 50), Request(2, 0),
            Request(8, 70, 62),
        ]  # fmt: skip
    return [
        Request(35, 130, 95), Request(9, 20, 11), Request(0, 50), Request(3, 0),
        Request(17, 70, 53),
    ]  # fmt: skip


def cut(items: Sequence[Item], seed: int) -> tuple[list[Item], list[list[int]], list[int], int]:
    """Cuts each item's keys into up to four parts; (items, merges, sources, partial rows).

    The states of an item lie at random indices.
    """
    dice = random.Random(seed)
    cuts = {
        i: sorted({dice.randrange(x.begin + 1, x.end) for _ in range(3)})
        for i, x in enumerate(items)
        if x.end - x.begin > 60
    }
    parts = [(i, k) for i, at in cuts.items() for k in range(len(at) + 1)]
    dice.shuffle(parts)
    first_rows, rows = {}, 0
    for i, k in parts:
        first_rows[i, k] = rows
        rows += items[i].row_end - items[i].row_begin
    work, merges, sources = [], list[list[int]](), list[int]()
    for i, item in enumerate(items):
        if i not in cuts:
            work.append(item)
            continue
        ends = [item.begin, *cuts[i], item.end]
        first = len(sources)
        for k in range(len(ends) - 1):
            work.append(replace(item, begin=ends[k], end=ends[k + 1], partial=first_rows[i, k]))
            sources.append(first_rows[i, k])
        merges.append([*item.words()[:5], first, len(sources) - first, 0])
    return work, merges, sources, rows


def dealt(work: Sequence[Item], num_workers: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """The items, shuffled with padding, and the indptr of lists of random length, two empty."""
    dice = random.Random(seed)
    words = [item.words() for item in work] + [PADDING] * 4
    dice.shuffle(words)
    ends = sorted(dice.sample(range(1, len(words)), num_workers - 3))
    return words, [0, 0, *ends[:2], *ends[1:], len(words)]


def in_lists(kind: str, target: str) -> tuple[Batch, ByHand]:
    """Items with random cuts, in the lists of nine workers, and states in random order."""
    batch = Batch(build_requests(kind), kind, target)
    items = [
        Item(b, head, begin, end, 0, request.kv_len)
        for b, request in enumerate(batch.requests)
        for head, begin, end in batch.tiles(b)
    ]
    work, merges, sources, rows = cut(items, seed=1)
    assert len(merges) >= 4
    words, indptr = dealt(work, 9, seed=2)
    merges = [*merges[:2], [-1, 1 << 20, 0, 0, 1 << 20, 1 << 20, 0, 0], *merges[2:]]
    launch = batch.launch(
        words, merge_work=merges, partial_rows=rows, merge_sources=torch.tensor(sources).int(),
        worker_indptr=torch.tensor(indptr).int(), num_workers=9,
    )  # fmt: skip
    return batch, launch


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kind", "target", "copies"), [*ROTATING, (WGMMA, "sm_90", "late"), (WGMMA, "sm_90", "early")]
)
def test_lists_of_several_items_padding_and_sources(kind: str, target: str, copies: str) -> None:
    batch, launch = in_lists(kind, target)
    launch.run(copies)
    batch.check(batch.own_keys)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_one_worker_does_it_all(kind: str) -> None:
    """All items in one block give the same bits as one block for each item."""
    outs = []
    for lists in (False, True):
        batch = Batch(build_requests(kind), kind, target_of(kind))
        words = [
            Item(b, head, begin, end, 0, request.kv_len).words()
            for b, request in enumerate(batch.requests)
            for head, begin, end in batch.tiles(b)
        ]
        more = {"worker_indptr": torch.tensor([0, 0, len(words), len(words)]).int()}
        batch.launch([PADDING, *words] if not lists else words,
                     **more if lists else {}, num_workers=3 if lists else 0).run()  # fmt: skip
        batch.check(batch.own_keys)
        outs.append((batch.out, batch.lse))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_workers_without_work_write_nothing(kind: str) -> None:
    batch = Batch(build_requests(kind), kind, target_of(kind))
    empty = torch.zeros(5, dtype=torch.int32)
    batch.launch([PADDING], worker_indptr=empty, num_workers=4).run()
    assert batch.out.isnan().all() and batch.lse.isnan().all()


def beginning_later(kind: str, target: str, paged: bool) -> tuple[Batch, ByHand]:
    """Requests whose first stored key is not key 0."""
    rows = 3 if kind == "few_row" else 35
    batch = Batch(
        [Request(rows, 230, 230 - rows, 23), Request(rows, 90, 60), Request(1, 77, 76, 70)],
        kind, target, ("paged",) if paged else (),
    )  # fmt: skip
    return batch, batch.launch([
        Item(b, head, begin, end, request.kv_first, request.kv_len).words()
        for b, request in enumerate(batch.requests)
        for head, begin, end in batch.tiles(b)
    ])  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
@pytest.mark.parametrize("kind", KINDS)
def test_storage_that_begins_with_a_later_key(kind: str, paged: bool) -> None:
    batch, launch = beginning_later(kind, TARGETS[KINDS.index(kind) + 1], paged)
    launch.run()
    batch.check(batch.own_keys)


@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_up_to_the_largest_that_there_are(kind: str, paged: bool) -> None:
    """No sum of a position and the keys of a tile may overflow."""
    rows, end = (3 if kind == "few_row" else 35), 2**31 - 1
    features = ("paged",) if paged else ()
    for first in (end - 230, end - 70):
        batch = Batch([Request(rows, end, end - rows, first)], kind, "sm_80", features)
        items = [Item(0, head, begin, last, first, end) for head, begin, last in batch.tiles(0)]
        batch.launch([item.words() for item in items]).run()
        batch.check(batch.own_keys)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_the_last_tile_of_wgmma_may_reach_past_the_largest_position(head_dim: int) -> None:
    """The tiles of 192 and 112 keys do not divide 2^31. All pages are the same one."""
    rows, end, page_size = 40, 2**31 - 1, 2**16
    bound = fa.Full().bind(Dims(1, GROUP, 1, 1, 1, head_dim, head_dim), {})
    dims, dtypes = (head_dim, head_dim), ("bfloat16",) * 3
    spec = choose_rows(bound.ir, dims, dtypes, "sm_90", GROUP * rows, ("paged",))
    assert spec.tile_kind == WGMMA and 2**31 % spec.tile_kv
    torch.manual_seed(0)
    q = torch.randn(rows, GROUP, head_dim, dtype=torch.bfloat16)
    k, v = (torch.randn(1, page_size, 1, head_dim, dtype=torch.bfloat16) for _ in "kv")
    out, lse = torch.full_like(q, torch.nan), torch.full((rows, GROUP), torch.nan)
    begin = (end - 300) // spec.tile_kv * spec.tile_kv
    pages = torch.zeros(2**31 // page_size, dtype=torch.int32)
    values = {
        "num_requests": 1, "q_len": ints([rows]), "kv_len": ints([end]), "q_row0": ints([0]),
        "kv_row0": ints([0]), "q_offset": ints([end - rows]), "q_token0": ints([0]),
        "kv_token0": ints([0]), "row_request": ints([0] * rows), "page_size": page_size,
        "page_indptr": ints([0, len(pages)]), "page_indices": pages, "num_pages": 1,
    }  # fmt: skip
    work = ints([[0, 0, GROUP, 0, GROUP * rows, begin, end, -1]])
    ByHand(spec, bound, q, k, v, out, lse, work, values=values).run()
    seen = torch.arange(begin, end) % page_size
    scores = torch.einsum("qhd,kd->qhk", q.double(), k[0, seen, 0].double()) * head_dim**-0.5
    assert (out.double() - scores.softmax(-1) @ v[0, seen, 0].double()).abs().max() < WRONG


def sharing(kind: str, target: str, paged: bool) -> tuple[Batch, ByHand, Callable[..., Any]]:
    """Two levels: shared keys, and each request's own keys, which follow the shared ones."""
    q_lens = (2, 1, 4, 1) if kind == "few_row" else (9, 4, 30, 1)
    shared = 70
    own = [Request(n, shared + 25 * i, shared + 25 * i - n, shared) for i, n in enumerate(q_lens)]
    # Request 1 shares nothing: its keys are all its own.
    own[1] = Request(q_lens[1], 40, 36)
    tokens = sum(q_lens)
    token_of = [t for t in range(tokens) if not q_lens[0] <= t < q_lens[0] + q_lens[1]]
    random.Random(3).shuffle(token_of)
    batch = Batch(
        [*own, Request(len(token_of), shared)], kind, target,
        ("mixed_rows", "paged") if paged else ("mixed_rows",), tokens_of=len(own),
    )  # fmt: skip
    work, states, rows = list[Item](), dict[tuple[int, int], list[int]](), 0
    for b, request in enumerate(batch.requests):
        for head, begin, end in batch.tiles(b):
            work.append(Item(b, head, begin, end, request.kv_first, request.kv_len, rows))
            for p in range(begin, end, GROUP):
                entry = p // GROUP
                token = token_of[entry] if b == len(own) else batch.q_row0[b] + entry
                states.setdefault((token, head), []).append(rows + p - begin)
            rows += end - begin
    merges, sources = [], []
    for (token, head), from_rows in states.items():
        b = max(b for b in range(len(own)) if batch.q_row0[b] <= token)
        row = (token - batch.q_row0[b]) * GROUP
        merges.append([b, head * GROUP, GROUP, row, row + GROUP, len(sources), len(from_rows), 0])
        sources += from_rows
    assert len(merges) == tokens * KV_HEADS
    row_token = torch.tensor([*range(tokens), *token_of]).int()
    launch = batch.launch(
        [item.words() for item in work], merge_work=merges, partial_rows=rows,
        row_token=row_token, merge_sources=torch.tensor(sources).int(),
    )  # fmt: skip

    def keys_of(b: int, head: int) -> list[tuple[int, int]]:
        group = [] if b == 1 else [(len(own), j) for j in range(shared)]
        return group + batch.own_keys(b, head)

    return batch, launch, keys_of


SHARING = [
    (kind, target, paged)
    for kind, target in (("prefill", "sm_80"), ("few_row", "sm_90"), ("few_row", "sm_75"))
    for paged in (False, True)
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kind", "target", "paged"), rotation.chosen(SHARING, 2, lambda case: case[0])
)
def test_tokens_of_several_requests_in_any_order_share_keys(
    kind: str, target: str, paged: bool
) -> None:
    batch, launch, keys_of = sharing(kind, target, paged)
    launch.run()
    batch.check(keys_of)
