"""What ranks compare before they go on: a digest of options, lengths, variant and mask values."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from ..variants.binding import Bound
from .shares import Ints


def digest(said: object, arrays: Iterable[Ints], bound: Bound | None) -> bytes:
    """Equal on ranks that were given the same.

    said: options, by their repr. bound: the variant with the params of its mask; tensors on other
    devices than the CPU are not read.
    """
    text = hashlib.sha256(repr((said, bound and bound.ir)).encode())
    for array in arrays:
        text.update(array.tobytes())
    if bound is not None:
        slots, numbers = bound.structure.mask_slots
        text.update(repr([bound.scalars[s] for s in numbers]).encode())
        for slot in slots:
            tensor: Any = bound.tensors[slot]
            if tensor.is_cpu:
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                text.update(repr((tensor.shape, zlib.crc32(data.data))).encode())
    return text.digest()


def run_digest(return_lse: bool, scale: float) -> bytes:
    """Equal on ranks whose runs send the same results of the same scores."""
    return digest((return_lse, scale), (), None)
