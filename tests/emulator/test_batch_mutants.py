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
from tests.emulator.mutants import (
    BARRIER,
    FEW_ROW,
    KEYS,
    PREFILL,
    RACE,
    WALK,
    WRONG_RESULT,
    Mutant,
    assert_found,
    check_texts,
    mutated_headers,
    plant,
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
    plant("an item read before it is there", "lists", RACE, ITEMS, BARRIER, ""),
    plant("an item begins before all are done", "lists", RACE, ITEMS,
          "if (feed.more()) __syncthreads();", ""),
    plant("a tile is loaded over states that leave", "lists prefill", RACE, ITEMS,
          "if (feed.more()) __syncthreads();", ""),
    plant("padding is work", "lists", WRONG_RESULT, ITEMS, "if (feed.item().request >= 0)", ""),
    plant("a list goes on into the next", "lists", WRONG_RESULT, ITEMS,
          "end_ = a.worker_indptr[i_ + 1];", "end_ = a.worker_indptr[i_ + 1] + 1;"),
    # Merges
    plant("states follow each other", "lists", WRONG_RESULT, MERGE, "a.merge_sources != nullptr",
          "a.merge_sources == nullptr"),
    plant("the sources of the first merge", "shared", WRONG_RESULT, MERGE,
          "a.merge_sources[item.first_partial + i]", "a.merge_sources[i]"),
    plant("the state of the first row", "lists", WRONG_RESULT, MERGE,
          "state_row(a, item, i) + at;", "state_row(a, item, i);"),
    plant("no merge is a merge", "lists", WRONG_RESULT, MERGE, " && item.num_splits != 0", ""),
    # Rows of several requests
    plant("tokens in order", "shared", WRONG_RESULT, ROWS,
          "a.row_token == nullptr ? entry : a.row_token[entry]", "entry"),
    plant("the request of another token", "shared", WRONG_RESULT, ROWS, "a.row_request[row.token]",
          "a.row_request[entry % a.q_row0[1]]"),
    plant("slots as the row's own request has them", "shared", WRONG_RESULT, ROWS,
          "c.kv_request = item.request", "c.kv_request = -1"),
    # Pages
    plant("a stale page", "later paged", WRONG_RESULT, FEW_ROW, "location = next;", "", 1),
    plant("the first request's pages", "later paged", WRONG_RESULT, KEYS,
          "a.page_indptr[item.request]", "a.page_indptr[0]"),
    plant("the next slot of a page", "later paged prefill", WRONG_RESULT, KEYS,
          "key - at * a_.page_size", "key - at * a_.page_size + 1"),
    # Keys from a later one on
    plant("rows from the first position on", "later", WRONG_RESULT, KEYS,
          "int64_t{a.kv_row0[item.request]} - kv_first", "int64_t{a.kv_row0[item.request]}"),
    plant("pages from the first position on", "later paged", WRONG_RESULT, KEYS,
          "location.row - stored, at", "location.row, at"),
    plant("slots from the first position on", "later paged", WRONG_RESULT, "hooks/hook_ops.h",
          "int32_t(kv_idx) - first", "int32_t(kv_idx)"),
    plant("slots of the first page", "later paged", WRONG_RESULT, "hooks/hook_ops.h",
          "int32_t(page_size.divide(uint32_t(key)))", "0"),
    # Key lists
    plant("no key is a key", "sparse", WRONG_RESULT, KEYS, "return listed >= 0;", "return true;"),
    plant("keys behind the last", "sparse tokens", WRONG_RESULT, KEYS, "key >= first && key < end",
          "key >= first"),
    plant("keys before the first", "sparse", WRONG_RESULT, KEYS, "key >= first && key < end",
          "key < end"),
    plant("the first key of a block", "sparse", WRONG_RESULT, KEYS,
          "position - block * lists.block_size", "0"),
    plant("the last key again", "sparse cut", WRONG_RESULT, KEYS,
          "lane < count || location.key < 0 ? location.key : ~location.key", "location.key"),
    plant("positions behind the lists", "sparse cut", WRONG_RESULT, KEYS,
          "min(item.kv_end, a.num_key_blocks * a.key_block)", "item.kv_end"),
    plant("a tile with a hole is full", "sparse hole", WRONG_RESULT, WALK,
          "FAJIT_TILE_FULL && !all", "FAJIT_TILE_FULL && false"),
    plant("a hull that begins at the second block", "sparse early hole", WRONG_RESULT, WALK,
          "divided(p0, divisors_.key_block)", "divided(p0, divisors_.key_block) + 1"),
    plant("a hull that begins at the last block", "sparse tokens", WRONG_RESULT, WALK,
          "first = min(first,", "first = max(first - lists.end,"),
    plant("positions of the tile before", "sparse one stage", WRONG_RESULT, PREFILL, "turn ^= 1;",
          ""),
    plant("positions written while they are read", "sparse one stage", RACE, PREFILL,
          "kept, turn ^ 1)", "kept, turn)", 2),
    plant("positions of another stage", "sparse", WRONG_RESULT, FEW_ROW,
          "listed_ + stage * kListedBytes;", "listed_;"),
)  # fmt: skip


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.by_turns(3)
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
