"""Paged storage: the pages of a cache that hold the keys and values of each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_SIZE_RULE = "must be an int of at least 1 that fits 32 bits"


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """The pages that hold the keys of each request, in order, and how full the last page is.

    Key j of request b is slot ``j % page_size`` of page
    ``page_indices[page_indptr[b] + j // page_size]``. Its kv_len is
    ``(pages - 1) * page_size + last_page_len[b]``, 0 without pages.

    Args:
        page_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending from 0: request b owns
            page_indices[page_indptr[b] : page_indptr[b + 1]]. On the CPU because calls are planned
            on the host, without waiting for a device.
        page_indices: int32 tensor on the caches' device; int64 is converted at each call.
        last_page_len: int32 or int64 cpu tensor [num_requests], 1 to page_size; it may be 0 for a
            request without pages.
        page_size: slots of a page, at least 1.

    Calls raise InputError for values that are out of range. Page indices are checked if they are
    on the CPU. FLASHATTN_JIT_CHECK_PAGES=1 checks them on devices too, which waits for the device;
    0 checks them nowhere.

    Source: Kwon et al. 2023, arXiv 2309.06180; the layout is FlashInfer's (arXiv 2501.01005).

    Example:
        >>> paged = fa.Paged(page_indptr, page_indices, last_page_len, page_size=16)
        >>> fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged)
    """

    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int
