"""Storage of a batch's keys: `fa.Ragged` and `fa.Paged`, read for the planner.

Lengths are not copied: the planner reads host arrays through their addresses, so that no entry
becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import _C, env
from ...errors import InputError
from ...torch_modes import need_values, refuse_transforms
from ..arguments.calls import Array, host_array
from ..arguments.checks import INT32_MAX, INTEGERS, check_int, check_readable, no_tensor
from .paged import PAGE_SIZE_RULE, Paged

NativeStorage = tuple[Array | None, Array | None, Array | None, int, int, bool]
"""kv_indptr; page_indptr, last_page_len; page_size (0: ragged); page indices; whether the keys are
elsewhere, see `ReadStorage.elsewhere`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Keys laid end to end: request b has rows kv_indptr[b] to kv_indptr[b + 1] of k and v.

    Args:
        kv_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending from 0 to the number of
            rows of k and v, which are [num_kv_tokens, num_kv_heads, head_dim]. On the CPU because
            batches are planned on the host, without waiting for a device.

    `plan()` raises InputError for values that are out of range.

    Example:
        >>> batch.plan(q_indptr, fa.Ragged(kv_indptr))
    """

    kv_indptr: torch.Tensor


Storage = Ragged | Paged


class ReadStorage(NamedTuple):
    """A storage as the planner reads it.

    page_indices: contiguous int32 on the device of the keys. pages: (0 or a negative entry, the
    largest entry) of the entries in use, (0, -1) if there are none, None if they were not read.
    held: tensors whose addresses are in `native`.
    """

    native: NativeStorage
    page_size: int
    page_indices: torch.Tensor | None
    pages: tuple[int, int] | None
    held: tuple[torch.Tensor, ...]

    def elsewhere(self) -> ReadStorage:
        """The storage for a plan that counts these keys in lengths and positions alone."""
        none = torch.zeros(1, dtype=torch.int32, device="cpu")
        return ReadStorage((*self.native[:5], True), 0, None, None, (none, *self.held))

    @property
    def is_elsewhere(self) -> bool:
        """Whether another plan visits the keys."""
        return self.native[5]

    @property
    def used_pages(self) -> int:
        """Entries of page_indices that belong to a request or group."""
        return int(self.held[0][-1]) if self.page_size and len(self.held[0]) else 0


def read_storage(storage: Storage, device: torch.device, where: str = "") -> ReadStorage:
    """The storage with dtypes, devices and shapes checked; the planner checks lengths.

    where: the level of shared keys, a prefix of tensor names in messages. Raises InputError.
    """
    if isinstance(storage, Ragged):
        array, tensor = host_array(f"{where}kv_indptr", storage.kv_indptr)
        return ReadStorage((array, None, None, 0, 0, False), 0, None, None, (tensor,))
    if not isinstance(storage, Paged):
        raise InputError(
            f"{where}storage must be an fa.Paged or an fa.Ragged, got {type(storage).__name__}"
        )
    size = check_int(f"{where}page_size", storage.page_size, 1, rule=PAGE_SIZE_RULE)
    indptr, held_indptr = host_array(f"{where}page_indptr", storage.page_indptr)
    last, held_last = host_array(f"{where}last_page_len", storage.last_page_len)
    name = f"{where}page_indices"
    need_values(name, "batches are planned from them", (storage.page_indices,))
    given = read_indices(name, storage.page_indices, device, " [number of pages in use]")
    if given.dim() != 1:
        raise InputError(
            f"{name} must be a tensor [number of pages in use], got {list(given.shape)}"
        )
    pages = None
    if checks_values(given):
        values = (given if given.is_cpu else given.cpu()).contiguous()
        entries = (values.data_ptr(), values.numel(), values.element_size())
        pages = _C.page_range(entries, indptr)
    if pages is not None and (pages[0] < 0 or pages[1] > INT32_MAX):
        negative = pages[0] < 0
        at = int((given < 0 if negative else given > INT32_MAX).nonzero()[0, 0])
        raise InputError(
            f"{name}[{at}]={int(given[at])}, a page of "
            f"{'group' if where else 'request'} {owner_of(at, held_indptr)}, "
            f"{'is negative' if negative else 'does not fit 32 bits'}"
        )
    indices = (given if given.dtype is torch.int32 else given.to(torch.int32)).contiguous()
    native = (None, indptr, last, size, indices.numel(), False)
    return ReadStorage(native, size, indices, pages, (held_indptr, held_last))


def read_indices(name: str, indices: object, device: torch.device, shape: str = "") -> torch.Tensor:
    """Indices as an int32 or int64 tensor on the keys' device. Raises InputError.

    shape: what it must be, for the message.
    """
    if not isinstance(indices, torch.Tensor) or indices.dtype not in INTEGERS:
        got = indices.dtype if isinstance(indices, torch.Tensor) else no_tensor(name, indices)
        raise InputError(f"{name} must be an int32 or int64 tensor{shape}, got {got}")
    check_readable(name, indices)
    refuse_transforms(indices)
    if indices.device != device and indices.device.type != device.type:
        raise InputError(
            f"{name} are on {indices.device}, the batch on {device}; move them with "
            f".to({str(device)!r})"
        )
    if indices.numel() > INT32_MAX:
        raise InputError(f"{name} has more entries than 32 bits count")
    return indices.resolve_neg() if indices.is_neg() else indices


def checks_values(indices: torch.Tensor) -> bool:
    """Whether the values of indices are checked: on the CPU, unless the environment says."""
    wanted = env.check_pages()
    return indices.is_cpu if wanted is None else wanted


def owner_of(entry: int, page_indptr: torch.Tensor) -> int:
    """The request (or group) that owns an entry of page_indices, for messages."""
    ends = page_indptr[1:].long()
    return int(torch.searchsorted(ends, entry, right=True))


def check_pages(
    pages: tuple[int, int] | None,
    page_indices: torch.Tensor | None,
    num_pages: int,
    page_indptrs: Sequence[torch.Tensor],
    where: str = "k and v; plan with the pages of this cache",
) -> None:
    """Raises InputError if the largest page in use is known and is not below `num_pages`.

    page_indices: those of the requests, then of each level of shared keys; page_indptrs: likewise.
    where: the tensors that hold the pages, and a remedy, for the message.
    """
    if pages is None or pages[1] < num_pages or page_indices is None:
        return
    at = int((page_indices >= num_pages).nonzero()[0, 0])
    raise InputError(
        f"{_named_entry(at, int(page_indices[at]), page_indptrs)} is outside of "
        f"num_pages={num_pages} of {where}"
    )


def _named_entry(at: int, page: int, page_indptrs: Sequence[torch.Tensor]) -> str:
    """An entry of the concatenated page tables of requests and levels, in words."""
    for level, indptr in enumerate(page_indptrs, -1):
        if at < int(indptr[-1]):
            where, owner = (f"level {level}: ", "group") if level >= 0 else ("", "request")
            return f"{where}page_indices[{at}]={page}, a page of {owner} {owner_of(at, indptr)},"
        at -= int(indptr[-1])
    return f"page_indices[{at}]={page}"
