"""The mask of a tree of draft tokens (speculative decoding), stored as rows of bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashattn_jit.errors import InputError
from flashattn_jit.torch_modes import on_host
from flashattn_jit.variants.library.int_lists import int_list
from flashattn_jit.variants.variant import Variant, tensor


class TreeMask(Variant):
    """Keep the whole context and, among the tree's tokens, those whose bit is set. With
    ``P = prefix_len[b]``, ``r = i - P`` and ``t = j - P``: keep ``j < P``, or ``t < 64 * words``
    and bit ``t % 64`` of ``bits[b, r, t // 64]``.

    prefix_len: int tensor ``[batch]``, keys before the tree. bits: int64 tensor
    ``[batch, tree_rows, words]``, for every tree token the set of tree tokens it sees, itself
    included (`tree_bits` and `pack_bits` make it); any number of words. The tree's keys follow the
    prefix and its queries are at positions P, P + 1, ...: ``q_offset="end"``. A query before the
    tree (``r < 0``, negative positions as well) or past it (``r >= tree_rows``) sees the context
    alone.
    Medusa, EAGLE 2 and 3, SpecInfer (Miao et al. 2023, section 4).

    >>> out = fa.attention(q, k, v, fa.TreeMask(prefix_len, fa.tree_bits(parents)), q_offset="end")
    """

    prefix_len: Tensor = tensor("batch")
    bits: Tensor = tensor("batch", "tree_rows", "words", dtype=torch.int64)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(j < P) or bit``."""
        prefix = self.prefix_len[b]
        row = torch.clamp(q_idx - prefix, min=0)
        token = torch.clamp(kv_idx - prefix, min=0)
        word = self.bits[b, row, token >> 6]
        seen = ((word >> (token & 63)) & 1) != 0
        inside = (q_idx >= prefix) & (row < self.bits.shape[1])
        return (kv_idx < prefix) | (seen & inside & (token < 64 * self.bits.shape[2]))


def pack_bits(mask: Tensor) -> Tensor:
    """Rows of bits as `TreeMask` reads them: bit ``t % 64`` of word ``t // 64`` is column t.

    mask: bool ``[..., rows, columns]``. Returns int64 ``[..., rows, ceil(columns / 64)]`` on the
    same device, at least one word; the top bit is the sign. Raises `InputError` for another dtype.
    """
    if mask.dtype != torch.bool or mask.dim() < 2:
        raise InputError(
            f"pack_bits takes a bool tensor [..., rows, columns], got {mask.dtype} "
            f"{list(mask.shape)}"
        )
    columns = mask.shape[-1]
    words = max(1, (columns + 63) // 64)
    padded = torch.nn.functional.pad(mask, (0, 64 * words - columns))
    bits = padded.unflatten(-1, (words, 64)).to(torch.int64)
    # For bit 63 the sum wraps around and sets the sign bit.
    return torch.sum(bits << torch.arange(64, device=mask.device), dim=-1)


@on_host
def tree_bits(parents: Sequence[int] | Tensor) -> Tensor:
    """The bits of one tree: token t sees itself and its ancestors.

    parents: for each token its parent's index, -1 for a child of the context; parents come before
    their children. Returns int64 ``[1, tokens, words]`` on the CPU: stack trees of one batch with
    `torch.cat`. Raises `InputError` when a parent is no int or does not come before its child.

    >>> tree_bits([-1, 0, 0])[0, :, 0]
    tensor([1, 3, 5])
    """
    sees: list[int] = []
    for token, parent in enumerate(int_list("parents", parents, "a tree is made of them")):
        if not -1 <= parent < token:
            raise InputError(
                f"expected every parent before its child (or -1), got parent {parent} for token "
                f"{token}"
            )
        sees.append((1 << token) | (sees[parent] if parent >= 0 else 0))
    words = max(1, (len(sees) + 63) // 64)

    def signed(word: int) -> int:
        return word - (1 << 64) if word >> 63 else word

    rows = [[signed((s >> (64 * w)) & (2**64 - 1)) for w in range(words)] for s in sees]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(1, len(sees), words)
