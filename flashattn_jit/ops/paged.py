"""Paged storage: keys and values in pages of a cache that requests own in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import _C, env
from ..errors import InputError, TargetError
from ..variants.binding import bind
from ..variants.params import Dims
from ..variants.spec import Variant, as_variant
from . import _check, _device, _handles
from ._dense import bind_tensors, result_dtype, scalar_values
from ._launch import Geometry
from ._placement import on_cpu, place
from ._scalars import pack_scalars
from .attention import Offset
from .varlen import request_lengths, resolve_offsets

_PAGES = "[num_pages, page_size, num_kv_heads, {}]"


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
    size = paged.page_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"page_size={size!r} must be an int of at least 1")
    for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
        if cache.shape[1] != size:
            raise InputError(f"{name} has page_size={cache.shape[1]}, but paged {size}")
    if k_pages.shape[0] != v_pages.shape[0]:
        raise InputError(
            f"v_pages has num_pages={v_pages.shape[0]}, but k_pages has {k_pages.shape[0]}"
        )
    indices, num_pages = paged.page_indices, k_pages.shape[0]
    indptr = _page_indptr(paged.page_indptr)
    if not isinstance(indices, torch.Tensor) or indices.dim() != 1:
        raise InputError("page_indices must be a tensor [number of pages in use]")
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
    indices = indices.to(torch.int32).contiguous()
    return PageTable(indptr, tuple(kv_len), size, num_pages, indices)


def _page_indptr(indptr: object) -> tuple[int, ...]:
    if not isinstance(indptr, torch.Tensor):
        raise InputError(f"page_indptr must be an integer tensor, got {type(indptr).__name__}")
    if indptr.dtype not in (torch.int32, torch.int64) or indptr.device.type != "cpu":
        raise InputError(
            f"page_indptr must be an int32 or int64 cpu tensor, got {indptr.dtype} on "
            f"{indptr.device}; calls are planned on the host, which waits for no device"
        )
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


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: Paged,
    variant: Variant | Callable[..., object] | None = None,
    *,
    scale: float | None = None,
    q_offset: Offset = "end",
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    target: str | None = None,
    **params: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of packed queries over paged keys, on CUDA tensors or an emulated target.

    Hooks see logical positions, wherever a page lies; `fa.kv_slot` gives the physical slot,
    ``page * page_size + slot``.

    Args:
        q: [num_q_tokens, num_q_heads, head_dim].
        k_pages: [num_pages, page_size, num_kv_heads, head_dim]; any strides with a contiguous last
            dim, so that another layout is a transposed view. v_pages: likewise.
        q_indptr, variant, scale, q_offset, return_lse, partial, out, target, params: as for
            `varlen_attention`. lse is None unless asked for.

    Raises:
        InputError, ParamError, TraceError, CompileError, GradError: as for `varlen_attention`.
        TargetError: the tensors are on the CPU and no emulated target is named.
        LaunchError: CUDA refused the launch.
    """
    _check.check_tensors(
        q, k_pages, v_pages,
        ("[num_q_tokens, num_q_heads, head_dim]", _PAGES.format("head_dim"),
         _PAGES.format("head_dim_v")),
    )  # fmt: skip
    _check.check_heads(q.shape[1], k_pages.shape[2], v_pages.shape[2])
    _check.check_head_dims(q.shape[2], k_pages.shape[3], v_pages.shape[3])
    target = place(q, k_pages, v_pages, target)
    if on_cpu(target):
        raise TargetError(
            "attention over pages runs on CUDA tensors; on CPU tensors name an emulated target, "
            'such as target="emulated:sm_80"'
        )
    table = read_pages(paged, k_pages, v_pages)
    q_lens = request_lengths("q_indptr", q_indptr, q.shape[0], None, "max_q_len")
    if len(q_lens) != len(table.kv_len):
        raise InputError(
            f"paged has num_requests={len(table.kv_len)}, but q_indptr has "
            f"num_requests={len(q_lens)}"
        )
    dims = Dims(
        len(q_lens), q.shape[1], k_pages.shape[2], max(q_lens, default=0),
        max(table.kv_len, default=0), q.shape[2], v_pages.shape[3], q.device,
    )  # fmt: skip
    chosen = as_variant(variant)
    bound = bind(chosen, dims, params)
    _check.check_grad((q, k_pages, v_pages, *bound.tensors))
    pointwise = bound.ir.normalizer == "pointwise"
    if return_lse and pointwise:
        raise InputError(
            "return_lse: a pointwise normaliser has no log-sum-exp; only softmax variants do"
        )
    with_lse = return_lse or (partial and not pointwise)
    scale = _check.check_scale(scale, q.shape[2])
    offsets = tuple(resolve_offsets(q_offset, q_lens, table.kv_len).tolist())
    known = _handles.structure(_handles.remember(bound.handle, bound.ir, chosen.name))
    shape, dtype = (*q.shape[:2], v_pages.shape[3]), result_dtype(q, partial)
    addresses, layouts, tensors = bind_tensors(known, bound.tensors)
    if out is None:
        out = q.new_empty(shape, dtype=dtype)
    else:
        _check.check_out(out, shape, dtype, (q, k_pages, v_pages, *bound.tensors))
    lse = q.new_empty(shape[:2], dtype=torch.float32) if with_lse else None
    values = scalar_values(known, pack_scalars(bound.scalars))
    q_row0 = tuple(itertools.accumulate(q_lens, initial=0))[:-1]
    geometry = Geometry(
        handle=bound.handle,
        dtypes=(q.dtype, k_pages.dtype, v_pages.dtype),
        num_q_heads=q.shape[1],
        num_kv_heads=k_pages.shape[2],
        head_dim=q.shape[2],
        head_dim_v=v_pages.shape[3],
        q_len=q_lens,
        kv_len=table.kv_len,
        q_offset=offsets,
        num_requests=len(q_lens),
        q_row0=q_row0,
        kv_row0=0,
        q_token0=q_row0,
        kv_token0=0,
        strides=(
            (0, q.stride(1), q.stride(0)),
            (k_pages.stride(0), k_pages.stride(2), k_pages.stride(1)),
            (v_pages.stride(0), v_pages.stride(2), v_pages.stride(1)),
            (0, out.stride(1), out.stride(0)),
            (0, 0, 0) if lse is None else (0, lse.stride(1), lse.stride(0)),
        ),
        params=layouts,
        flags=(0 if lse is None else _C.WRITE_LSE) | (_C.PARTIAL if partial else 0),
        num_threads=0,
        target=target,
        block_mask=None,
        scalars=values if known.schedule_reads_scalars else None,
        pages=(table.page_indptr, table.page_size, table.num_pages),
    )
    _device.run(
        geometry,
        known,
        _device.CallTensors(
            q, k_pages, v_pages, out, lse, tensors, addresses, values,
            page_indices=table.page_indices,
        ),
        scale,
    )  # fmt: skip
    return out, lse
