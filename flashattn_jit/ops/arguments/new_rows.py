"""Checks of new keys and values that are to be written into pages."""

from __future__ import annotations

import itertools

import torch

from ...errors import InputError
from ...variants.ir.dtypes import row_dim
from . import checks


def check_new_rows(name: str, new: torch.Tensor, cache: torch.Tensor, codes: bool = False) -> None:
    """Raises InputError unless rows [tokens, heads, dim] fit pages [pages, slots, heads, dim].

    codes: whether the pages have codes of the rows.
    """
    for label, tensor, rank in ((name, new, 3), (f"{name}_pages", cache, 4)):
        checks.check_readable(label, tensor)
        if tensor.dim() != rank:
            layout = "[num_tokens, num_kv_heads, head_dim]"
            if rank == 4:
                layout = "[num_pages, page_size, num_kv_heads, head_dim]"
            raise InputError(f"{label} must be {layout}, got {list(tensor.shape)}")
        check_place(label, tensor)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
            raise InputError(
                f"{label}'s last dim must be contiguous, its stride is {tensor.stride(-1)}"
            )
        checks.check_not_lazy(label, tensor)
    if new.dtype != cache.dtype and not codes:
        raise InputError(
            f"{name} has dtype {new.dtype}, but {name}_pages {cache.dtype}; convert it first"
        )
    if (new.shape[1], row_dim(new)) != (cache.shape[2], row_dim(cache)):
        raise InputError(
            f"{name} has num_kv_heads={new.shape[1]} and rows of {row_dim(new)}, but {name}_pages "
            f"has {cache.shape[2]} and {row_dim(cache)}"
        )
    if is_expanded(cache):
        raise InputError(f"{name}_pages is an expanded tensor: several entries share one address")


def check_place(name: str, tensor: torch.Tensor) -> None:
    """Raises InputError for a tensor on a device that no pages are on."""
    if tensor.device.type not in ("cpu", "cuda"):
        without = ", so it has no values" if tensor.is_meta else ""
        raise InputError(f"{name} is on {tensor.device}{without}; pages are on cpu or cuda tensors")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several entries share one address."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def check_memory(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *beside: torch.Tensor,
) -> None:
    """Raises InputError where rows would be read from or written to the memory of others.

    beside: scales and zero points of k and v.
    """
    starts = {t.data_ptr() for t in beside if t.numel()}
    if len(starts) < sum(bool(t.numel()) for t in beside):
        raise InputError(
            "scales and zeros of k and v start at the same entry: they would be overwritten"
        )
    if k_pages.numel() and k_pages.data_ptr() == v_pages.data_ptr():
        raise InputError("k_pages and v_pages start at the same entry: keys would be overwritten")
    written = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
        for t in (k_pages, v_pages, *beside)
        if t.numel() and t.is_contiguous()
    )
    if any(begin < end for (_, end), (begin, _) in itertools.pairwise(written)):
        raise InputError(
            "k_pages, v_pages and their scales and zeros share memory: they would be overwritten"
        )
    for name, new in (("k", k), ("v", v)):
        for label, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
            if _overlap(new, cache):
                raise InputError(f"{name} lies in the memory of {label}; pass {name}.clone()")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the ranges of addresses from the first to the last entry have a byte in common."""
    first, second = a.data_ptr(), b.data_ptr()
    apart = second >= first + checks.extent(a) or first >= second + checks.extent(b)
    return not apart and bool(a.numel()) and bool(b.numel())


def used_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides with those of dims of one entry, which may be any number, as 0, the last as 1."""
    strides = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return (*strides[:-1], 1)


def bytes_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A view of checked rows or pages as uint8."""
    if 1 in tensor.shape:
        tensor = tensor.as_strided(tensor.shape, used_strides(tensor))
    return tensor.view(torch.uint8)
