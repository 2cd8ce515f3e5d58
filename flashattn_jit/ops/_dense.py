"""The ops by handle: dense and packed calls through torch's dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..errors import InputError
from ..variants.binding import Bound
from . import _handles
from ._call import dense_form, dense_requests, packed_form, packed_requests
from ._launch import attend, filled


def _bound(handle: int, tensors: Sequence[torch.Tensor], scalars: torch.Tensor) -> Bound:
    known = _handles.structure(handle)
    values = scalars.tolist()
    if len(values) != len(known.integer_scalars):
        raise InputError(
            f"the variant reads {len(known.integer_scalars)} scalars, got {len(values)}"
        )
    numbers = [
        int(x) if whole else x for whole, x in zip(known.integer_scalars, values, strict=True)
    ]
    return Bound(known.ir, handle, tuple(tensors), tuple(numbers), ())


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_offset: int,
    q_offsets: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    block_states: torch.Tensor | None,
    block_size: Sequence[int],
    return_lse: bool,
    partial: bool,
    target: str,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of a structure."""
    form = dense_form(q, k, v)
    requests = dense_requests(form, kv_len, q_offset if q_offsets is None else q_offsets)
    result, lse = attend(
        form, requests, _bound(handle, tensors, scalars), "variant", q, k, v, scale=scale,
        target=target, return_lse=return_lse, partial=partial, out=out, block_states=block_states,
        block_size=block_size,
    )  # fmt: skip
    return result, filled(lse, result)


def dense_out(*arguments: Any) -> None:
    """The same into `out` and, where it is given, `lse`."""
    *rest, partial, target, out, lse = arguments
    found = cast(Any, dense)(*rest, lse is not None, partial, target, out)[1]
    if isinstance(lse, torch.Tensor):
        lse.copy_(found)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    q_offsets: torch.Tensor,
    return_lse: bool,
    partial: bool,
    target: str,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed attention of a structure."""
    form = packed_form(q, k, v)
    requests = packed_requests(form, q_indptr, kv_indptr, q_offsets)
    result, lse = attend(
        form, requests, _bound(handle, tensors, scalars), "variant", q, k, v, scale=scale,
        target=target, return_lse=return_lse, partial=partial, out=out,
    )  # fmt: skip
    return result, filled(lse, result)


def packed_out(*arguments: Any) -> None:
    """The same into `out` and, where it is given, `lse`."""
    *rest, partial, target, out, lse = arguments
    found = cast(Any, packed)(*rest, lse is not None, partial, target, out)[1]
    if isinstance(lse, torch.Tensor):
        lse.copy_(found)
