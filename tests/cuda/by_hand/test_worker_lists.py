"""Workers compute the items of their lists; merges read states at any index; padding is skipped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cuda.by_hand.launches import ByHand
from tests.cuda.by_hand.requests import GROUP, KV_HEADS, PADDING, Batch, Item, Request
from tests.harness import rotation

KINDS = ("prefill", "few_row")
TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100")
ROTATING = [
    pytest.param(kind, TARGETS[(2 * i + j) % len(TARGETS)], copies, id=f"{kind}-{copies}")
    for i, kind in enumerate(KINDS)
    for j, copies in enumerate(("late", "early"))
]


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


@pytest.mark.parametrize(("kind", "target", "copies"), ROTATING)
def test_lists_of_several_items_padding_and_sources(kind: str, target: str, copies: str) -> None:
    batch, launch = in_lists(kind, target)
    launch.run(copies)
    batch.check(batch.own_keys)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_does_it_all(kind: str) -> None:
    """All items in one block give the same bits as one block for each item."""
    outs = []
    for lists in (False, True):
        batch = Batch(build_requests(kind), kind, "sm_80")
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


@pytest.mark.parametrize("kind", KINDS)
def test_workers_without_work_write_nothing(kind: str) -> None:
    batch = Batch(build_requests(kind), kind, "sm_80")
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


@pytest.mark.parametrize(
    ("kind", "target", "paged"), rotation.chosen(SHARING, 2, lambda case: case[0])
)
def test_tokens_of_several_requests_in_any_order_share_keys(
    kind: str, target: str, paged: bool
) -> None:
    batch, launch, keys_of = sharing(kind, target, paged)
    launch.run()
    batch.check(keys_of)
