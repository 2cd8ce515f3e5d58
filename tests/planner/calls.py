"""Calls of every kind, by format: tests of warming run them and record their kernel requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashattn_jit as fa
from tests.batch.batches import Batch, share_prefix
from tests.batch.sparse import blocks, flat_bits, tokens, trees

HEADS = (8, 2)  # a group of 4
PAGES = (16, 4)
"""Page sizes: one that TMA copies, and one that it does not."""

ROWS = (1, 3, 9, 40)  # 4, 12, 36 and 160 packed rows: every class, on every target
KEYS = 48
BATCHED = ("dense", "ragged", "paged", "sparse", "cascade", "tree", "bits", "block_bits")
"""The formats that `Calls` has methods for."""


class Calls:
    """Calls of one variant, dims, dtype and target; `unaligned` shifts tensors by one entry."""

    def __init__(
        self, variant: Any, dims: tuple[int, int], dtype: torch.dtype, target: str | None = None,
        unaligned: bool = False,
    ) -> None:  # fmt: skip
        self.variant, self.dims, self.dtype, self.target = variant, dims, dtype, target
        self.unaligned = unaligned

    def tensor(self, *sizes: int) -> torch.Tensor:
        count = torch.Size(sizes).numel()
        shift = 1 if self.unaligned else 0
        return torch.zeros(count + 64, dtype=self.dtype)[shift : count + shift].view(sizes)

    def qkv(self, rows: int) -> tuple[torch.Tensor, ...]:
        dim, dim_v = self.dims
        sizes = ((HEADS[0], rows, dim), (HEADS[1], KEYS, dim), (HEADS[1], KEYS, dim_v))
        return tuple(self.tensor(2, *s) for s in sizes)

    def dense(self) -> None:
        for rows in ROWS:
            q, k, v = self.qkv(rows)
            fa.attention(q, k, v, self.variant, target=self.target)
            fa.attention(q, k, v, self.variant, target=self.target, partial=True)
            starts = torch.tensor([0, rows, rows + 1])
            packed = [self.tensor(2 * n, t.shape[1], t.shape[3]) for n, t in
                      ((rows, q), (KEYS, k), (KEYS, v))]  # fmt: skip
            packed[0] = self.tensor(rows + 1, HEADS[0], self.dims[0])
            fa.varlen_attention(
                *packed, starts, torch.tensor([0, 3, 2 * KEYS]), self.variant, target=self.target
            )

    def batch(self, rows: int, page_size: int) -> Batch:
        made = Batch(
            (rows, 1, rows), (KEYS,) * 3, HEADS, self.dims[0], self.dtype, page_size,
            dim_v=self.dims[1],
        )  # fmt: skip
        for name in "qkv":
            own = getattr(made, name)
            setattr(made, name, self.tensor(*own.shape))
        return made

    def batches(
        self, page_sizes: Sequence[int], sparsity: Callable[[Batch], Any] | None = None
    ) -> None:
        for page_size, rows in itertools.product(page_sizes, ROWS):
            batch = self.batch(rows, page_size)
            limits = fa.Limits(4, 200, 256, max_pages=200 if page_size else 0)
            given = {} if sparsity is None else {"sparsity": sparsity(batch)}
            for more in ({}, {"batch_invariant": True}, {"limits": limits}):
                made = fa.BatchAttention(
                    self.variant, **batch.options(), target=self.target, **more
                )
                made.plan(batch.q_indptr, batch.storage, q_offset="end", **given)
                made.run(batch.q, batch.k, batch.v)
                if "limits" in more and sparsity is None:
                    made.workspace_bytes()

    def ragged(self) -> None:
        self.batches((0,))

    def paged(self) -> None:
        self.batches(PAGES)

    def sparse(self) -> None:
        for visited in (lambda b: blocks(b, (16, 8), 0.5), lambda b: tokens(b, 8)):
            self.batches((0, 16), lambda b, make=visited: make(b).sparsity)

    def block_bits(self) -> None:
        self.batches((0, 16), lambda b: blocks(b, (16, 16), 0.5, bits=True).sparsity)

    def tree(self) -> None:
        self.batches((0, *PAGES), lambda b: trees(b).sparsity)

    def bits(self) -> None:
        self.batches((0, *PAGES), lambda b: flat_bits(b).sparsity)

    def cascade(self) -> None:
        for page_size, rows in itertools.product((0, *PAGES), ROWS):
            batch = self.batch(rows, page_size)
            made = fa.CascadeAttention(self.variant, **batch.options(), target=self.target)
            if page_size:
                share_prefix(batch, 32)
                levels = fa.cascade_levels(batch.q_indptr, batch.storage)
                assert len(levels) > 1
            else:
                shared = fa.CascadeLevel(
                    torch.tensor([0, 2 * rows + 1]), fa.Ragged(torch.tensor([0, 16]))
                )
                levels = [shared, fa.CascadeLevel(batch.q_indptr, batch.storage)]
            rows_of_keys = batch.k.shape[0] + (0 if page_size else 16)
            k, v = (self.tensor(rows_of_keys, *t.shape[1:]) for t in (batch.k, batch.v))
            made.plan(levels)
            made.run(batch.q, k, v)
            made.plan(levels[-1:])  # a step that shares nothing

    def flex(self, score: Any = None, mask: Any = None, aux: bool = True) -> None:
        """flex_attention, which makes its variant itself and runs on the host's target."""
        for rows in ROWS:
            q, k, v = self.qkv(rows)
            visited = mask and create_block_mask(mask, 2, None, rows, KEYS, "cpu", BLOCK_SIZE=16)
            wanted = AuxRequest(lse=True, max_scores=aux)
            fa.flex_attention(q, k, v, score, visited, enable_gqa=True, return_aux=wanted)
