"""Bits of blocks and trees as masks: variants that the planner composes with the user's.

Their tensors are ordinary params. Names of params and of free dims start with `sparsity_`, so that
they do not collide with the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ...variants.builtins import kv_len, q_len, q_row
from ...variants.variant import Variant, scalar, tensor
from ..arguments.checks import check_not_lazy, check_readable

MAX_MAP_ENTRIES = 2**28
"""Limit of the map from block rows and key blocks to bits: 1 GiB of int32."""


class BlockBits(Variant):
    """Keep the pairs of a block whose bit is set.

    sparsity_row: for each packed query token its block row, and its row inside the block.
    sparsity_map: the index into sparsity_bits of each (list head, block row, key block).
    sparsity_bits: the bits of each listed block, row by row.
    """

    sparsity_row: Tensor = tensor("sparsity_tokens", 2, dtype=torch.int32)
    sparsity_map: Tensor = tensor(
        "sparsity_lists", "sparsity_rows", "sparsity_blocks", dtype=torch.int32
    )
    sparsity_bits: Tensor = tensor(
        "sparsity_places", "sparsity_q_block", "sparsity_words", dtype=torch.int64
    )
    sparsity_key_block: int = scalar(1)
    sparsity_heads: int = scalar(1)  # query heads that share a list

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The bit of the pair."""
        row = q_row(b, q_idx)
        block = kv_idx // self.sparsity_key_block
        column = kv_idx - block * self.sparsity_key_block
        place = self.sparsity_map[h // self.sparsity_heads, self.sparsity_row[row, 0], block]
        word = self.sparsity_bits[place, self.sparsity_row[row, 1], column >> 6]
        seen: Tensor = ((word >> (column & 63)) & 1) != 0
        return seen


class TreeBits(Variant):
    """Keep all keys before the last q_len ones, and of the last q_len those whose bit is set."""

    sparsity_bits: Tensor = tensor(
        "sparsity_requests", "sparsity_rows", "sparsity_words", dtype=torch.int64
    )

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(j < P) or bit``, P = kv_len - q_len."""
        prefix = kv_len(b) - q_len(b)
        row = torch.clamp(q_idx - prefix, min=0)
        token = torch.clamp(kv_idx - prefix, min=0)
        word = self.sparsity_bits[b, row, token >> 6]
        kept: Tensor = (kv_idx < prefix) | (((word >> (token & 63)) & 1) != 0)
        return kept


def tree_words(
    bits: Tensor | Sequence[Tensor], q_lens: Sequence[int], device: torch.device
) -> Tensor:
    """The bits of every request as int64 [num_requests, rows, words]. Raises InputError."""
    count, longest = len(q_lens), max(q_lens, default=0)
    if not isinstance(bits, Tensor):
        return _stacked(bits, q_lens, device)
    check_readable("Tree.bits", bits)
    check_not_lazy("Tree.bits", bits)
    if bits.device.type != device.type:
        raise InputError(f"Tree.bits are on {bits.device}, the batch on {device}; move them there")
    if bits.dim() != 3 or bits.shape[0] != count:
        raise InputError(
            f"Tree.bits must be [num_requests={count}, rows, columns], got {list(bits.shape)}"
        )
    if bits.dtype == torch.bool:
        columns = bits.shape[2]
        bits = _packed(bits)
    elif bits.dtype == torch.int64:
        columns = 64 * bits.shape[2]
    else:
        raise InputError(f"Tree.bits must be bool or packed int64, got {bits.dtype}")
    if longest > min(bits.shape[1], columns):
        raise InputError(
            f"Tree.bits has {bits.shape[1]} rows and {columns} columns, but request "
            f"{list(q_lens).index(longest)} has q_len={longest} draft tokens"
        )
    return bits.contiguous()  # stride 0 over requests would be another variant structure


def _stacked(bits: Sequence[Tensor], q_lens: Sequence[int], device: torch.device) -> Tensor:
    if not isinstance(bits, Sequence):
        raise InputError(
            f"Tree.bits must be a tensor or a sequence of tensors, got {type(bits).__name__}"
        )
    if len(bits) != len(q_lens):
        raise InputError(f"Tree.bits has {len(bits)} tensors for num_requests={len(q_lens)}")
    longest = max(q_lens, default=0)
    square = torch.zeros(len(q_lens), longest, longest, dtype=torch.bool, device=device)
    for b, (one, q_tokens) in enumerate(zip(bits, q_lens, strict=True)):
        if not isinstance(one, Tensor) or one.dtype != torch.bool:
            raise InputError(f"Tree.bits[{b}] must be a bool tensor [q_len, q_len]")
        check_readable(f"Tree.bits[{b}]", one)
        if one.dim() != 2:
            raise InputError(
                f"Tree.bits[{b}] must be a bool tensor [q_len, q_len], got {list(one.shape)}"
            )
        if min(one.shape) < q_tokens:
            raise InputError(
                f"Tree.bits[{b}] is {list(one.shape)}, but request {b} has q_len={q_tokens} draft "
                "tokens"
            )
        square[b, :q_tokens, :q_tokens] = one[:q_tokens, :q_tokens]
    return _packed(square)


def _packed(bits: Tensor) -> Tensor:
    """Rows of bits as int64 words; at least one row and word, as masks read clamped indices."""
    from ...variants.library.tree import pack_bits

    words = pack_bits(bits)
    return words if words.shape[-2] else words.new_zeros(*words.shape[:-2], 1, words.shape[-1])


def block_words(bits: object, entries: int, q_block: int, key_block: int) -> Tensor:
    """BlockSparse.bits, bool [nnz, Br, Bc], as int64 [nnz, Br, words]. Raises InputError."""
    if not isinstance(bits, Tensor) or bits.dtype != torch.bool:
        got = bits.dtype if isinstance(bits, Tensor) else type(bits).__name__
        raise InputError(f"BlockSparse.bits must be a bool tensor [nnz, Br, Bc], got {got}")
    check_readable("BlockSparse.bits", bits)
    if tuple(bits.shape) != (entries, q_block, key_block):
        raise InputError(
            f"BlockSparse.bits must be [nnz={entries}, Br={q_block}, Bc={key_block}], got "
            f"{list(bits.shape)}"
        )
    words = _packed(bits)
    return words if entries else words.new_zeros(1, q_block, words.shape[-1])
