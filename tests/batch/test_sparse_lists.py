"""Sparsity at full size on this CPU: FlashInfer's test_block_sparse.py, token lists and trees.

The reference is a dense mask, as in FlashInfer's test.
"""

from __future__ import annotations

import itertools

import pytest

from tests.batch.batches import Batch
from tests.batch.lists import DTYPES
from tests.batch.oracle import Math, check
from tests.batch.runs import attend
from tests.batch.sparse import Visited, blocks, tokens, trees, variable_blocks

HEADS = ((1, 1), (4, 1), (4, 4), (16, 1), (16, 4), (16, 16))
SIZES = (64, 128, 256)
BLOCKS = [
    pytest.param(
        (rows, cols), (SIZES[i % 3], SIZES[(i + i // 3) % 3]), HEADS[i % 6], (128, 256)[i % 2],
        i % 3 == 1, (0, 16, 1)[i % 3], id=f"{rows}x{cols}-{i}",
    )
    for i, (rows, cols) in enumerate(itertools.product((1, 4, 16), repeat=2))
]  # fmt: skip
VARIABLE = (
    (256, 10, 50, 0.2, 64), (256, 20, 100, 0.7, 128), (4096, 10, 100, 0.9, 64),
    (4096, 20, 50, 0.2, 128), (8192, 20, 100, 0.7, 64), (8192, 10, 50, 0.2, 128),
)  # fmt: skip


def compare(batch: Batch, what: Math, visited: Visited) -> None:
    out, lse = attend(batch, what.variant(batch.heads[0]), sparsity=visited.sparsity)
    check(batch, what, out, lse, seen=visited.seen)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("size", "shape", "heads", "dim", "bits", "page"), BLOCKS)
def test_blocks_of_one_size(size, shape, heads, dim, bits, page) -> None:
    batch = Batch((shape[0],), (shape[1],), heads, dim, DTYPES[dim], page)
    compare(batch, Math(), blocks(batch, size, bits=bits))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("size", [(16, 16), (5, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_of_many_requests_and_of_each_head(size, per_head: bool) -> None:
    batch = Batch((33, 1, 0, 7, 20), (70, 200, 40, 0, 65), (8, 2), 64, page_size=8)
    compare(batch, Math(causal=True), blocks(batch, size, 0.4, per_head, bits=per_head))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("length", "rows", "cols", "density", "dim"), VARIABLE)
def test_blocks_of_all_sizes_for_each_head(length, rows, cols, density, dim) -> None:
    batch = Batch((length,), (length,), (4, 2), dim, DTYPES[dim], 0)
    compare(batch, Math(), variable_blocks(batch, rows, cols, density))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "topk", "heads", "page"),
    [
        ((1,) * 8, (4000, 17, 300, 1, 0, 2048, 64, 999), 64, (8, 2), 16),
        ((40, 1, 3), (500, 3000, 10), 100, (4, 4), 1),
        ((9,), (70,), 128, (7, 1), 0),
        ((1, 2), (5000, 6000), 2048, (16, 1), 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("per_head", [False, True])
def test_lists_of_tokens(q_len, kv_len, topk, heads, page, per_head: bool) -> None:
    batch = Batch(q_len, kv_len, heads, 64, page_size=page)
    compare(batch, Math(causal=not per_head), tokens(batch, topk, per_head))


@pytest.mark.parametrize("page", [0, 16])
def test_trees_of_drafts(page: int) -> None:
    batch = Batch((8, 1, 65, 0, 30), (100, 5, 65, 9, 2000), (8, 2), 64, page_size=page)
    compare(batch, Math(), trees(batch))
