"""Levels of a cascade, and their page tables in pages of the cache's size.

The smallest page_size of all levels in a cache is the cache's. Page p of a level whose pages are m
times as large is the m pages of the cache from p * m on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import _C
from ...errors import InputError
from ...formats import Formats, KvFormat
from ...torch_modes import is_capturing
from ..arguments.calls import host_array
from ..arguments.checks import check_int
from .paged import PAGE_SIZE_RULE, Paged
from .storage import ReadStorage, Storage, read_storage


@dataclass(frozen=True, slots=True, eq=False)
class CascadeLevel:
    """Keys of groups of requests, or in the last level the requests' own keys.

    Args:
        q_indptr: int32 or int64 cpu tensor [groups + 1]: group g has the entries q_indptr[g] to
            q_indptr[g + 1] of `tokens`. In the last level a group is a request.
        storage: the keys of each group, `fa.Ragged` or `fa.Paged`. Ragged k and v hold the keys of
            the outermost ragged level first, then those of the next one, the requests' own last,
            and each kv_indptr starts at 0. If some levels are ragged and others paged, runs take
            one (k, v) a level. Pages may be larger in some
            levels: the smallest page_size is that of k and v, and page p of a level whose page_size
            is m times that is pages p * m to p * m + m - 1 of k and v.
        tokens: int32 or int64 cpu tensor of packed query tokens, each at most once per level, those
            of a request contiguous; by default entry e is token e. None in the last level.
        kv_format: of the level's keys and values; that of the cascade by default. (None, None) for
            values as they are. Levels of another format are in k and v of their own, with a
            page_size of their own.

    The keys of a request are those of its groups, from the outermost level on, then its own. All
    tokens of a group must have the same number of keys in the levels before it.
    """

    q_indptr: torch.Tensor
    storage: Storage
    tokens: torch.Tensor | None = None
    kv_format: KvFormat | None = None


def in_cache_pages(
    storages: Sequence[Storage], formats: Sequence[Formats], device: torch.device
) -> Sequence[Storage]:
    """The storages of all levels, the requests' own last, with the paged ones of each format, which
    are in one cache, in pages of one size.

    Returns `storages` unchanged if page sizes are equal. Raises InputError if a page size is no
    multiple of the smallest, or the pages of its level are wrong.
    """
    levels = [*range(len(storages) - 1), None]
    sizes: dict[Formats, list[int]] = {}
    for level, s, own in zip(levels, storages, formats, strict=True):
        if isinstance(s, Paged):
            size = check_int(f"{_where(level)}page_size", s.page_size, 1, rule=PAGE_SIZE_RULE)
            sizes.setdefault(own, []).append(size)
    if all(min(s) == max(s) for s in sizes.values()) or is_capturing(device):
        return storages
    return [
        _divided(s, i, min(sizes[own]), device) if isinstance(s, Paged) else s
        for i, s, own in zip(levels, storages, formats, strict=True)
    ]


def _where(level: int | None) -> str:
    return "" if level is None else f"level {level}: "


def _divided(paged: Paged, level: int | None, size: int, device: torch.device) -> Paged:
    """Pages of a level (None: of the requests) as pages of `size` keys."""
    where = _where(level)
    factor, rest = divmod(paged.page_size, size)
    if rest:
        raise InputError(
            f"{where}page_size={paged.page_size} is no multiple of {size}, the smallest page_size "
            "of all levels of one format, in which the cache is kept"
        )
    if factor == 1:
        return paged
    stored = read_storage(paged, device, where)
    _check_lengths(stored, level)
    assert stored.page_indices is not None
    starts, last = (np.asarray(t.numpy(), np.int64) for t in stored.held)
    counts = np.diff(starts)
    pages = np.where(counts, (counts - 1) * factor + -(-last // size), 0)
    ends = np.cumsum(pages)
    inside = np.arange(pages.sum()) - np.repeat(ends - pages, pages)
    entry = _on(torch.from_numpy(np.repeat(starts[:-1], pages) + inside // factor), device)
    part = _on(torch.from_numpy(inside % factor), device)
    return replace(
        paged,
        page_indptr=torch.from_numpy(np.append(0, ends)),
        page_indices=stored.page_indices[entry].long() * factor + part,
        last_page_len=torch.from_numpy(np.where(counts, (last - 1) % size + 1, 0)),
        page_size=size,
    )


def _check_lengths(stored: ReadStorage, level: int | None) -> None:
    """Raises InputError for wrong lengths, which `_C.BatchLengths` checks, without queries."""
    empty = [torch.zeros(n, dtype=torch.int64, device="cpu") for n in (0, 1, len(stored.held[0]))]
    none, zero, rows = (host_array("zeros", t)[0] for t in empty)
    nothing = (None, zero, none, stored.page_size, 0)
    try:
        if level is None:
            _C.BatchLengths(rows, stored.native, None, ())
        else:
            before = ((zero, None, nothing),) * level
            _C.BatchLengths(zero, nothing, None, (*before, (rows, None, stored.native)))
    except ValueError as error:
        raise InputError(str(error)) from None


def _on(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor copied to the device without waiting for it."""
    if device.type == "cpu":
        return index
    return index.pin_memory().to(device, non_blocking=True)
