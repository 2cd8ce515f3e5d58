"""Feature `sparse`: items visit lists of key blocks, and hooks see the keys' positions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.render import render
from flashattn_jit.errors import InputError
from tests.cuda.by_hand.launches import ByHand
from tests.cuda.by_hand.requests import GROUP, KV_HEADS, WRONG, Batch, Item, Request
from tests.harness import rotation

KINDS = ("prefill", "few_row")
TARGETS = ("sm_80", "sm_75", "sm_90", "sm_100")
BLOCKS = (1, 4, 64)
NAN = float("nan")


class Lists:
    """Random lists of key blocks, one for each request and key head."""

    def __init__(self, batch: Batch, block: int, seed: int = 0) -> None:
        dice = random.Random(seed)
        self.block, self.blocks = block, list[int]()
        self.begin: dict[tuple[int, int], int] = {}
        for b, request in enumerate(batch.requests):
            count = -(-request.kv_len // block)
            for head in range(KV_HEADS):
                chosen = dice.sample(range(count), count * 3 // 4)
                # Invalid entries, and blocks that end, begin or lie behind the last key.
                none = [-1, count, count + 7, (1 << 31) - 1, -(1 << 31), -1]
                listed = sorted([*chosen, count - 1] if count else []) if head else chosen
                for entry in none[: 2 + 4 * head]:
                    listed.insert(dice.randrange(len(listed) + 1), entry)
                listed += [-1] * (100 // block)  # whole tiles of invalid entries
                self.begin[b, head] = len(self.blocks)
                self.blocks += _once(listed)
        self.end = len(self.blocks)

    def positions(self, batch: Batch, b: int, head: int) -> tuple[int, int]:
        """Begin and end of the list of a request and key head, in positions."""
        after = [begin for begin in self.begin.values() if begin > self.begin[b, head]]
        return self.begin[b, head] * self.block, min([*after, self.end]) * self.block

    def keys(self, batch: Batch, b: int, head: int) -> list[tuple[int, int]]:
        """The keys that a list names, as `Batch.check` takes them."""
        begin, end = self.positions(batch, b, head)
        request = batch.requests[b]
        at = (self.blocks[p // self.block] * self.block + p % self.block for p in range(begin, end))
        return [(b, j) for j in at if request.kv_first <= j < request.kv_len]

    def hide_others(self, batch: Batch) -> None:
        """Sets K of the keys that no list names to NaN."""
        keys = batch.k.view(batch.num_slots, KV_HEADS, -1)
        for b, request in enumerate(batch.requests):
            for head in range(KV_HEADS):
                named = {j for _, j in self.keys(batch, b, head)}
                others = [j for j in range(request.kv_first, request.kv_len) if j not in named]
                keys[batch.slots_of(b, others), head] = NAN

    def values(self) -> dict[str, torch.Tensor | int]:
        """The fields of fajit_args."""
        return {
            "key_blocks": torch.tensor(self.blocks, dtype=torch.int32),
            "key_block": self.block,
            "num_key_blocks": len(self.blocks),
        }


def _once(entries: Sequence[int]) -> list[int]:
    seen = set[int]()
    return [e for e in entries if e < 0 or not (e in seen or seen.add(e))]


def build_requests(kind: str) -> list[Request]:
    """Four requests; the last one has no keys, so its lists name none."""
    rows = (1, 5, 8, 2) if kind == "few_row" else (35, 5, 17, 2)
    lens = (200, 64, 101, 0)
    return [Request(q, kv, max(0, kv - q + 3)) for q, kv in zip(rows, lens, strict=True)]


def items_of(batch: Batch, lists: Lists) -> list[Item]:
    return [
        Item(b, head, begin, end, *lists.positions(batch, b, head))
        for b in range(len(batch.requests))
        for head, begin, end in batch.tiles(b)
    ]


CASES = [
    pytest.param(kind, block, paged, TARGETS[(i + j + 2 * paged) % 4], ("late", "early")[j % 2],
                 id=f"{kind}-{block}-{'paged' if paged else 'ragged'}")
    for i, kind in enumerate(KINDS)
    for j, block in enumerate(BLOCKS)
    for paged in (False, True)
]  # fmt: skip


def listed(
    kind: str, target: str, block: int, *, paged: bool = False, stages: int = 0
) -> tuple[Batch, ByHand, Callable[..., Any]]:
    """Requests whose keys are those of random lists; K of the others is NaN."""
    features = ("sparse", "paged") if paged else ("sparse",)
    batch = Batch(build_requests(kind), kind, target, features, seed=block, stages=stages)
    lists = Lists(batch, block)
    lists.hide_others(batch)
    words = [item.words() for item in items_of(batch, lists)]
    # Half of the tests give the work to workers, in lists.
    workers = {} if paged else {
        "worker_indptr": torch.tensor([0, 2, 2, len(words)]).int(), "num_workers": 3
    }  # fmt: skip
    launch = batch.launch(words, **lists.values(), **workers)
    return batch, launch, lambda b, head: lists.keys(batch, b, head)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kind", "block", "paged", "target", "copies"),
    rotation.chosen(CASES, 2, lambda case: case.values[:2]),
)
def test_lists_in_any_order_with_holes(
    kind: str, block: int, paged: bool, target: str, copies: str
) -> None:
    batch, launch, keys_of = listed(kind, target, block, paged=paged)
    launch.run(copies)
    batch.check(keys_of)


def cut_lists(kind: str) -> tuple[Batch, ByHand, Callable[..., Any]]:
    """Items that begin at no multiple of a block; an end behind the last entry is clipped."""
    batch = Batch(build_requests(kind)[:3], kind, "sm_80", ("sparse",))
    lists = Lists(batch, 4)
    work, merges, rows = list[list[int]](), list[list[int]](), 0
    for item in items_of(batch, lists):
        end = item.end + 50 if item.end == lists.end * 4 else item.end  # clipped
        cuts = [item.begin, item.begin + 37, item.begin + 71, end]
        count = item.row_end - item.row_begin
        merges.append([*item.words()[:5], rows, 3, 0])
        for a, b in pairwise(cuts):
            work.append(replace(item, begin=a, end=b, partial=rows).words())
            rows += count
    launch = batch.launch(work, merge_work=merges, partial_rows=rows, **lists.values())
    return batch, launch, lambda b, head: lists.keys(batch, b, head)


@pytest.mark.parametrize("kind", KINDS)
def test_lists_are_cut_anywhere_and_end_where_they_end(kind: str) -> None:
    batch, launch, keys_of = cut_lists(kind)
    launch.run()
    batch.check(keys_of)


class Rotated(fa.Variant):
    """Key and value hooks that read logical positions."""

    def key_mod(self, k, b, h, kv_idx):
        return k * (1 + 0.01 * kv_idx)

    def value_mod(self, v, b, h, kv_idx):
        return v + 0.1 * kv_idx


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kind", "target", "stages"),
    [
        ("prefill", "sm_80", 1),
        ("prefill", "sm_80", 2),
        ("few_row", "sm_75", 2),  # copies pass through registers
        ("few_row", "sm_80", 2),
    ],
)
def test_hooks_of_rows_see_logical_positions(kind: str, target: str, stages: int) -> None:
    requests = [Request(5 if kind == "few_row" else 40, 150)]
    batch = Batch(requests, kind, target, ("sparse",), variant=Rotated(), stages=stages)
    lists = Lists(batch, 1)
    lists.hide_others(batch)
    batch.launch([i.words() for i in items_of(batch, lists)], **lists.values()).run()
    for head in range(2 * KV_HEADS):
        at = torch.tensor([j for _, j in lists.keys(batch, 0, head // GROUP)])
        slots = batch.slots_of(0, at.tolist())
        k, v = (t[slots, head // GROUP].double() for t in (batch.k, batch.v))
        k, v = k * (1 + 0.01 * at[:, None]), v + 0.1 * at[:, None]
        scores = batch.q[:, head].double() @ k.T * batch.head_dim**-0.5
        expected = torch.softmax(scores, -1) @ v
        error = float((batch.out[:, head].double() - expected).abs().max())
        assert error < 0.1, f"head {head} is off by {error:.3g}"  # values reach 15


def without_mask(hole: int | None) -> float:
    """The error of lists without a mask, which have one hole or none."""
    batch = Batch([Request(40, 128)], "prefill", "sm_80", ("sparse",), variant=fa.Full())
    entries = list(range(127, -1, -1))
    if hole is not None:
        entries[hole] = -1
    values = {"key_blocks": torch.tensor(entries).int(), "key_block": 1, "num_key_blocks": 128}
    words = [Item(0, head, begin, end, 0, 128).words() for head, begin, end in batch.tiles(0)]
    batch.launch(words, **values).run()
    slots, worst = batch.slots_of(0, [j for j in entries if j >= 0]), 0.0
    for head in range(2 * KV_HEADS):
        k, v = (t[slots, head // GROUP].double() for t in (batch.k, batch.v))
        scores = batch.q[:, head].double() @ k.T * batch.head_dim**-0.5
        expected = torch.softmax(scores, -1) @ v
        worst = max(worst, float((batch.out[:, head].double() - expected).abs().max()))
    return worst


@pytest.mark.parametrize("hole", [None, 0, 63, 64, 100])
def test_full_tiles_need_every_position_to_be_a_key(hole: int | None) -> None:
    """A tile without holes runs no mask; one with a hole anywhere does."""
    assert without_mask(hole) < WRONG


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_keys_start_anywhere(kind: str) -> None:
    """With `unaligned`: head dims that are no multiple of 8."""
    batch = Batch(build_requests(kind)[1:2], kind, "sm_90", ("sparse", "unaligned"), head_dim=20)
    lists = Lists(batch, 1)
    batch.launch([i.words() for i in items_of(batch, lists)], **lists.values()).run()
    batch.check(lambda b, head: lists.keys(batch, b, head))


@pytest.mark.parametrize("other", ["block_mask", "mixed_rows", "indirect"])
def test_features_that_do_not_go_together_are_refused(other: str) -> None:
    spec = Batch([Request(1, 10)], "few_row", "sm_80", ("sparse",)).spec
    with pytest.raises(InputError, match=other):
        render(replace(spec, features=("sparse", other)))
