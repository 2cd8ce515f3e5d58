"""Sparsity as key lists: the pairs that each format visits, against element-wise maps.

These are the lists that plan() makes; what kernels compute with them is in tests/batch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.ops.keys.key_lists import KeyLists, Lengths, key_lists
from flashattn_jit.variants.library import pack_bits, tree_bits
from tests.batch.batches import Batch
from tests.batch.oracle import Math, check
from tests.batch.sparse import blocks, tokens, trees, variable_blocks

CPU = torch.device("cpu")


def lengths_of(b: Batch) -> Lengths:
    return Lengths(b.q_len, b.kv_len, sum(b.q_len), *b.heads, CPU, max(b.kv_len, default=0))


def visits(lists: KeyLists, b: Batch) -> list[torch.Tensor]:
    """How often each pair of each request is visited: int [list heads, q_len, kv_len]."""
    heads = b.heads[1] if lists.per_head else 1
    rows = [-(-n // lists.q_block) for n in b.q_len]
    assert lists.begins.numel() == lists.counts.numel() == heads * sum(rows)
    out = [torch.zeros(heads, q, k, dtype=torch.int64)
           for q, k in zip(b.q_len, b.kv_len, strict=True)]  # fmt: skip
    for h in range(heads):
        number = h * sum(rows)
        for request, count in enumerate(rows):
            for r in range(count):
                begin, n = int(lists.begins[number]), int(lists.counts[number])
                number += 1
                assert begin >= 0 and begin + n <= lists.key_blocks.numel()
                for block in lists.key_blocks[begin : begin + n].tolist():
                    if block < 0:
                        continue
                    at = out[request][h, r * lists.q_block : (r + 1) * lists.q_block]
                    at[:, block * lists.key_block : (block + 1) * lists.key_block] += 1
    return out


def matches(b: Batch, visited: object, lists: KeyLists) -> None:
    for found, pairs in zip(visits(lists, b), visited.pairs, strict=True):  # type: ignore
        assert torch.equal(found, pairs.long().expand_as(found))


def small(q_len: tuple[int, ...], kv_len: tuple[int, ...]) -> Batch:
    return Batch(q_len, kv_len, (4, 2), 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=4),
    size=st.tuples(st.integers(1, 5), st.integers(1, 7)),
    per_head=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_of_one_size(lengths, size, per_head: bool, seed: int) -> None:
    b = small(tuple(q for q, _ in lengths), tuple(k for _, k in lengths))
    visited = blocks(b, size, 0.5, per_head, seed=seed)
    lists = key_lists(visited.sparsity, lengths_of(b))
    key_block = min(size[1], max(1, *b.kv_len, 1))
    assert (lists.q_block, lists.key_block, lists.per_head) == (size[0], key_block, per_head)
    matches(b, visited, lists)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    q_len=st.integers(4, 40), kv_len=st.integers(4, 60), rows=st.integers(1, 4),
    cols=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_blocks_of_all_sizes(q_len: int, kv_len: int, rows: int, cols: int, seed: int) -> None:
    b = small((q_len,), (kv_len,))
    visited = variable_blocks(b, rows, cols, 0.5, seed)
    matches(b, visited, key_lists(visited.sparsity, lengths_of(b)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=4),
    topk=st.integers(0, 9), per_head=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_lists_of_tokens(lengths, topk: int, per_head: bool, seed: int) -> None:
    b = small(tuple(q for q, _ in lengths), tuple(k for _, k in lengths))
    visited = tokens(b, topk, per_head, seed)
    lists = key_lists(visited.sparsity, lengths_of(b))
    assert (lists.q_block, lists.key_block) == (1, 1)
    matches(b, visited, lists)


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [
        ([64, 128, 64], [16, 48, 16, 20], (64, 16)),
        ([6, 10, 4], [9, 6, 3], (2, 3)),
        ([20], [18], (20, 18)),
        ([7, 13], [5, 13], (7, 5)),  # the last block may be cut short
        ([20, 0], [0, 18], (20, 18)),
    ],
)
def test_sizes_become_blocks_as_large_as_can_be(rows, cols, expected) -> None:
    b = small((sum(rows),), (sum(cols),))
    indptr = torch.arange(len(rows) + 1) * len(cols)
    sparsity = fa.BlockSparse(
        indptr, torch.arange(len(cols)).repeat(len(rows)), (torch.tensor(rows), torch.tensor(cols))
    )
    lists = key_lists(sparsity, lengths_of(b))
    assert (lists.q_block, lists.key_block) == expected
    assert bool((visits(lists, b)[0] == 1).all())


def test_one_side_of_one_size() -> None:
    b = small((10,), (24,))
    sparsity = fa.BlockSparse(torch.tensor([0, 1, 3, 3]), torch.tensor([1, 0, 1]),
                              (4, torch.tensor([9, 15])))  # fmt: skip
    found = visits(key_lists(sparsity, lengths_of(b)), b)[0][0].bool()
    wanted = torch.zeros(10, 24, dtype=torch.bool)
    wanted[:4, 9:] = wanted[4:8] = True
    assert torch.equal(found, wanted)


def test_lists_may_share_and_skip_entries() -> None:
    """Indptr need not start at 0, and heads may point into the same entries."""
    b = Batch((4,), (40,), (4, 2), 64)
    indices = torch.tensor([9, 0, 3, 1], dtype=torch.int32)
    for indptr in (torch.tensor([1, 3, 4]), torch.tensor([[1, 3, 4], [1, 2, 3]])):
        batch = fa.BatchAttention(None, **b.options())
        batch.plan(b.q_indptr, b.storage, sparsity=fa.BlockSparse(indptr, indices, (2, 8)))
        seen = torch.zeros(2, 4, 40, dtype=torch.bool)
        for h in (0, 1):
            own = indptr[h] if indptr.dim() == 2 else indptr
            for r in (0, 1):
                for block in indices[own[r] : own[r + 1]].tolist():
                    seen[h, 2 * r : 2 * r + 2, 8 * block : 8 * block + 8] = True
        check(b, Math(), batch.run(b.q, b.k, b.v), None, seen=lambda _, h, rows, s=seen: s[h][rows])


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (5, 64), (3, 65), (16, 130)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_bits_of_any_width(size: tuple[int, int], per_head: bool) -> None:
    b = Batch((20, 0, 7), (300, 5, 64), (8, 2), 64, page_size=16)
    visited = blocks(b, size, 0.5, per_head, bits=True)
    batch = fa.BatchAttention(fa.Causal(), **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=visited.sparsity)
    check(b, Math(causal=True), batch.run(b.q, b.k, b.v), None, seen=visited.seen)


@pytest.mark.parametrize("words", [1, 3])
def test_bits_next_to_a_mask_of_bits(words: int) -> None:
    """Params and dims of the sparsity do not collide with those of the variant."""
    parents = [-1, 0, 0, 1]
    b = Batch((4,), (20,), (4, 2), 64)
    bits = torch.nn.functional.pad(tree_bits(parents), (0, words - 1))
    mask = fa.TreeMask(torch.tensor([16]), bits)
    visited = blocks(b, (2, 4), 0.6, bits=True)
    batch = fa.BatchAttention(mask, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=visited.sparsity)
    sees = torch.ones(4, 20, dtype=torch.bool)
    sees[:, 16:] = (tree_bits(parents)[0] >> torch.arange(4)) & 1 == 1
    out = batch.run(b.q, b.k, b.v)
    check(b, Math(), out, None, seen=lambda i, h, rows: visited.seen(i, h, rows) & sees[rows])


@pytest.mark.parametrize("form", ["list", "bool", "words", "wide words"])
def test_trees_in_every_form(form: str) -> None:
    b = Batch((3, 70, 0, 1), (10, 75, 4, 1), (4, 2), 64, page_size=8)
    visited = trees(b)
    square = torch.zeros(4, 72, 72, dtype=torch.bool)
    for i, one in enumerate(visited.sparsity.bits):
        square[i, : one.shape[0], : one.shape[1]] = one
    sparsity = {
        "list": visited.sparsity,
        "bool": fa.Tree(square),
        "words": fa.Tree(pack_bits(square)),
        "wide words": fa.Tree(torch.nn.functional.pad(pack_bits(square), (0, 3), value=-1)),
    }[form]
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=sparsity)
    check(b, Math(), batch.run(b.q, b.k, b.v), None, seen=visited.seen)


def test_a_tree_of_parents_equals_the_mask_of_the_library() -> None:
    parents = [-1, 0, 1, 0, -1]
    b = Batch((5, 5), (30, 5), (4, 2), 64)
    batch = fa.BatchAttention(None, **b.options())
    words = tree_bits(parents).repeat(2, 1, 1)
    batch.plan(b.q_indptr, b.storage, sparsity=fa.Tree(words))
    out = batch.run(b.q, b.k, b.v)
    mask = fa.BatchAttention(fa.TreeMask(torch.tensor([25, 0]), words), **b.options())
    mask.plan(b.q_indptr, b.storage)
    torch.testing.assert_close(out, mask.run(b.q, b.k, b.v), rtol=1e-6, atol=1e-6)


def test_packed_bits_expanded_over_the_batch_need_no_other_kernel() -> None:
    b = Batch((5, 5), (30, 5), (4, 2), 64)
    words = tree_bits([-1, 0, 1, 0, -1])
    batch = fa.BatchAttention(None, **b.options())
    modules = []
    for bits in (words.repeat(2, 1, 1), words.expand(2, -1, -1)):
        plan = batch.plan(b.q_indptr, b.storage, sparsity=fa.Tree(bits))
        modules.append([k and k.module for k in plan._planned.first.kernels])
    assert modules[0] == modules[1]


def test_indices_of_a_device_are_taken_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices an index out of range is no key."""
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    b = Batch((2,), (10,), (4, 2), 64, page_size=4)
    indices = torch.tensor([[3, 99, -1, 0], [-5, 10, 9, 2**31 - 1]], dtype=torch.int32)
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=fa.TokenSparse(indices))
    seen = torch.zeros(2, 10, dtype=torch.bool)
    seen[0, [3, 0]] = seen[1, 9] = True
    check(b, Math(), batch.run(b.q, b.k, b.v), None, seen=lambda i, h, rows: seen[rows])


def test_lists_are_not_copied() -> None:
    indices = torch.zeros(6, 2, 8, dtype=torch.int32)
    b = small((2, 4), (9, 9))
    lists = key_lists(fa.TokenSparse(indices), lengths_of(b))
    assert lists.key_blocks.data_ptr() == indices.data_ptr()
    assert np.array_equal(lists.begins.numpy()[:3], [0, 16, 32])


def test_blocks_larger_than_all_keys_cost_what_keys_cost() -> None:
    """A list is planned as so many blocks of keys, so a block is no longer than all keys."""
    whole = fa.BlockSparse(torch.tensor([0, 1]), torch.tensor([0]), (16, 2**31 - 1))
    lists = key_lists(whole, lengths_of(small((4,), (1000,))))
    assert lists.key_block == 1000
