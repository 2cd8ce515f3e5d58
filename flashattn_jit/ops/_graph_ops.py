"""The ops that a graph of ``torch.compile`` holds: ordinary calls, with a site's values in place.

Their implementations make the call that was traced, with all its checks. Their fake
implementations give shapes only and refuse nothing: a wrong shape is an error of the run, with the
message of the ordinary call. They read nothing but the arguments, not the site: a graph that the
compiler kept on disk may meet another site of the same number.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import errors
from ..variants.binding import Swap
from ..variants.spec import Variant
from . import _sites
from ._launch import filled
from ._register import KEYS, LIBRARY, writes_only
from ._shapes import Result, dense_shapes, lse_shape, packed_shapes, plain_shape
from ._traced import refuse_vmap
from .attention import Offset, run_dense
from .block_mask import keep_states
from .paged import Paged
from .varlen import run_packed

Tensors = Sequence[torch.Tensor]

_QKV = "Tensor q, Tensor k, Tensor v"
_VALUES = (
    "Tensor[] captured, Tensor[] tensors, Tensor numbers, int site, str[] tensor_names, "
    "str[] scalar_names, str fixed, bool has_scale"
)
_OFFSET = "SymInt q_offset, bool at_end, Tensor? q_offsets"
_PACKED = "Tensor q_indptr, Tensor kv_indptr, SymInt? max_q_len, SymInt? max_kv_len"
_OPTIONS = "str? target, bool return_lse, bool partial, bool with_lse"
_LISTS = (
    "Tensor? kv_num_blocks, Tensor? kv_indices, Tensor? full_kv_num_blocks, "
    "Tensor? full_kv_indices, SymInt[] block_size, SymInt[] mask_shape"
)


NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class Values(NamedTuple):
    """A call's variant, params and scale, from the inputs of its op.

    The op's numbers are the captured ones, the call's scalar params and its scale, in this order.
    """

    variant: Variant
    swap: Swap
    params: dict[str, Any]
    scale: float | None


def _values(
    captured: Tensors,
    tensors: Tensors,
    numbers: torch.Tensor,
    site: int,
    tensor_names: Sequence[str],
    scalar_names: Sequence[str],
    fixed: str,
    has_scale: bool,
) -> Values:
    own, params, scale = params_of(tensors, numbers, tensor_names, scalar_names, fixed, has_scale)
    at = _sites.site(site)
    given, inner = tuple(captured or ()), tuple(own)
    return Values(at.variant(given, inner), at.swap(given, inner), params, scale)


def params_of(
    tensors: Tensors,
    numbers: torch.Tensor,
    tensor_names: Sequence[str],
    scalar_names: Sequence[str],
    fixed: str,
    has_scale: bool,
) -> tuple[list[float], dict[str, Any], float | None]:
    """(captured numbers, params, scale) from the inputs of an op."""
    # A package of AOTInductor (torch 2.13) gives None for an empty list.
    tensors, tensor_names, scalar_names = tensors or (), tensor_names or (), scalar_names or ()
    values = numbers.tolist()
    scale = values.pop() if has_scale else None
    own = len(values) - len(scalar_names)
    params: dict[str, Any] = dict(zip(tensor_names, tensors, strict=True))
    for text, value in zip(scalar_names, values[own:], strict=True):
        name, _, kind = text.partition(":")
        params[name] = int(value) if kind == "int" else value
    params.update(_fixed(fixed))
    return values[:own], params, scale


class Given(NamedTuple):
    """The params of a call as an op takes them; fixed: those that are no tensors or numbers."""

    tensor_names: list[str]
    tensors: list[torch.Tensor]
    scalar_names: list[str]
    scalars: list[Any]
    fixed: str


def split_params(params: Mapping[str, Any]) -> Given:
    """Params by how an op takes them."""
    tensor_names, tensors, scalar_names, scalars, fixed = [], [], [], [], []
    for name, value in params.items():
        if isinstance(value, np.number):
            value = value.item()
        if isinstance(value, torch.Tensor):
            tensor_names.append(name)
            tensors.append(value)
        elif isinstance(value, NUMBERS) and not isinstance(value, bool):
            whole = isinstance(value, (int, torch.SymInt))
            scalar_names.append(name + (":int" if whole else ":float"))
            scalars.append(value)
        else:
            fixed.append(f"{name!r}: {value!r}")
    return Given(tensor_names, tensors, scalar_names, scalars, "{" + ", ".join(fixed) + "}")


def _fixed(text: str) -> dict[str, Any]:
    """Params that are no tensors or numbers: Python literals, or what the call refuses anyway."""
    if not text:
        return {}
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise errors.ParamError(
            f"params of a call inside torch.compile must be tensors, numbers, bools, strings or "
            f"None, got {text}"
        ) from None
    assert isinstance(found, dict)
    return found


def _offset(q_offset: int, at_end: bool, q_offsets: torch.Tensor | None) -> Offset:
    return "end" if at_end else q_offset if q_offsets is None else q_offsets


# --- implementations -----------------------------------------------------------------------------


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, out: torch.Tensor | None = None
) -> Result:
    values = _values(*rest[:8])
    q_offset, at_end, q_offsets, kv_len, target, return_lse, partial, _ = rest[8:]
    result, lse = run_dense(
        q, k, v, values.variant, values.params, scale=values.scale,
        q_offset=_offset(q_offset, at_end, q_offsets), kv_len=kv_len, return_lse=return_lse,
        partial=partial, out=out, target=target, swap=values.swap,
    )  # fmt: skip
    return result, filled(lse, q)


def _attention_out(*inputs: Any) -> torch.Tensor:
    return _attention(*inputs[:-1], out=inputs[-1])[1]


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, out: torch.Tensor | None = None
) -> Result:
    values = _values(*rest[:8])
    q_indptr, kv_indptr, max_q_len, max_kv_len = rest[8:12]
    q_offset, at_end, q_offsets, target, return_lse, partial, _ = rest[12:]
    result, lse = run_packed(
        q, k, v, q_indptr, kv_indptr, values.variant, values.params, max_q_len=max_q_len,
        max_kv_len=max_kv_len, scale=values.scale,
        q_offset=_offset(q_offset, at_end, q_offsets), return_lse=return_lse, partial=partial,
        out=out, target=target, swap=values.swap,
    )  # fmt: skip
    return result, filled(lse, q)


def _varlen_out(*inputs: Any) -> torch.Tensor:
    return _varlen(*inputs[:-1], out=inputs[-1])[1]


class _GraphMask:
    """A `BlockMask` put together from the inputs of a graph; its map may be one made before."""

    def __init__(self, lists: Sequence[Any], size: Sequence[int], shape: Sequence[int]) -> None:
        self.kv_num_blocks, self.kv_indices = lists[:2]
        self.full_kv_num_blocks, self.full_kv_indices = lists[2:]
        self.BLOCK_SIZE, self.shape = tuple(size), tuple(shape)
        self.mask_mod: Any = None


# The last mask of each site: its map serves the next call, if that call has the same lists.
_masks: dict[int, _GraphMask] = {}


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .flex import run_flex

    values = _values(*rest[:8])
    *lists, size, shape, enable_gqa, want_lse, want_max = rest[8:]
    hooks = values.variant.hooks()
    mask = None
    if lists[0] is not None:
        mask = _GraphMask(lists, size, shape)
        mask.mask_mod = hooks.get("mask_mod")
        keep_states(mask, _masks.get(rest[3]))
        _masks[rest[3]] = mask
    out, lse, max_scores = run_flex(
        q, k, v, hooks.get("score_mod"), mask, values.scale, enable_gqa, want_lse, want_max,
        values.swap,
    )  # fmt: skip
    return out, filled(lse, q), filled(max_scores, q)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    numbers: torch.Tensor,
    has_scale: bool,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> torch.Tensor:
    from .sdpa import run_sdpa

    scale = numbers.item() if has_scale else None
    return run_sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _append(k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    from .append import run_append

    k_pages, v_pages, q_indptr, page_indptr, page_indices, last_page_len, size, target = rest
    paged = Paged(page_indptr, page_indices, last_page_len, size)
    run_append(k, v, k_pages, v_pages, q_indptr, paged, target)


def _refuse(q: torch.Tensor, v: torch.Tensor, kind: str, message: str) -> Result:
    error = getattr(errors, kind, errors.FlashAttnJitError)
    raise error(message)


# --- shapes --------------------------------------------------------------------------------------


def _attention_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Result:
    return dense_shapes(q, v, *rest[-2:])


def _varlen_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Result:
    return packed_shapes(q, v, *rest[-2:])


def _attention_out_shapes(*inputs: Any) -> torch.Tensor:
    return _attention_shapes(*inputs[:-1])[1]


def _varlen_out_shapes(*inputs: Any) -> torch.Tensor:
    return _varlen_shapes(*inputs[:-1])[1]


def _flex_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    want_lse, want_max = rest[-2:]
    out, lse = dense_shapes(q, v, False, want_lse)
    return out, lse, lse_shape(q, want_max)


def _sdpa_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    from .sdpa import as_dense_problem, with_leading_dims

    try:
        q4, _, v4, lead = as_dense_problem(q, k, v, rest[-1])
    except errors.InputError:
        return plain_shape(q, v)
    return with_leading_dims(dense_shapes(q4, v4, False, False)[0], lead, q.dim())


def _refuse_shapes(q: torch.Tensor, v: torch.Tensor, kind: str, message: str) -> Result:
    return plain_shape(q, v), lse_shape(q, True)


def register(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define an op with its implementation and its shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for key in KEYS:
        LIBRARY.impl(name, run, key)
    LIBRARY.impl(name, refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"flashattn_jit::{name}", shapes, lib=LIBRARY)


register(
    f"call_attention({_QKV}, {_VALUES}, {_OFFSET}, Tensor? kv_len, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention, _attention_shapes,
)  # fmt: skip
register(
    f"call_attention_out({_QKV}, {_VALUES}, {_OFFSET}, Tensor? kv_len, {_OPTIONS}, "
    "Tensor(a!) out) -> Tensor",
    _attention_out, _attention_out_shapes,
)  # fmt: skip
register(
    f"call_varlen_attention({_QKV}, {_VALUES}, {_PACKED}, {_OFFSET}, {_OPTIONS}) "
    "-> (Tensor, Tensor)",
    _varlen, _varlen_shapes,
)  # fmt: skip
register(
    f"call_varlen_attention_out({_QKV}, {_VALUES}, {_PACKED}, {_OFFSET}, {_OPTIONS}, "
    "Tensor(a!) out) -> Tensor",
    _varlen_out, _varlen_out_shapes,
)  # fmt: skip
register(
    f"call_flex_attention({_QKV}, {_VALUES}, {_LISTS}, bool enable_gqa, bool want_lse, "
    "bool want_max) -> (Tensor, Tensor, Tensor)",
    _flex, _flex_shapes,
)  # fmt: skip
register(
    f"call_scaled_dot_product_attention({_QKV}, Tensor? attn_mask, Tensor numbers, "
    "bool has_scale, float dropout_p, bool is_causal, bool enable_gqa) -> Tensor",
    _sdpa, _sdpa_shapes,
)  # fmt: skip
register(
    "call_append_paged_kv(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor q_indptr, Tensor page_indptr, Tensor page_indices, Tensor last_page_len, "
    "SymInt page_size, str? target) -> ()",
    _append, writes_only,
)  # fmt: skip
register(
    "refuse(Tensor q, Tensor v, str kind, str message) -> (Tensor, Tensor)", _refuse, _refuse_shapes
)
