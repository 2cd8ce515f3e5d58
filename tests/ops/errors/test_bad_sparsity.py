"""Wrong blocks, lists and trees of plan(): messages name the request and say what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from tests.ops.errors.batch_calls import PAGED, Q_INDPTR, batch, refused

ROWS = torch.tensor([0, 2, 3, 4])  # (1, 2, 0, 1) block rows of 2 queries: 4 of them
INDPTR, INDICES = torch.tensor([0, 2, 3, 4, 5]), torch.tensor([1, 0, 0, 0, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"indptr": ROWS}, r"indptr must be \[block rows \+ 1 = 5\]"),
        ({"indptr": torch.tensor([0, 2, 1, 4, 5])}, r"must not descend; block row 1 \(request 1\)"),
        ({"indptr": torch.tensor([0, 2**63 - 1, -(2**63), 4, 5])}, r"block row 1 \(request 1\)"),
        ({"indptr": torch.tensor([0, 2, 3, 4, 6])}, "runs from 0 to 6, but indices has 5 entries"),
        ({"indptr": INDPTR.float()}, "indptr must be an int32 or int64 cpu tensor"),
        ({"indptr": [0, 2, 3, 4, 5]}, r"BlockSparse\.indptr must be an int32 or int64 cpu tensor, "
         r"got list; make one: torch\.tensor\(indptr, dtype=torch\.int32\)$"),
        ({"indptr": [0, 2.5, 3, 4, 5]}, "indptr must be an int32 or int64 cpu tensor, got list$"),
        ({"indptr": INDPTR.float().numpy()}, "int32 or int64 cpu tensor, got ndarray$"),
        ({"indptr": INDPTR.numpy()}, r"got ndarray; make one: torch\.tensor\(indptr, dtype"),
        ({"indptr": None}, "indptr must be an int32 or int64 cpu tensor, got NoneType$"),
        ({"indices": [1, 0, 0, 0, 3]}, r"\.indices must be an int32 or int64 tensor, got list; "
         r"make one: torch\.tensor\(indices, dtype=torch\.int32\)$"),
        ({"indptr": INDPTR.expand(3, 5)}, r"or \[num_kv_heads=2, 5\], got \[3, 5\]"),
        ({"indices": torch.tensor([1, 0, 1, 0, 3])}, r"indices\[2\]=1, a key block of block row 1, "
         r"is outside of \[0, 1\): request 1 has 1 key blocks"),
        ({"indices": torch.tensor([1, 0, 0, 0, -1])}, r"indices\[4\]=-1, .* request 3 has 4 key"),
        ({"indices": INDICES.float()}, "indices must be an int32 or int64 tensor, got torch.float"),
        ({"block_size": (2, 0)}, "block_size: Bc=0 must be an int of at least 1"),
        ({"block_size": 2}, r"block_size must be \(Br, Bc\), got 2"),
        ({"bits": torch.ones(5, 2, 8)}, r"bits must be a bool tensor \[nnz, Br, Bc\], got torch.f"),
        ({"bits": torch.ones(4, 2, 8, dtype=torch.bool)}, r"bits must be \[nnz=5, Br=2, Bc=8\]"),
        ({"block_size": (torch.tensor([1]), 8)}, "takes one request, the batch has 4"),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    sparsity = replace(fa.BlockSparse(INDPTR, INDICES, (2, 8)), **changes)
    refused(InputError, text, batch(), Q_INDPTR, PAGED, sparsity=sparsity)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((torch.tensor([2, 1]), torch.tensor([4, 4])), "Bc must be .* that add up to kv_len=10"),
        ((torch.tensor([2, 2]), torch.tensor([4, 6])), "Br must be .* that add up to q_len=3"),
        ((torch.tensor([2**63 - 1, 2, 2**63 - 1, 3]), 5), "of request 0, they add up to .1844674"),
        ((torch.tensor([2.0, 1]), 5), "Br must be an int32 or int64 cpu tensor"),
        ((torch.tensor([[2, 1]] * 3), 5), r"Br must be \[blocks\] or \[num_kv_heads=2, blocks\]"),
    ],
)
def test_variable_blocks_that_cannot_be(sizes: Any, text: str) -> None:
    sparsity = fa.BlockSparse(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), sizes)
    storage = fa.Ragged(torch.tensor([0, 10]))
    refused(InputError, text, batch(), torch.tensor([0, 3]), storage, sparsity=sparsity)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (torch.zeros(5, 3, dtype=torch.int32), r"must be \[num_q_tokens=6, topk\]"),
        (torch.zeros(6, 3, 3, dtype=torch.int32), "num_kv_heads=2, topk"),
        (torch.zeros(6, 3), "must be an int32 or int64 tensor, got torch.float32"),
        (
            torch.tensor([[0], [3], [4], [0], [0], [0]]),
            "of token 2 holds 4, but request 1 has kv_l",
        ),
        (torch.tensor([[0], [3], [-2], [0], [0], [0]]), "of token 2 holds -2"),
    ],
)
def test_lists_of_tokens_that_cannot_be(indices: torch.Tensor, text: str) -> None:
    refused(InputError, text, batch(), Q_INDPTR, PAGED, sparsity=fa.TokenSparse(indices))


def test_trees_that_cannot_be() -> None:
    made = batch()
    for bits, text in (
        (torch.ones(4, 2, 2, dtype=torch.bool), "request 1 has q_len=3 draft tokens"),
        (torch.ones(3, 3, 3, dtype=torch.bool), r"must be \[num_requests=4, rows, columns\]"),
        (torch.ones(4, 3, 3), "must be bool or packed int64, got torch.float32"),
        ([torch.ones(3, 3, dtype=torch.bool)] * 3, "has 3 tensors for num_requests=4"),
        ([torch.ones(2, 2, dtype=torch.bool)] * 4, r"bits\[1\] is \[2, 2\], but request 1 has"),
        (None, "must be a tensor or a sequence of tensors, got NoneType"),
    ):
        refused(InputError, text, made, Q_INDPTR, PAGED, sparsity=fa.Tree(bits))  # type: ignore
    good = fa.Tree(torch.ones(4, 3, 3, dtype=torch.bool))
    refused(InputError, 'q_offset must be "end"', made, Q_INDPTR, PAGED, sparsity=good, q_offset=0)
    short = fa.Ragged(torch.tensor([0, 10, 12, 12, 40]))
    refused(InputError, "request 1 has q_len=3 draft tokens, but kv_len=2", made, Q_INDPTR, short,
            sparsity=good)  # fmt: skip
