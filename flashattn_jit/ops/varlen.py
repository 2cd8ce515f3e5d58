"""`fa.varlen_attention`: attention over requests of different lengths, packed end to end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from ..errors import InputError
from ..formats import Stored
from ..stored_hooks import unwrap
from ..torch_modes import is_direct, is_plain, outside_modes
from ..variants.binding import Swap
from ..variants.variant import Variant, as_variant
from .arguments import checks
from .arguments.by_name import needs_arguments
from .arguments.calls import Offset, packed_form, packed_requests
from .launching.launches import attend
from .torch_ops import as_op


@needs_arguments("varlen_attention()")
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor | Stored,
    v: torch.Tensor | Stored,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    variant: Variant | Callable[..., object] | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale: checks.Scale | None = None,
    q_offset: Offset = "end",
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    target: str | None = None,
    **params: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of `variant` over packed requests; request i has rows indptr[i] to indptr[i + 1].

    Args:
        q: [num_q_tokens, num_q_heads, head_dim]; dtypes and strides as for `attention`.
        k: [num_kv_tokens, num_kv_heads, head_dim], or an `fa.kv.Stored` of that layout.
        v: [num_kv_tokens, num_kv_heads, head_dim_v].
        q_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending from 0 to num_q_tokens.
        kv_indptr: likewise for keys.
        variant: as for `attention`.
        max_q_len: if given, checked to be at least the longest request's q_len.
        max_kv_len: likewise for kv_len.
        scale, return_lse, partial, out, lse, target, params: as for `attention`.
        q_offset: ``q_idx = q_offset + row``: ``"end"`` (kv_len - q_len, the default), an int or an
            int tensor [num_requests].

    Returns:
        out [num_q_tokens, num_q_heads, head_dim_v], or (out, lse [num_q_tokens, num_q_heads]).

    Raises:
        InputError, ParamError, TraceError, CompileError, GradError: as for `attention`; InputError
            names the request whose indptr is wrong.

    Example:
        >>> out = fa.varlen_attention(q, k, v, q_indptr, kv_indptr, fa.Causal())
    """
    if isinstance(k, Stored) or isinstance(v, Stored):
        k, v, variant = unwrap(k, v, as_variant(variant), params, False, partial)
    given = (q, k, v) if out is None else (q, k, v, out)
    if lse is not None:
        given = (*given, lse)
    direct = not torch.compiler.is_dynamo_compiling() and is_direct(*given)
    direct = direct and type(q_indptr) is torch.Tensor and type(kv_indptr) is torch.Tensor
    if not (direct and is_plain(scale)):
        arguments = {
            "q_indptr": q_indptr, "kv_indptr": kv_indptr, "max_q_len": max_q_len,
            "max_kv_len": max_kv_len, "scale": scale, "q_offset": q_offset,
            "return_lse": return_lse, "partial": partial, "target": target,
        }  # fmt: skip
        return as_op.states("varlen_attention", q, k, v, variant, params, arguments, out, lse)  # type: ignore[no-any-return]
    result, written = run_packed(
        q, k, v, q_indptr, kv_indptr, as_variant(variant), params, max_q_len=max_q_len,
        max_kv_len=max_kv_len, scale=scale, q_offset=q_offset, return_lse=return_lse,
        partial=partial, out=out, lse=lse, target=target, direct=direct,
    )  # fmt: skip
    return result if written is None else (result, written)


def run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    chosen: Variant,
    params: Mapping[str, object],
    *,
    max_q_len: int | None,
    max_kv_len: int | None,
    scale: checks.Scale | None,
    q_offset: Offset,
    return_lse: bool,
    partial: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    target: str | None,
    swap: Swap | None = None,
    direct: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks and computes (out, lse) of a packed call; lse is None unless requested.

    swap: see `bind`. direct: the result of `is_direct` for q, k and v, if known. The other
    arguments and the errors are those of `varlen_attention`.
    """
    if direct is None:
        direct = is_direct(q, k, v)
    form = packed_form(q, k, v, direct)
    with contextlib.nullcontext() if direct else outside_modes():
        requests = packed_requests(form, q_indptr, kv_indptr, q_offset)
    for name, most, what, lengths in (
        ("max_q_len", max_q_len, requests.dims.q_len, requests.lengths.q_len),
        ("max_kv_len", max_kv_len, requests.dims.kv_len, requests.lengths.kv_len),
    ):
        if most is not None and what > checks.check_int(name, most, 0, 2**63 - 1):
            raise InputError(
                f"{name}={most} is less than the length {what} of request {lengths.index(what)}"
            )
    return attend(
        form, requests, chosen, params, q, k, v, scale=scale, return_lse=return_lse,
        partial=partial, out=out, lse=lse, target=target, swap=swap, direct=direct,
    )  # fmt: skip
