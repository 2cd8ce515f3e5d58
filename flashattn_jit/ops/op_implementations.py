"""Implementations of the torch ops: the ordinary call, and for tracers the shapes of its results.

Fake implementations compute shapes only and raise no errors: a wrong shape is an error of the run,
with the message of the ordinary call. They read the op's arguments but not its site: a graph from
the compiler's disk cache may run with another site of the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import InputError
from ..variants.ir.dtypes import row_dim
from ..variants.variant import as_variant
from . import merge
from .arguments.calls import filled, in_order_of, result_dtype
from .attention import run_dense
from .keys.block_mask import keep_states
from .keys.paged import Paged
from .torch_ops.definitions import Op, Results, define, define_call
from .torch_ops.sites import Hooks, UserCall
from .varlen import run_packed

Tensor = torch.Tensor


# --- implementations: from q, k, v and the rest of the call to its results -----------------------


def _states(
    run: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor, k: Tensor, v: Tensor, call: UserCall, out: Tensor | None, lse: Tensor | None,
) -> Results:  # fmt: skip
    """The results of `run`, which is `run_dense` or `run_packed`."""
    result, rows = run(
        q, k, v, chosen=as_variant(call.variant), params=call.params, out=out, lse=lse,
        swap=call.swap, **call.arguments,
    )  # fmt: skip
    return result, filled(rows, q)


def _batch(
    q: Tensor, k: Tensor, v: Tensor, call: UserCall, out: Tensor | None, lse: Tensor | None
) -> Results:
    from .batch_base import by_number

    given = call.arguments
    result, rows = by_number(given["batch"]).in_force().run(
        q, k, v, call.params, given["scale"], given["return_lse"], given["partial"], out, lse,
        given["more"],
    )  # fmt: skip
    return result, filled(rows, q)


class _GraphMask:
    """A `BlockMask` made from the inputs of a graph; it may reuse the map of an earlier run."""

    def __init__(
        self, mask_mod: Any, lists: Sequence[Any], size: Sequence[int], shape: Sequence[int]
    ) -> None:
        self.kv_num_blocks, self.kv_indices = lists[:2]
        self.full_kv_num_blocks, self.full_kv_indices = lists[2:]
        self.BLOCK_SIZE, self.shape, self.mask_mod = tuple(size), tuple(shape), mask_mod


def _flex(q: Tensor, k: Tensor, v: Tensor, call: UserCall, *_: Tensor | None) -> Results:
    from .flex import run_flex

    hooks, given = call.variant, dict(call.arguments)
    mask = given["block_mask"]
    if not isinstance(hooks, Hooks):
        hooks = Hooks(*map(hooks.hooks().get, Hooks._fields))
        if mask is not None:
            # The site's last map is reused if this call has the same lists.
            mask = given["block_mask"] = _GraphMask(hooks.mask_mod, *mask)
            keep_states(mask, call.kept.get("mask"))
            call.kept["mask"] = mask
    result, lse, max_scores = run_flex(q, k, v, hooks.score_mod, swap=call.swap, **given)
    return result, filled(lse, q), filled(max_scores, q)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: UserCall, *_: Tensor | None) -> Results:
    from .sdpa import run_sdpa

    return (run_sdpa(q, k, v, **call.arguments),)


def _append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: Any) -> None:
    from .append import run_append

    q_indptr, page_indptr, page_indices, last_page_len, page_size, target = rest
    paged = Paged(page_indptr, page_indices, last_page_len, page_size)
    run_append(k, v, k_pages, v_pages, q_indptr, paged, target)


def _merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    target: str | None = None,
) -> Results:
    return merge.merge_into(outs, lses, mask, dtype or torch.float32, None, None, target)


def _merge_out(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    target: str | None = None,
) -> None:
    merge.merge_into(outs, lses, mask, out.dtype, out, lse, target)


# --- shapes: from q, k, v and the op's flags to empty results ------------------------------------


def _dense_shapes(q: Tensor, k: Tensor, v: Tensor, flags: Sequence[bool]) -> Results:
    is_partial, with_lse = flags
    if q.dim() != 4 or v.dim() != 4:
        return _plain(q, v), _rows(q, True)
    dim = row_dim(v)
    shape, strides = (*q.shape[:3], dim), in_order_of(q.shape, q.stride(), dim)
    out = q.new_empty_strided(shape, strides, dtype=result_dtype(q.dtype, is_partial))
    return out, _rows(q, with_lse)


def _packed_shapes(q: Tensor, k: Tensor, v: Tensor, flags: Sequence[bool]) -> Results:
    is_partial, with_lse = flags
    return _plain(q, v).to(result_dtype(q.dtype, is_partial)), _rows(q, with_lse)


def _flex_shapes(q: Tensor, k: Tensor, v: Tensor, flags: Sequence[bool]) -> Results:
    want_lse, want_max = flags
    return *_dense_shapes(q, k, v, (False, want_lse)), _rows(q, want_max)


def _sdpa_shapes(q: Tensor, k: Tensor, v: Tensor, flags: Sequence[bool]) -> Results:
    from .sdpa import as_dense_problem, with_leading_dims

    try:
        q4, k4, v4, lead = as_dense_problem(q, k, v, flags[0])
    except InputError:
        return (_plain(q, v),)
    out, _ = _dense_shapes(q4, k4, v4, (False, False))
    return (with_leading_dims(out, lead, q.dim()),)


def _merge_shapes(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype | None = None, **_: object
) -> Results:
    out = outs[0].new_empty(outs[0].shape, dtype=dtype)
    return out, outs[0].new_empty(outs[0].shape[:-1] if lses else (0,))


def _plain(q: Tensor, v: Tensor) -> Tensor:
    """q's rows with v's last dim: for packed calls, and for inputs that the run will refuse."""
    return q.new_empty((*q.shape[:-1], *v.shape[-1:]))


def _rows(q: Tensor, wanted: bool) -> Tensor:
    """An fp32 number per row of q, or an empty tensor."""
    return q.new_empty(q.shape[:-1] if wanted else (0,), dtype=torch.float32)


# --- the ops -------------------------------------------------------------------------------------

_OPS = {
    "attention": Op(partial(_states, run_dense), _dense_shapes, "(Tensor, Tensor)", has_out=True),
    "varlen_attention": Op(
        partial(_states, run_packed), _packed_shapes, "(Tensor, Tensor)", has_out=True
    ),
    "batch_attention": Op(_batch, _packed_shapes, "(Tensor, Tensor)", has_out=True),
    "flex_attention": Op(_flex, _flex_shapes, "(Tensor, Tensor, Tensor)"),
    "scaled_dot_product_attention": Op(_sdpa, _sdpa_shapes, "Tensor"),
}

for _name, _op in _OPS.items():
    define_call(_name, _op)
define(
    "append_paged_kv(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor q_indptr, "
    "Tensor page_indptr, Tensor page_indices, Tensor last_page_len, SymInt page_size, "
    "str? target)",
    _append, lambda *args: None, "()",
)  # fmt: skip
define(
    "merge_states(Tensor[] outs, Tensor[] lses, *, Tensor? mask=None, ScalarType? dtype=None, "
    "str? target=None)",
    _merge, _merge_shapes, "(Tensor, Tensor)",
)  # fmt: skip
define(
    "merge_states_out(Tensor[] outs, Tensor[] lses, Tensor? mask, Tensor(a!) out, Tensor(b!) lse, "
    "*, str? target=None)",
    _merge_out, lambda *args, **kwargs: None, "()",
)  # fmt: skip
