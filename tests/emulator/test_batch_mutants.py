"""Mutants of the code for batches: pages, lists of workers, key lists, shared rows.

As in test_mutants.py, each mutant is found; tests/cuda finds nothing in the unchanged kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.codegen.spec import KernelSpec
from tests.cuda.by_hand import launches
from tests.cuda.by_hand.requests import WRONG
from tests.cuda.by_hand.test_key_lists import cut_lists, listed, without_mask
from tests.cuda.by_hand.test_worker_lists import beginning_later, in_lists, sharing
from tests.cuda.kernels import ptx_of
from tests.emulator.test_mutants import (
    BARRIER,
    FEW_ROW,
    KEYS,
    PREFILL,
    RACE,
    WALK,
    Mutant,
    assert_found,
    check_texts,
    mutated_headers,
)
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc


def lists(kind: str) -> float:
    batch, launch = in_lists(kind, "sm_80")
    launch.run()
    return batch.difference(batch.own_keys)


def later(paged: bool, kind: str = "few_row") -> float:
    batch, launch = beginning_later(kind, "sm_80", paged)
    launch.run()
    return batch.difference(batch.own_keys)


def shared(paged: bool = False) -> float:
    batch, launch, keys_of = sharing("few_row", "sm_80", paged)
    launch.run()
    return batch.difference(keys_of)


def sparse(kind: str, block: int = 4, stages: int = 0) -> float:
    batch, launch, keys_of = listed(kind, "sm_80", block, stages=stages)
    launch.run()
    return batch.difference(keys_of)


def cut() -> float:
    batch, launch, keys_of = cut_lists("few_row")
    launch.run()
    return batch.difference(keys_of)


CALLS: dict[str, Callable[[], float]] = {
    "lists prefill": lambda: lists("prefill"),
    "lists": lambda: lists("few_row"),
    "later": lambda: later(False),
    "later paged": lambda: later(True),
    "later paged prefill": lambda: later(True, "prefill"),
    "shared": shared,
    "shared paged": lambda: shared(True),
    "sparse": lambda: sparse("few_row"),
    "sparse tokens": lambda: sparse("few_row", 1),
    "sparse one stage": lambda: sparse("prefill", stages=1),
    "sparse cut": cut,
    "sparse hole": lambda: without_mask(63),
    "sparse early hole": lambda: without_mask(64),
}

ITEMS, MERGE, ROWS = "common/items.h", "common/merge.h", "common/packed_rows.h"

MUTANTS = (
    # Lists of workers
    Mutant("an item read before it is there", ITEMS, BARRIER, "", "lists", 0, RACE),
    Mutant("an item begins before all are done", ITEMS, "if (feed.more()) __syncthreads();", "",
           "lists", kinds=RACE),
    Mutant("a tile is loaded over states that leave", ITEMS, "if (feed.more()) __syncthreads();",
           "", "lists prefill", kinds=RACE),
    Mutant("padding is work", ITEMS, "if (feed.item().request >= 0)", "", "lists"),
    Mutant("a list goes on into the next", ITEMS, "end_ = a.worker_indptr[i_ + 1];",
           "end_ = a.worker_indptr[i_ + 1] + 1;", "lists"),
    # Merges
    Mutant("states follow each other", MERGE, "a.merge_sources != nullptr",
           "a.merge_sources == nullptr", "lists"),
    Mutant("the sources of the first merge", MERGE, "a.merge_sources[item.first_partial + i]",
           "a.merge_sources[i]", "shared"),
    Mutant("the state of the first row", MERGE, "state_row(a, item, i) + at;",
           "state_row(a, item, i);", "lists"),
    Mutant("no merge is a merge", MERGE, " && item.num_splits != 0", "", "lists"),
    # Rows of several requests
    Mutant("tokens in order", ROWS, "a.row_token == nullptr ? entry : a.row_token[entry]", "entry",
           "shared"),
    Mutant("the request of another token", ROWS, "a.row_request[row.token]",
           "a.row_request[entry % a.q_row0[1]]", "shared"),
    Mutant("slots as the row's own request has them", ROWS, "c.kv_request = item.request",
           "c.kv_request = -1", "shared"),
    # Pages
    Mutant("a stale page", FEW_ROW, "location = next;", "", "later paged", 1),
    Mutant("the first request's pages", KEYS, "a.page_indptr[item.request]", "a.page_indptr[0]",
           "later paged"),
    Mutant("the next slot of a page", KEYS, "key - at * a_.page_size",
           "key - at * a_.page_size + 1", "later paged prefill"),
    # Keys from a later one on
    Mutant("rows from the first position on", KEYS,
           "int64_t{a.kv_row0[item.request]} - kv_first", "int64_t{a.kv_row0[item.request]}",
           "later"),
    Mutant("pages from the first position on", KEYS, "location.row - stored, at",
           "location.row, at", "later paged"),
    Mutant("slots from the first position on", "hooks/hook_ops.h", "int32_t(kv_idx) - first",
           "int32_t(kv_idx)", "later paged"),
    Mutant("slots of the first page", "hooks/hook_ops.h",
           "int32_t(page_size.divide(uint32_t(key)))", "0", "later paged"),
    # Key lists
    Mutant("no key is a key", KEYS, "return listed >= 0;", "return true;", "sparse"),
    Mutant("keys behind the last", KEYS, "key >= first && key < end", "key >= first",
           "sparse tokens"),
    Mutant("keys before the first", KEYS, "key >= first && key < end", "key < end", "sparse"),
    Mutant("the first key of a block", KEYS, "position - block * lists.block_size", "0", "sparse"),
    Mutant("the last key again", KEYS,
           "lane < count || location.key < 0 ? location.key : ~location.key", "location.key",
           "sparse cut"),
    Mutant("positions behind the lists", KEYS,
           "min(item.kv_end, a.num_key_blocks * a.key_block)", "item.kv_end", "sparse cut"),
    Mutant("a tile with a hole is full", WALK, "FAJIT_TILE_FULL && !all",
           "FAJIT_TILE_FULL && false", "sparse hole"),
    Mutant("a hull that begins at the second block", WALK, "divided(p0, divisors_.key_block)",
           "divided(p0, divisors_.key_block) + 1", "sparse early hole"),
    Mutant("a hull that begins at the last block", WALK, "first = min(first,",
           "first = max(first - lists.end,", "sparse tokens"),
    Mutant("positions of the tile before", PREFILL, "turn ^= 1;", "", "sparse one stage"),
    Mutant("positions written while they are read", PREFILL, "kept, turn ^ 1)",
           "kept, turn)", "sparse one stage", 2, RACE),
    Mutant("positions of another stage", FEW_ROW, "listed_ + stage * kListedBytes;", "listed_;",
           "sparse"),
)  # fmt: skip


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.parametrize("mutant", rotation.chosen(MUTANTS, 2), ids=lambda m: m.name)
def test_the_mutant_is_found(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = mutated_headers(mutant, tmp_path)

    def mutated(spec: KernelSpec, _: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(env, "include_dir", lambda: include)
            return ptx_of(spec)

    monkeypatch.setattr(launches, "ptx_of_artifact", mutated)
    assert_found(mutant, CALLS[mutant.call], WRONG)
