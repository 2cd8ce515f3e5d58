"""`fa.append_paged_kv`: new keys and values into their pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import _C
from ..codegen.spec import UtilitySpec, on_cpu, utility_target
from ..codegen.targets import compiled_target
from ..errors import InputError
from ..torch_modes import is_direct
from .arguments import checks
from .arguments.calls import host_array
from .device.cuda import LaunchTensors
from .keys.paged import PAGE_SIZE_RULE, Paged
from .keys.storage import Stored, check_pages, read_storage
from .launching.utility import UtilityWork, addresses, layouts, run_utility
from .torch_ops import as_op

_ITEM_TOKENS = 16
_UNIT_BYTES = 16


def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: Paged,
    *,
    target: str | None = None,
) -> None:
    """Write the newest keys and values of each request to the ends of their pages.

    `paged` describes the requests after the append: the q_len new tokens of a request become its
    keys kv_len - q_len to kv_len - 1, the positions of `q_offset="end"`.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], of k_pages' dtype; any dtype.
        v: [num_tokens, num_kv_heads, head_dim_v], of v_pages' dtype.
        k_pages: [num_pages, page_size, num_kv_heads, head_dim], written to. Any strides with a
            contiguous last dim, so that another layout is a transposed view.
        v_pages: [num_pages, page_size, num_kv_heads, head_dim_v], written to.
        q_indptr: int32 or int64 cpu tensor [num_requests + 1]: request b has the new tokens
            q_indptr[b] to q_indptr[b + 1].
        paged: the pages of each request; see `Paged`.
        target: a CUDA target on CUDA tensors, or one such as ``"emulated:sm_80"`` on CPU tensors;
            the device's own by default.

    Raises:
        InputError: a shape, dtype, device or value is wrong, or a request has more new tokens than
            its pages hold. Nothing was written then.
        GradError: a tensor requires grad while grad mode is on.
        TargetError: `target` is unknown, or does not run on that device.
        LaunchError: CUDA refused the launch.

    If two tokens go to one slot, as when requests share a page, either of them is stored.

    Example:
        >>> fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged)
    """
    given = (k, v, k_pages, v_pages)
    if torch.compiler.is_dynamo_compiling() or not is_direct(*given):
        as_op.append(run_append, *given, q_indptr, paged, target)
    else:
        run_append(*given, q_indptr, paged, target)


def run_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: Paged,
    target: str | None,
) -> None:
    """`append_paged_kv` outside of the tracer."""
    for name, new, cache in (("k", k, k_pages), ("v", v, v_pages)):
        _check_pair(name, new, cache)
    if k.shape[:2] != v.shape[:2]:
        raise InputError(
            f"v has num_tokens={v.shape[0]} and num_kv_heads={v.shape[1]}, but k has "
            f"num_tokens={k.shape[0]} and num_kv_heads={k.shape[1]}"
        )
    tensors = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
    checks.check_devices(tensors)
    checks.check_grad(tuple(tensors.values()))
    if k_pages.numel() and k_pages.data_ptr() == v_pages.data_ptr():
        raise InputError("k_pages and v_pages start at the same entry: keys would be overwritten")
    for name, new in (("k", k), ("v", v)):
        for label, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
            if new.numel() and new.untyped_storage()._cdata == cache.untyped_storage()._cdata:
                raise InputError(f"{name} lies in the memory of {label}; pass {name}.clone()")
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
    size = checks.check_int("page_size", paged.page_size, 1, rule=PAGE_SIZE_RULE)
    for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
        if cache.shape[1] != size:
            raise InputError(f"{name} has page_size={cache.shape[1]}, but paged {size}")
    num_pages = k_pages.shape[0]
    if num_pages != v_pages.shape[0]:
        raise InputError(f"v_pages has num_pages={v_pages.shape[0]}, but k_pages has {num_pages}")
    if num_pages > checks.INT32_MAX:
        raise InputError(f"num_pages={num_pages} does not fit 32 bits")
    rows, held_rows = host_array("q_indptr", q_indptr)
    stored = read_storage(paged, k.device)
    check_pages(
        stored.pages, stored.page_indices, num_pages, stored.held[:1], "k_pages and v_pages"
    )
    try:
        lengths = _C.BatchLengths(rows, stored.native)
    except ValueError as error:
        raise InputError(str(error)) from None
    if lengths.num_q_tokens != k.shape[0]:
        raise InputError(
            f"q_indptr must run from 0 to the number of tokens ({k.shape[0]}), it ends at "
            f"{lengths.num_q_tokens}"
        )
    for b, (new_len, kv_len) in enumerate(zip(lengths.q_len, lengths.kv_len, strict=True)):
        if new_len > kv_len:
            raise InputError(
                f"request {b} has {new_len} new tokens, but paged gives it kv_len={kv_len}, which "
                "counts them: append its pages and last_page_len first"
            )
    target = utility_target(k, target)
    if k.shape[0] == 0:
        return
    if on_cpu(target):
        _on_cpu(k, v, k_pages, v_pages, lengths, stored)
    else:
        _on_device(k, v, k_pages, v_pages, lengths, stored, held_rows, target)


def _check_pair(name: str, new: torch.Tensor, cache: torch.Tensor) -> None:
    for label, tensor, rank in ((name, new, 3), (f"{name}_pages", cache, 4)):
        checks.check_readable(label, tensor)
        if tensor.dim() != rank:
            layout = "[num_tokens, num_kv_heads, head_dim]"
            if rank == 4:
                layout = "[num_pages, page_size, num_kv_heads, head_dim]"
            raise InputError(f"{label} must be {layout}, got {list(tensor.shape)}")
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(f"{label} is on {tensor.device}; pages are on cpu or cuda tensors")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
            raise InputError(
                f"{label}'s last dim must be contiguous, its stride is {tensor.stride(-1)}"
            )
        checks.check_not_lazy(label, tensor)
    if new.dtype != cache.dtype:
        raise InputError(
            f"{name} has dtype {new.dtype}, but {name}_pages {cache.dtype}; convert it first"
        )
    if new.shape[1:] != cache.shape[2:]:
        raise InputError(
            f"{name} has num_kv_heads={new.shape[1]} and rows of {new.shape[2]}, but {name}_pages "
            f"has {cache.shape[2]} and {cache.shape[3]}"
        )
    if any(n > 1 and s == 0 for n, s in zip(cache.shape, cache.stride(), strict=True)):
        raise InputError(f"{name}_pages is an expanded tensor: several entries share one address")


def _on_cpu(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: _C.BatchLengths,
    stored: Stored,
) -> None:
    if torch.get_num_threads() > 1:
        _C.refuse_stranded()  # torch writes the pages on several threads
    assert stored.page_indices is not None
    new = np.asarray(lengths.q_len, np.int64)
    starts = np.cumsum(new) - new
    request = np.repeat(np.arange(len(new)), new)
    first = np.asarray(lengths.kv_len, np.int64) - new - starts
    key = np.arange(k.shape[0]) + first[request]
    entry = stored.held[0].numpy().astype(np.int64)[request] + key // stored.page_size
    page = stored.page_indices[torch.from_numpy(entry)].long()
    slot = torch.from_numpy(key % stored.page_size)
    k_pages[page, slot] = k
    v_pages[page, slot] = v


def _on_device(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: _C.BatchLengths,
    stored: Stored,
    q_indptr: torch.Tensor,
    target: str,
) -> None:
    assert stored.page_indices is not None
    views = [t.view(torch.uint8) for t in (k, v, k_pages, v_pages)]
    shapes, unit_bytes, num_pages = layouts(views), _unit_bytes(views), k_pages.shape[0]

    def work() -> UtilityWork:
        return UtilityWork(
            UtilitySpec("append_paged_kv", compiled_target(target), unit_bytes),
            lengths,
            _items(lengths.q_len, lengths.kv_len),
            shapes,
            num_pages=num_pages,
        )

    content = tuple((t.dtype, t.numpy().tobytes()) for t in (q_indptr, *stored.held))
    tensors = LaunchTensors(
        views[0], views[2], views[3], views[2], None, views, addresses(views),
        page_indices=stored.page_indices,
        allocations=[
            ("k", views[0], False),
            ("v", views[1], False),
            ("k_pages", views[2], True),
            ("v_pages", views[3], True),
            ("page_indices", stored.page_indices, False),
        ],
    )  # fmt: skip
    signature = ("append_paged_kv", shapes, unit_bytes, num_pages, stored.page_size, content)
    run_utility(signature, target, k.device, work, tensors)


def _items(q_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Work items of up to 16 new tokens, with the key positions that they get."""
    items = []
    for b, (new_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = kv_len - new_len
        for row in range(0, new_len, _ITEM_TOKENS):
            end = min(new_len, row + _ITEM_TOKENS)
            items.append((b, 0, 1, row, end, first + row, first + end, -1))
    return torch.tensor(items, dtype=torch.int32, device="cpu")


def _unit_bytes(views: Sequence[torch.Tensor]) -> int:
    """The largest unit, up to 16 bytes, that divides all addresses, strides and row lengths."""
    bits = _UNIT_BYTES
    for view in views:
        bits |= view.data_ptr() | view.shape[-1]
        for size, stride in zip(view.shape[:-1], view.stride(), strict=False):
            bits |= stride if size > 1 else 0
    return bits & -bits
