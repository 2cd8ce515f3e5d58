"""`fa.varlen_attention`: attention over requests of different lengths, packed end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from ..errors import InputError
from ..variants.binding import Swap, bind, bind_outside_modes
from ..variants.spec import Dims, Variant, as_variant
from . import _check, _handles, _packed
from ._dense import result_dtype
from ._direct import is_direct
from ._placement import place
from ._scalars import pack_scalars
from .attention import Offset, check_offset


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    variant: Variant | Callable[..., object] | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale: float | None = None,
    q_offset: Offset = "end",
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    target: str | None = None,
    **params: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of `variant` over packed requests; request i owns rows indptr[i] to indptr[i + 1].

    Args:
        q: [num_q_tokens, num_q_heads, head_dim]; dtypes and strides as for `attention`.
        k: [num_kv_tokens, num_kv_heads, head_dim].
        v: [num_kv_tokens, num_kv_heads, head_dim_v].
        q_indptr: int32 or int64 cpu tensor [num_requests + 1], ascending from 0 to num_q_tokens.
        kv_indptr: likewise for keys.
        variant: as for `attention`.
        max_q_len: when given, checked to be at least the longest request's q_len.
        max_kv_len: likewise for kv_len.
        scale, return_lse, partial, out, target, params: as for `attention`.
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
    given = (q, k, v)
    direct = not torch.compiler.is_dynamo_compiling() and is_direct(*given)
    direct = direct and type(q_indptr) is torch.Tensor and type(kv_indptr) is torch.Tensor
    if not direct:
        from ._as_op import states

        arguments = {
            "q_indptr": q_indptr, "kv_indptr": kv_indptr, "max_q_len": max_q_len,
            "max_kv_len": max_kv_len, "scale": scale, "q_offset": q_offset,
            "return_lse": return_lse, "partial": partial, "target": target,
        }  # fmt: skip
        return states("varlen_attention", q, k, v, variant, params, arguments, out)  # type: ignore[no-any-return]
    result, lse = run_packed(
        q, k, v, q_indptr, kv_indptr, as_variant(variant), params, max_q_len=max_q_len,
        max_kv_len=max_kv_len, scale=scale, q_offset=q_offset, return_lse=return_lse,
        partial=partial, out=out, target=target, direct=direct,
    )  # fmt: skip
    return result if lse is None else (result, lse)


def run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    chosen: Variant,
    params: Mapping[str, object],
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale: float | None = None,
    q_offset: Offset = "end",
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    target: str | None = None,
    swap: Swap | None = None,
    direct: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks and computes (out, lse) of a packed call; lse is None unless asked for.

    swap: see `bind`. direct: what `is_direct` says of q, k and v, where that is known. The rest is
    as for `varlen_attention`, which see for what it raises.
    """
    _check.check_tensors(
        q, k, v,
        ("[num_q_tokens, num_q_heads, head_dim]", "[num_kv_tokens, num_kv_heads, head_dim]",
         "[num_kv_tokens, num_kv_heads, head_dim_v]"),
    )  # fmt: skip
    _check.check_heads(q.shape[1], k.shape[1], v.shape[1])
    _check.check_head_dims(q.shape[2], k.shape[2], v.shape[2])
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v has num_kv_tokens={v.shape[0]}, but k has num_kv_tokens={k.shape[0]}")
    q_lens = request_lengths("q_indptr", q_indptr, q.shape[0], max_q_len, "max_q_len")
    kv_lens = request_lengths("kv_indptr", kv_indptr, k.shape[0], max_kv_len, "max_kv_len")
    if len(q_lens) != len(kv_lens):
        raise InputError(
            f"kv_indptr has num_requests={len(kv_lens)}, but q_indptr has "
            f"num_requests={len(q_lens)}"
        )
    num_requests = len(q_lens)
    longest_q, longest_kv = max(q_lens, default=0), max(kv_lens, default=0)
    dims = Dims(
        num_requests, q.shape[1], k.shape[1], longest_q, longest_kv, q.shape[2], v.shape[2],
        q.device,
    )  # fmt: skip
    if direct is None:
        direct = is_direct(q, k, v)
    bound = (bind if direct else bind_outside_modes)(chosen, dims, params, swap)
    _check.check_grad((q, k, v, *bound.tensors))
    pointwise = bound.ir.normalizer == "pointwise"
    _check.check_lse(return_lse, pointwise)
    scale = _check.check_scale(scale, q.shape[2])
    offsets = resolve_offsets(q_offset, q_lens, kv_lens)
    handle = _handles.remember(bound.handle, bound.ir, chosen.name)
    target = place(q, k, v, target)
    with_lse = return_lse or (partial and not pointwise)
    scalars = pack_scalars(bound.scalars)
    lse: torch.Tensor | None
    if out is None:
        result, lse = _packed.packed(
            q, k, v, bound.tensors, scalars, handle, scale, q_indptr, kv_indptr, offsets,
            with_lse, partial, target,
        )  # fmt: skip
    else:
        shape = (*q.shape[:2], v.shape[2])
        _check.check_out(out, shape, result_dtype(q, partial), (q, k, v, *bound.tensors))
        result = out
        lse = q.new_empty(shape[:2], dtype=torch.float32) if with_lse else None
        _packed.packed_out(
            q, k, v, bound.tensors, scalars, handle, scale, q_indptr, kv_indptr, offsets,
            partial, target, out, lse,
        )  # fmt: skip
    return result, lse if with_lse else None


def request_lengths(
    name: str, indptr: torch.Tensor, tokens: int, longest: int | None, longest_name: str
) -> tuple[int, ...]:
    """Lengths of the requests behind an indptr, which must ascend from 0 to `tokens`."""
    _check.check_host_integers(name, indptr)
    if indptr.dim() != 1 or indptr.shape[0] < 1:
        raise InputError(f"{name} must be [num_requests + 1], got {tuple(indptr.shape)}")
    starts = indptr.tolist()
    if starts[0] != 0 or starts[-1] != tokens:
        raise InputError(
            f"{name} must run from 0 to the number of tokens ({tokens}), it runs from {starts[0]} "
            f"to {starts[-1]}"
        )
    lengths = []
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise InputError(f"{name} must not descend; request {i} has [{begin}, {end}]")
        lengths.append(end - begin)
    if longest is not None:
        longest = _check.check_int(longest_name, longest, 0, 2**63 - 1)
    if longest is not None and lengths and max(lengths) > longest:
        worst = lengths.index(max(lengths))
        raise InputError(
            f"{longest_name}={longest} is less than the length {lengths[worst]} of request {worst}"
        )
    return tuple(lengths)


def resolve_offsets(
    q_offset: Offset, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> torch.Tensor:
    """The offset of each request, as an int64 tensor [num_requests]."""
    if isinstance(q_offset, torch.Tensor):
        _check.check_lengths("q_offset", q_offset, len(q_lens), -(2**30), 2**30)
        return q_offset
    if isinstance(q_offset, str):
        if q_offset != "end":
            raise InputError(
                f'q_offset must be an int, a tensor [num_requests] or "end", got {q_offset!r}'
            )
        ends = [k - q for q, k in zip(q_lens, kv_lens, strict=True)]
        return torch.tensor(ends, dtype=torch.int64, device="cpu")
    one = check_offset(q_offset, "num_requests")
    return torch.full((len(q_lens),), one, dtype=torch.int64, device="cpu")
