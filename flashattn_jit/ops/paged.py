"""Paged storage: keys and values in pages of a cache that requests own in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import env
from ..errors import InputError
from . import _check

PAGE_SIZE_RULE = "must be an int of at least 1 that fits 32 bits"


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Where the keys of each request lie: which pages, in their order, and how full the last is.

    Key j of request b is slot ``j % page_size`` of page
    ``page_indices[page_indptr[b] + j // page_size]``. Its kv_len is
    ``(pages - 1) * page_size + last_page_len[b]``, 0 without pages.

    Args:
        page_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending: request b owns
            page_indices[page_indptr[b] : page_indptr[b + 1]]. On the CPU because calls are planned
            on the host, which waits for no device.
        page_indices: int32 tensor on the caches' device; int64 is converted at each call.
        last_page_len: int32 or int64 cpu tensor [num_requests], 1 to page_size; 0 is taken where a
            request has no pages.
        page_size: slots of a page, any number from 1 on.

    Calls raise InputError for what is out of range. Page indices themselves are checked where they
    are on the CPU; FLASHATTN_JIT_CHECK_PAGES=1 checks them on devices too, which waits for the
    device, and 0 nowhere.

    Source: Kwon et al. 2023, arXiv 2309.06180; the layout is FlashInfer's (arXiv 2501.01005).

    Example:
        >>> paged = fa.Paged(page_indptr, page_indices, last_page_len, page_size=16)
        >>> fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged)
    """

    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """A checked `Paged` as a call plans with it; page_indices is contiguous int32."""

    page_indptr: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int
    num_pages: int
    page_indices: torch.Tensor


def read_pages(paged: Paged, k_pages: torch.Tensor, v_pages: torch.Tensor) -> PageTable:
    """Checks `paged` against caches [num_pages, page_size, num_kv_heads, head_dim].

    Raises:
        InputError: a tensor has a wrong shape, dtype or device, or an entry is out of range.
    """
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
    size = _check.check_int("page_size", paged.page_size, 1, rule=PAGE_SIZE_RULE)
    for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
        if cache.shape[1] != size:
            raise InputError(f"{name} has page_size={cache.shape[1]}, but paged {size}")
    if k_pages.shape[0] != v_pages.shape[0]:
        raise InputError(
            f"v_pages has num_pages={v_pages.shape[0]}, but k_pages has {k_pages.shape[0]}"
        )
    indices, num_pages = paged.page_indices, k_pages.shape[0]
    indptr = _page_indptr(paged.page_indptr)
    if not isinstance(indices, torch.Tensor):
        raise InputError(
            f"page_indices must be a tensor [number of pages in use], got {type(indices).__name__}"
        )
    _check.check_readable("page_indices", indices)
    if indices.dim() != 1:
        raise InputError(
            f"page_indices must be a tensor [number of pages in use], got {list(indices.shape)}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise InputError(f"page_indices must be int32 or int64, got {indices.dtype}")
    _check.check_devices({"k_pages": k_pages, "v_pages": v_pages, "page_indices": indices})
    if indptr[-1] > indices.shape[0]:
        raise InputError(
            f"page_indptr ends at {indptr[-1]}, but page_indices has {indices.shape[0]} entries"
        )
    lengths = _check.check_lengths("last_page_len", paged.last_page_len, len(indptr) - 1, 0, size)
    kv_len = []
    for b, (begin, end) in enumerate(itertools.pairwise(indptr)):
        pages = end - begin
        if pages and not lengths[b]:
            raise InputError(
                f"last_page_len[{b}]=0, but request {b} has {pages} pages; the last one holds 1 to "
                f"{size} keys"
            )
        if lengths[b] and not pages:
            raise InputError(f"last_page_len[{b}]={lengths[b]}, but request {b} has no pages")
        kv_len.append((pages - 1) * size + lengths[b] if pages else 0)
    if max(kv_len, default=0) > _check.INT32_MAX or num_pages > _check.INT32_MAX:
        raise InputError("a request's kv_len or num_pages does not fit 32 bits")
    _check_indices(indices, indptr, num_pages)
    indices = indices.to(torch.int32).resolve_neg().contiguous()
    return PageTable(indptr, tuple(kv_len), size, num_pages, indices)


def _page_indptr(indptr: object) -> tuple[int, ...]:
    indptr = _check.check_host_integers("page_indptr", indptr, "calls")
    if indptr.dim() != 1 or indptr.shape[0] < 1:
        raise InputError(f"page_indptr must be [num_requests + 1], got {tuple(indptr.shape)}")
    starts = tuple(indptr.tolist())
    if starts[0] < 0:
        raise InputError(f"page_indptr starts at {starts[0]}; it must not be negative")
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise InputError(f"page_indptr must not descend; request {b} has [{begin}, {end}]")
    return starts


def _check_indices(indices: torch.Tensor, indptr: Sequence[int], num_pages: int) -> None:
    wanted = env.check_pages()
    if not (indices.device.type == "cpu" if wanted is None else wanted):
        return
    used = indices[indptr[0] : indptr[-1]]
    wrong = (used < 0) | (used >= num_pages)
    if not bool(wrong.any()):
        return
    at = int(wrong.nonzero()[0, 0]) + indptr[0]
    request = next(b for b, end in enumerate(indptr[1:]) if at < end)
    raise InputError(
        f"page_indices[{at}]={int(indices[at])}, a page of request {request}, is outside of "
        f"num_pages={num_pages}"
    )
