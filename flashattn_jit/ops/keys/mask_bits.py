"""Bits of blocks, trees and requests as masks: variants that the planner composes with the user's.

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
from ..arguments.calls import host_array
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


class FlatBits(Variant):
    """Keep the pairs whose bit is set: bit r * kv_len + c of the request's own, row r and key c.

    sparsity_first: for each request, the bit of its row r less r * kv_len, r counted in packed q.
    """

    sparsity_first: Tensor = tensor("sparsity_requests", dtype=torch.int64)
    sparsity_bits: Tensor = tensor("sparsity_words", dtype=torch.int64)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The bit of the pair."""
        row = q_row(b, q_idx).to(torch.int64)  # bits are more than 32 bits count
        bit = self.sparsity_first[b] + row * kv_len(b) + kv_idx
        seen: Tensor = ((self.sparsity_bits[bit >> 6] >> (bit & 63)) & 1) != 0
        return seen


def flat_params(
    bits: object,
    bit_indptr: Tensor | None,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    device: torch.device,
) -> dict[str, Tensor]:
    """The params of `FlatBits`. Raises InputError."""
    if not isinstance(bits, Tensor) or bits.dtype not in (torch.bool, torch.uint8):
        got = bits.dtype if isinstance(bits, Tensor) else type(bits).__name__
        raise InputError(
            f"Bits.bits must be a bool tensor [num_bits] or a packed uint8 tensor [num_bytes], "
            f"got {got}"
        )
    check_readable("Bits.bits", bits)
    check_not_lazy("Bits.bits", bits)
    if bits.dim() != 1:
        raise InputError(
            f"Bits.bits must have one dim, all requests one after another, got {list(bits.shape)}"
        )
    if bits.device.type != device.type:
        raise InputError(f"Bits.bits are on {bits.device}, the batch on {device}; move them there")
    is_packed = bits.dtype == torch.uint8
    q_len, sizes = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (q_lens, kv_lens))
    counts = q_len * sizes
    if bit_indptr is None:
        steps = (counts + 7) // 8 * 8 if is_packed else counts
        starts = torch.cat([steps.new_zeros(1), steps.cumsum(0)])
    else:
        starts = host_array("Bits.bit_indptr", bit_indptr)[1].long()
        if starts.shape[0] != len(q_lens) + 1:
            raise InputError(
                f"Bits.bit_indptr must be [num_requests + 1 = {len(q_lens) + 1}], got "
                f"{list(starts.shape)}"
            )
    num_bits = bits.numel() * (8 if is_packed else 1)
    # Ends are bounded first: sums and differences of any int64 wrap around.
    begins, ends = starts[:-1], starts[1:].clamp(-1, num_bits)
    wrong = (begins < 0) | (ends - begins < counts)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0, 0])
        remedy = "" if not is_packed else _packing_remedy(num_bits, counts, starts, bit_indptr)
        raise InputError(
            f"request {b} has q_len={q_lens[b]} x kv_len={kv_lens[b]} bits, but Bits.bits has "
            f"{num_bits} bits, of which bits {int(starts[b])} to {int(starts[b + 1])} are its own"
            f"{remedy}"
        )
    first = begins - (q_len.cumsum(0) - q_len) * sizes
    return {"sparsity_first": first.to(device), "sparsity_bits": _as_words(bits)}


def _packing_remedy(
    num_bits: int, counts: Tensor, starts: Tensor, bit_indptr: Tensor | None
) -> str:
    """What to do about packed bits that are too few, where their layout says it."""
    if bit_indptr is None and num_bits >= int(counts.sum()):
        return (
            "; packed bits begin a new byte in each request: pack each request's alone, or give "
            "bit_indptr, which counts bits"
        )
    if bit_indptr is not None and torch.equal(starts.diff(), (counts + 7) // 8):
        return (
            "; bit_indptr counts bits, FlashInfer's mask_indptr counts bytes: multiply it by 8, "
            "or leave it out"
        )
    return ""


def _as_words(bits: Tensor) -> Tensor:
    """Flat bits as int64 words; packed bits in place, if size and address allow."""
    if bits.dtype == torch.bool:
        padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).contiguous()
        places = torch.arange(8, dtype=torch.uint8, device=bits.device)
        eights = padded.view(torch.uint8).view(-1, 8) << places
        bits = torch.sum(eights, dim=-1, dtype=torch.uint8)
    bits = bits.contiguous()
    missing = -bits.numel() % 8 if bits.numel() else 8
    if missing or bits.data_ptr() % 8:
        copy = bits.new_zeros(bits.numel() + missing)
        copy[: bits.numel()] = bits
        bits = copy
    return bits.view(torch.int64)


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
