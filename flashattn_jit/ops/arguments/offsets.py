"""Lengths and offsets of requests as arrays of the host."""

from __future__ import annotations

from typing import Literal

import torch

from ...errors import InputError
from . import checks

Offset = int | torch.Tensor | Literal["end"]
"""Of ``q_idx``: an int, a tensor with one entry a request, or "end" for kv_len - q_len."""

LARGEST_OFFSET = 2**30
Array = tuple[int, int, int]
"""A contiguous integer array of the host: address, entries, bytes of an entry."""


def host_array(name: str, value: object, shape: str = "[n]") -> tuple[Array, torch.Tensor]:
    """The address of an int32 or int64 cpu tensor [n], and the tensor that keeps it valid.

    shape: what messages say of it.
    """
    tensor = checks.check_host_integers(name, value, "batches")
    if tensor.dim() != 1:
        raise InputError(f"{name} must be a tensor {shape}, got {list(tensor.shape)}")
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.resolve_neg().contiguous()
    return (tensor.data_ptr(), tensor.shape[0], tensor.element_size()), tensor


def offset_array(q_offset: Offset, count: int) -> tuple[Array | None, torch.Tensor | None]:
    """The positions of first tokens as an array, and what keeps it valid; None for "end".

    Raises:
        InputError: it is no offset, or one is out of range.
    """
    if isinstance(q_offset, torch.Tensor):
        array, held = host_array("q_offset", q_offset)
        values = held.numpy()
        if values.size and (values.min() < -LARGEST_OFFSET or values.max() > LARGEST_OFFSET):
            for i, offset in enumerate(values.tolist()):
                _in_range(f"q_offset[{i}]", offset)
        return array, held
    if is_end(q_offset, "num_requests"):
        return None, None
    one = check_offset(q_offset, "num_requests")
    held = torch.full((max(0, count),), one, dtype=torch.int64, device="cpu")
    return host_array("q_offset", held)


def is_end(q_offset: object, requests: str) -> bool:
    """Whether an offset is "end". Raises InputError for any other text."""
    if not isinstance(q_offset, str):
        return False
    if q_offset != "end":
        raise InputError(
            f'q_offset must be an int, a tensor [{requests}] or "end", got {q_offset!r}'
        )
    return True


def check_offset(q_offset: object, requests: str) -> int:
    """An offset that is one number. Raises InputError; requests: the dim of a tensor of them."""
    if type(q_offset) is not int and (
        isinstance(q_offset, bool) or not hasattr(q_offset, "__index__")
    ):
        raise InputError(
            f'q_offset must be an int, a tensor [{requests}] or "end", got '
            f"{type(q_offset).__name__}"
        )
    return _in_range("q_offset", q_offset)


def _in_range(name: str, offset: object) -> int:
    rule = "is outside of [-2**30, 2**30]"
    return checks.check_int(name, offset, -LARGEST_OFFSET, LARGEST_OFFSET, rule)
