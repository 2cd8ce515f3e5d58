"""Where the keys of a batch lie: `fa.Ragged` and `fa.Paged`, read for the planner.

Lengths stay where they are: the planner reads host arrays through their addresses, so that no
entry becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ... import env
from ...errors import InputError
from ...torch_modes import need_values
from ..arguments.calls import Array, host_array
from ..arguments.checks import INT32_MAX, check_int, check_readable
from .paged import PAGE_SIZE_RULE, Paged

NativeStorage = tuple[Array | None, Array | None, Array | None, int, int]
"""kv_indptr; page_indptr, last_page_len; page_size (0: ragged); page indices."""

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Keys laid end to end: request b has rows kv_indptr[b] to kv_indptr[b + 1] of k and v.

    Args:
        kv_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending from 0 to the number of
            rows of k and v, which are [num_kv_tokens, num_kv_heads, head_dim]. On the CPU because
            batches are planned on the host, which waits for no device.

    `plan()` raises InputError for what is out of range.

    Example:
        >>> batch.plan(q_indptr, fa.Ragged(kv_indptr))
    """

    kv_indptr: torch.Tensor


Storage = Ragged | Paged


class Stored(NamedTuple):
    """A storage as the planner reads it.

    page_indices: contiguous int32 on the device of the keys. pages: (0 or a negative
    entry, the greatest) of its entries in use, (0, -1) where there are none, None where they were
    not looked at. held: tensors whose addresses `native` has.
    """

    native: NativeStorage
    page_size: int
    page_indices: torch.Tensor | None
    pages: tuple[int, int] | None
    held: tuple[torch.Tensor, ...]

    @property
    def used_pages(self) -> int:
        """Entries of page_indices that are somebody's."""
        return int(self.held[0][-1]) if self.page_size and len(self.held[0]) else 0


def read_storage(storage: Storage, device: torch.device, where: str = "") -> Stored:
    """Checks the tensors' kinds; the planner checks what they hold.

    where: of shared keys, put before the names of tensors in messages.

    Raises:
        InputError: a tensor has a wrong shape, dtype or device, or a page index is negative.
    """
    if isinstance(storage, Ragged):
        array, tensor = host_array(f"{where}kv_indptr", storage.kv_indptr)
        return Stored((array, None, None, 0, 0), 0, None, None, (tensor,))
    if not isinstance(storage, Paged):
        raise InputError(
            f"{where}storage must be an fa.Paged or an fa.Ragged, got {type(storage).__name__}"
        )
    size = check_int(f"{where}page_size", storage.page_size, 1, rule=PAGE_SIZE_RULE)
    indptr, held_indptr = host_array(f"{where}page_indptr", storage.page_indptr)
    last, held_last = host_array(f"{where}last_page_len", storage.last_page_len)
    given = _page_indices(storage.page_indices, device, where)
    pages = _pages_in_use(given, held_indptr)
    if pages is not None and (pages[0] < 0 or pages[1] > INT32_MAX):
        negative = pages[0] < 0
        at = int((given < 0 if negative else given > INT32_MAX).nonzero()[0, 0])
        raise InputError(
            f"{where}page_indices[{at}]={int(given[at])}, a page of "
            f"{'group' if where else 'request'} {owner_of(at, held_indptr)}, "
            f"{'is negative' if negative else 'does not fit 32 bits'}"
        )
    indices = given.to(torch.int32).resolve_neg().contiguous()
    native = (None, indptr, last, size, indices.shape[0])
    return Stored(native, size, indices, pages, (held_indptr, held_last))


def _page_indices(indices: object, device: torch.device, where: str) -> torch.Tensor:
    need_values(f"{where}page_indices", "batches are planned from them", (indices,))
    if not isinstance(indices, torch.Tensor):
        raise InputError(
            f"{where}page_indices must be a tensor [number of pages in use], got "
            f"{type(indices).__name__}"
        )
    check_readable(f"{where}page_indices", indices)
    if indices.dim() != 1:
        raise InputError(
            f"{where}page_indices must be a tensor [number of pages in use], got "
            f"{list(indices.shape)}"
        )
    if indices.dtype not in _INTEGERS:
        raise InputError(f"{where}page_indices must be int32 or int64, got {indices.dtype}")
    if indices.device.type != device.type:
        raise InputError(
            f"{where}page_indices are on {indices.device}, the batch on {device}; move them with "
            f".to({str(device)!r})"
        )
    if indices.shape[0] > INT32_MAX:
        raise InputError(f"{where}page_indices has more entries than 32 bits count")
    return indices


def _pages_in_use(indices: torch.Tensor, indptr: torch.Tensor) -> tuple[int, int] | None:
    """The least and the greatest page, where they are looked at; what nobody owns is not."""
    wanted = env.check_pages()
    if not (indices.device.type == "cpu" if wanted is None else wanted):
        return None
    # Through numpy, whose slices take a tenth of the time of torch's.
    end = max(0, int(indptr.numpy()[-1])) if indptr.shape[0] else 0
    if not end or not indices.shape[0]:
        return 0, -1
    if indices.is_cpu and indices.dtype == torch.int32 and not indices.is_neg():
        # One thread's vectors: torch would wake all of them, which takes longer than the reading.
        # Negative entries are the largest when read without their sign.
        values = indices.numpy()[:end]
        high = int(values.view(np.uint32).max())
        return (0, high) if high <= INT32_MAX else (int(values.min()), int(values.max()))
    used = indices[:end]
    least, greatest = torch.aminmax(used)
    return int(least), int(greatest)


def owner_of(entry: int, page_indptr: torch.Tensor) -> int:
    """The request (or group) that owns an entry of page_indices; for messages."""
    ends = page_indptr[1:].long()
    return int(torch.searchsorted(ends, entry, right=True))


def check_pages(
    pages: tuple[int, int] | None,
    page_indices: torch.Tensor | None,
    num_pages: int,
    page_indptrs: Sequence[torch.Tensor],
    where: str = "k and v; plan with the pages of this cache",
) -> None:
    """Raises InputError where the greatest page in use, if it is known, is none of a cache.

    page_indices: of the requests, then of each level of shared keys; page_indptrs: likewise. where:
    which tensors the pages are in, and the remedy.
    """
    if pages is None or pages[1] < num_pages or page_indices is None:
        return
    at = int((page_indices >= num_pages).nonzero()[0, 0])
    raise InputError(
        f"{_named_entry(at, int(page_indices[at]), page_indptrs)} is outside of "
        f"num_pages={num_pages} of {where}"
    )


def _named_entry(at: int, page: int, page_indptrs: Sequence[torch.Tensor]) -> str:
    """An entry of the page tables of requests and levels, which follow one another."""
    for level, indptr in enumerate(page_indptrs, -1):
        if at < int(indptr[-1]):
            where, owner = (f"level {level}: ", "group") if level >= 0 else ("", "request")
            return f"{where}page_indices[{at}]={page}, a page of {owner} {owner_of(at, indptr)},"
        at -= int(indptr[-1])
    return f"page_indices[{at}]={page}"


__all__ = ["Ragged", "Storage", "Stored", "check_pages", "read_storage"]
