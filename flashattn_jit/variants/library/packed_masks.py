"""Masks read from per-token tensors: documents packed into one sequence, and padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashattn_jit.errors import InputError
from flashattn_jit.variants.library.int_lists import int_list
from flashattn_jit.variants.variant import Variant, tensor

_MOST = 2**31 - 1  # of the tokens of a sequence


def document_ids(
    lengths: Sequence[int] | Tensor, device: torch.device | str | None = None
) -> Tensor:
    """The ids 0, 1, 2, ... of documents of these lengths, laid out one after another: int32
    ``[sum(lengths)]``. Raises `InputError` for a length that is no int or negative, and for more
    than ``2**31 - 1`` tokens or than memory holds.

    >>> document_ids([2, 3])
    tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    """
    sizes = int_list("lengths", lengths, "documents are laid out by them")
    for document, size in enumerate(sizes):
        if size < 0:
            raise InputError(
                f"lengths of documents must be 0 or more, got lengths[{document}]={size}"
            )
    total = sum(sizes)
    if total > _MOST:
        raise InputError(
            f"lengths of documents add up to {total}, but positions are int32: at most {_MOST} "
            "tokens; divide them among several sequences"
        )
    try:
        ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    except MemoryError:
        raise InputError(
            f"lengths of documents add up to {total}, whose ids, 4 bytes each, do not fit the "
            "memory; divide them among several sequences"
        ) from None
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
