"""Which keys a query token visits: `fa.BlockSparse`, `fa.TokenSparse`, `fa.Tree` and `fa.Bits`.

Sparsity is independent of storage: indices are logical positions, as hooks see them. A token
visits the keys that its sparsity lists and that the variant's mask keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class BlockSparse:
    """Blocks of keys by block row, as compressed sparse rows.

    Block row i of a request is its query rows ``[i * Br, (i + 1) * Br)``, and key block j its keys
    ``[j * Bc, (j + 1) * Bc)``; the last ones may be cut short. Request b has ``ceil(q_len / Br)``
    block rows; those of all requests are numbered one request after another.

    Args:
        indptr: int32 or int64 cpu tensor [block rows + 1], or [num_kv_heads, block rows + 1] where
            kv heads visit different blocks: row r visits ``indices[indptr[r] : indptr[r + 1]]``.
        indices: int32 or int64 tensor [nnz] of key block numbers, counted from each request's first
            key, on the device of the keys. In any order, each once in a row: a block that is listed
            twice counts twice.
        block_size: (Br, Bc), each at least 1. A tensor instead of an int holds the size of each
            block row [block rows] or of each key block [key blocks], with a leading dim
            num_kv_heads if sizes differ between kv heads; then the batch must be one request, and
            both tensors are on the CPU.
        bits: bool tensor [nnz, Br, Bc] on the device of the keys: which pairs of a block are kept;
            all of them by default. Not with variable blocks.

    `plan()` raises InputError for values that are out of range; indices are checked if they are on
    the CPU.

    Source: Ye et al. 2025, arXiv 2501.01005, section 3.1.

    Example:
        >>> batch.plan(q_indptr, paged, sparsity=fa.BlockSparse(indptr, indices, (64, 16)))
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    block_size: tuple[int | torch.Tensor, int | torch.Tensor]
    bits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenSparse:
    """The keys of each query token as a list of positions, as top-k indexers return them.

    Args:
        indices: int32 or int64 tensor [num_q_tokens, topk], or [num_q_tokens, num_kv_heads, topk]
            where kv heads visit different keys, on the device of the keys: logical positions from
            0 to kv_len - 1 of the token's request, or -1 for none, in any order, each once: a key
            that is listed twice counts twice.

    `plan()` raises InputError for values that are out of range; indices are checked if they are on
    the CPU.

    Source: the lists of Quest (arXiv 2406.10774), NSA (arXiv 2502.11089) and DeepSeek's lightning
    indexer.

    Example:
        >>> batch.plan(q_indptr, paged, sparsity=fa.TokenSparse(scores.topk(2048).indices))
    """

    indices: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Draft tokens that see all keys before them, and those draft tokens that the bits select.

    The last q_len keys of each request are its draft tokens; token r sees draft token c where bit
    (r, c) is set.

    Args:
        bits: bool tensor [num_requests, rows, columns], or a sequence of bool tensors
            [q_len, q_len], one per request; or int64 [num_requests, rows, words] as `fa.tree_bits`
            and `fa.pack_bits` make them. Rows and columns past a request's q_len are not read.

    Raises InputError in `plan()` for another shape or dtype, and for a q_offset other than "end".

    Source: SpecInfer (Miao et al. 2023, section 4); Medusa; EAGLE.

    Example:
        >>> batch.plan(q_indptr, paged, sparsity=fa.Tree(fa.tree_bits(parents)))
    """

    bits: torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Bits:
    """The pairs of each request as bits, row by row, as in FlashInfer's custom masks.

    Request b has q_len x kv_len bits of its own: query row r sees key c where the bit
    ``bit_indptr[b] + r * kv_len + c`` is set and the variant's mask keeps the pair; ``fa.Full()``
    keeps all. No tile is skipped: kernels read the bits of every pair that the variant keeps.

    Args:
        bits: bool tensor [num_bits], or uint8 [num_bytes] with bit i in bit ``i % 8`` of byte
            ``i // 8`` (FlashInfer's ``packbits``), on the device of the keys. Packed bits whose
            size and address are multiples of 8 bytes are read where they are, others are copied.
        bit_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending: the first bit of each
            request, then the end. By default the requests' bits follow one another, in packed
            bits from a new byte on, as FlashInfer's ``segment_packbits`` lays them out (its indptr
            counts bytes).

    `plan()` raises InputError for another shape or dtype, and names the request that has too few
    bits.

    Source: Ye et al. 2025, arXiv 2501.01005; ``packed_custom_mask`` of FlashInfer's prefill.

    Example:
        >>> batch.plan(q_indptr, paged, sparsity=fa.Bits(torch.cat([m.flatten() for m in masks])))
    """

    bits: torch.Tensor
    bit_indptr: torch.Tensor | None = None


Sparsity = BlockSparse | TokenSparse | Tree | Bits
