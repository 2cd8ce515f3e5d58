"""Levels of a cascade whose pages have sizes of their own, as pages of the one cache.

The smallest pages are the cache's. Page p of a level whose pages are m times as large is the m
pages of the cache from p * m on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ... import _C
from ...errors import InputError
from ...torch_modes import is_capturing
from ..arguments.calls import host_array
from ..arguments.checks import check_int
from .paged import PAGE_SIZE_RULE, Paged
from .storage import Storage, Stored, read_storage


def in_cache_pages(storages: Sequence[Storage], device: torch.device) -> Sequence[Storage]:
    """The storages of all levels, the requests' own last, in pages of one size.

    Those that already are, and what is no storage of pages, are left as they are.

    Raises:
        InputError: a page size is no multiple of the smallest, or such a level's pages are wrong.
    """
    if not all(isinstance(s, Paged) for s in storages):
        return storages
    last = len(storages) - 1
    sizes = [
        check_int(
            f"level {i}: page_size" if i < last else "page_size",
            s.page_size,
            1,
            rule=PAGE_SIZE_RULE,
        )
        for i, s in enumerate(storages)
        if isinstance(s, Paged)
    ]
    least, largest = min(sizes), max(sizes)
    if least == largest or is_capturing(device):
        return storages
    return [
        _divided(s, i if i + 1 < len(storages) else None, least, device)
        for i, s in enumerate(storages)
        if isinstance(s, Paged)
    ]


def _divided(paged: Paged, level: int | None, size: int, device: torch.device) -> Paged:
    """Pages of a level (None: of the requests) as pages of `size` keys."""
    where = "" if level is None else f"level {level}: "
    factor, rest = divmod(paged.page_size, size)
    if rest:
        raise InputError(
            f"{where}page_size={paged.page_size} is no multiple of {size}, the smallest page_size "
            "of all levels, in which the cache is kept"
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


def _check_lengths(stored: Stored, level: int | None) -> None:
    """As all lengths are checked, by planning them without queries."""
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
    """A host tensor on the device, which is not waited for."""
    if device.type == "cpu":
        return index
    return index.pin_memory().to(device, non_blocking=True)


__all__ = ["in_cache_pages"]
