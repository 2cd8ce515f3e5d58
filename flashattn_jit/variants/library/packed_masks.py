"""Masks read from per-token tensors: documents packed into one sequence, and padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashattn_jit.errors import InputError
from flashattn_jit.variants.spec import Variant, tensor


def document_ids(lengths: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The ids 0, 1, 2, ... of documents of these lengths, laid out one after another: int32
    ``[sum(lengths)]``. Raises `InputError` for a negative length.

    >>> document_ids([2, 3])
    tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    """
    if any(n < 0 for n in lengths):
        raise InputError(f"lengths of documents must be 0 or more, got {list(lengths)}")
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), list(lengths))
    return torch.tensor(ids, dtype=torch.int32, device=device or "cpu")


class DocumentMask(Variant):
    """Keep ``documents[b, i] == documents[b, j]``: tokens see their own document only.

    documents: int tensor ``[batch, tokens]``, the document of every position, in any order
    (`document_ids` makes it of lengths). Compose with `Causal` for decoders: in one sequence, order
    within a document is order in the sequence. A query at a negative position is in no document
    and sees no key; positions past the last token continue its document.
    Packed training and inference; sequence packing of BERT, NaViT and of vision towers.

    >>> fa.DocumentMask(documents) & fa.Causal()
    """

    documents: Tensor = tensor("batch", "tokens")

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``i >= 0 and documents[b, i] == documents[b, j]``."""
        own = self.documents[b, torch.clamp(q_idx, min=0)]
        return (own == self.documents[b, kv_idx]) & (q_idx >= 0)


class PaddingMask(Variant):
    """Keep ``keep[b, j]``: keys that are not padding, left or right of the text or anywhere.

    keep: bool tensor ``[batch, kv_len]``, True for real tokens (Hugging Face's `attention_mask`
    as bool). Where padding is on the right only, ``kv_len=`` of the op says the same and costs
    nothing.
    All batched inference of Hugging Face models.
    """

    keep: Tensor = tensor("batch", "kv_len")

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``keep[b, j]``."""
        return self.keep[b, kv_idx]
