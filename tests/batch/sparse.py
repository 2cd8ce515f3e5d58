"""Random sparsity, as the engine takes it and as a dense matrix of pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa
from tests.batch.batches import Batch, indptr


@dataclass(slots=True)
class Visited:
    """pairs[b] [lists, q_len, kv_len]: the pairs of request b; lists is 1 or num_kv_heads."""

    sparsity: Any
    pairs: list[Tensor]

    def on(self, device: str) -> Any:
        """The sparsity with its lists on the device of the keys; lengths stay on the host."""
        s = self.sparsity
        if isinstance(s, fa.BlockSparse):
            bits = None if s.bits is None else s.bits.to(device)
            return replace(s, indices=s.indices.to(device), bits=bits)
        if isinstance(s, fa.Bits):
            return replace(s, bits=s.bits.to(device))
        return replace(s, indices=s.indices.to(device)) if isinstance(s, fa.TokenSparse) else s

    def seen(self, b: int, h: int, rows: Tensor) -> Tensor:
        """As `oracle.Seen`."""
        pairs = self.pairs[b]
        return pairs[h if len(pairs) > 1 else 0][rows]


def blocks(
    batch: Batch, size: tuple[int, int], density: float = 0.25, per_head: bool = False,
    bits: bool = False, seed: int = 0,
) -> Visited:  # fmt: skip
    """Blocks of one size; some rows have none, and lists are not sorted."""
    generator = torch.Generator().manual_seed(seed)
    lists = batch.heads[1] if per_head else 1
    rows, cols = size
    starts: list[Tensor] = []
    indices: list[Tensor] = []
    kept: list[Tensor] = []
    pairs = [torch.zeros(lists, q, k, dtype=torch.bool) for q, k in _sizes(batch)]
    for h in range(lists):
        counts = []
        for b, (q_len, kv_len) in enumerate(_sizes(batch)):
            for r in range(-(-q_len // rows)):
                some = torch.rand(-(-kv_len // cols), generator=generator) < density
                found = some.nonzero()[:, 0]
                found = found[torch.randperm(len(found), generator=generator)]
                counts.append(len(found))
                indices.append(found)
                for block in found.tolist():
                    bit = torch.ones(rows, cols, dtype=torch.bool)
                    if bits:
                        bit = torch.rand(rows, cols, generator=generator) < 0.5
                        kept.append(bit)
                    at = pairs[b][h, r * rows : (r + 1) * rows, block * cols : (block + 1) * cols]
                    at |= bit[: at.shape[0], : at.shape[1]]
        offset = int(starts[-1][-1]) if starts else 0
        starts.append(indptr(counts) + offset)
    sparsity = fa.BlockSparse(
        torch.stack(starts) if per_head else starts[0],
        torch.cat(indices).int() if indices else torch.empty(0, dtype=torch.int32),
        size,
        bits=torch.stack(kept) if kept else torch.zeros(0, *size).bool() if bits else None,
    )
    return Visited(sparsity, pairs)


def variable_blocks(
    batch: Batch, num_rows: int, num_cols: int, density: float, seed: int = 0
) -> Visited:
    """Blocks of many sizes for one request; each kv head has its own map and sizes."""
    generator = torch.Generator().manual_seed(seed)
    (q_len,), (kv_len,) = batch.q_len, batch.kv_len

    def parts(total: int, count: int) -> Tensor:
        cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
        return torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).diff()

    row_sizes, col_sizes, starts, indices, maps = [], [], [], [], []
    for _ in range(batch.heads[1]):
        chosen = torch.rand(num_rows, num_cols, generator=generator) < density
        row_sizes.append(parts(q_len, num_rows))
        col_sizes.append(parts(kv_len, num_cols))
        offset = int(starts[-1][-1]) if starts else 0
        starts.append(indptr(chosen.sum(1).tolist()) + offset)
        indices.append(chosen.nonzero()[:, 1])
        maps.append(chosen.repeat_interleave(row_sizes[-1], 0).repeat_interleave(col_sizes[-1], 1))
    sparsity = fa.BlockSparse(
        torch.stack(starts),
        torch.cat(indices).int(),
        (torch.stack(row_sizes), torch.stack(col_sizes)),
    )
    return Visited(sparsity, [torch.stack(maps)])


def tokens(batch: Batch, topk: int, per_head: bool = False, seed: int = 0) -> Visited:
    """For each token `topk` positions, or all where a request has fewer: the rest is -1."""
    generator = torch.Generator().manual_seed(seed)
    lists = batch.heads[1] if per_head else 1
    indices = torch.full((sum(batch.q_len), lists, topk), -1, dtype=torch.int32)
    pairs = [torch.zeros(lists, q, k, dtype=torch.bool) for q, k in _sizes(batch)]
    for b, (q_len, kv_len) in enumerate(_sizes(batch)):
        for r in range(q_len):
            for h in range(lists):
                some = torch.randperm(kv_len, generator=generator)[:topk]
                columns = torch.randperm(topk, generator=generator)[: len(some)]
                indices[batch.q_start[b] + r, h, columns] = some.int()
                pairs[b][h, r, some] = True
    return Visited(fa.TokenSparse(indices if per_head else indices[:, 0]), pairs)


def trees(batch: Batch, seed: int = 0) -> Visited:
    """A random tree for each request over its last q_len keys."""
    generator = torch.Generator().manual_seed(seed)
    bits, pairs = [], []
    for q_len, kv_len in _sizes(batch):
        sees = torch.eye(q_len, dtype=torch.bool)
        for token in range(1, q_len):
            parent = int(torch.randint(-1, token, (), generator=generator))
            if parent >= 0:
                sees[token] |= sees[parent]
        bits.append(sees)
        whole = torch.ones(1, q_len, kv_len, dtype=torch.bool)
        whole[0, :, kv_len - q_len :] = sees
        pairs.append(whole)
    return Visited(fa.Tree(bits), pairs)


def flat_bits(batch: Batch, seed: int = 0, packed: bool = False) -> Visited:
    """Random bits for all pairs of each request; some rows keep none."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [torch.rand(1, q, k, generator=generator) < 0.4 for q, k in _sizes(batch)]
    for kept in pairs:
        kept[:, ::5] = False
    flat = [p.flatten() for p in pairs]
    if not packed:
        return Visited(fa.Bits(torch.cat([torch.empty(0, dtype=torch.bool), *flat])), pairs)
    steps = 2 ** torch.arange(8)
    whole = [torch.nn.functional.pad(f, (0, -f.numel() % 8)).view(-1, 8) for f in flat]
    return Visited(fa.Bits((torch.cat(whole) * steps).sum(1).to(torch.uint8)), pairs)


def _sizes(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.q_len, batch.kv_len, strict=True))
