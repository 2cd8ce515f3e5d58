"""What ``torch.compile``, torch.export and fake tensors see of a call. Imported for them alone.

A traced call reads the tensors and numbers that its variant captures, by the paths of its site
(`_sites`), and emits one op (`_graph_ops`) that takes them as inputs. When the graph runs, that op
makes the ordinary call: the same checks, the same errors, the same kernels. So a new value of a
scalar, a new captured tensor or a new length changes an input of the graph, not the graph.

The numbers of a Variant object are read when the graph runs. A traced function that assigns one
itself (``variant.window = 9``) is not followed: Python side effects come after the graph. Such a
number is given by keyword.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import InputError
from ..variants.extract import ROOT
from ..variants.modes import GRAD_MESSAGE
from ..variants.spec import FULL, Variant
from . import _sites
from ._graph_ops import NUMBERS, split_params
from ._sites import CELL, CELLS, ITEM, Plan, Use
from ._torch_inputs import autocast
from ._traced import as_inputs, is_fake, makes_graph, refuse_functionalize
from .block_mask import lists_of
from .paged import Paged

_OPS = torch.ops.flashattn_jit


def _use(*tensors: Any) -> Use:
    if torch.compiler.is_exporting():
        return "exported"
    if torch.compiler.is_dynamo_compiling():
        return "compiled"
    return "fake" if is_fake(tensors) else "exported" if makes_graph() else "once"


def _emit(op: Any, values: Sequence[Any], site: int = -1) -> Any:
    """The op, as a node of the graph; site: the call's, where it has one."""
    if torch.compiler.is_dynamo_compiling():
        return op(*values)
    try:
        return op(*as_inputs(values))
    finally:
        _sites.release(site)


def _emit_out(op: Any, values: Sequence[Any], out: Any, site: int = -1) -> Any:
    """The op that writes to `out`."""
    if not torch.compiler.is_dynamo_compiling():
        refuse_functionalize("out", (out,))
    return _emit(op, (*values, out), site)


# Dynamo runs these as they are and takes their results for constants. It guards on the identity of
# variants and on the code of functions.
_variant_site = torch.compiler.assume_constant_result(_sites.variant_site)
_function_site = torch.compiler.assume_constant_result(_sites.function_site)
_callable_site = torch.compiler.assume_constant_result(_sites.callable_site)
_exported_number = torch.compiler.assume_constant_result(_sites.exported_number)
_hook_name = torch.compiler.assume_constant_result(_sites.hook_name)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _look(value: Any) -> int:
    """Makes Dynamo guard on a function or a constant."""
    return 0


class _Problem(NamedTuple):
    """Why a call cannot be: the class of the error and its message. The graph raises it."""

    kind: str
    message: str


class _Inputs(NamedTuple):
    """The inputs of the graph's op: see `_graph_ops.Values`."""

    captured: list[torch.Tensor]
    tensors: list[torch.Tensor]
    numbers: torch.Tensor
    site: int
    tensor_names: list[str]
    scalar_names: list[str]
    fixed: str
    has_scale: bool


def dense(
    q: Any,
    k: Any,
    v: Any,
    variant: Any,
    params: Mapping[str, Any],
    scale: Any,
    q_offset: Any,
    kv_len: Any,
    return_lse: bool,
    partial: bool,
    out: Any,
    target: Any,
) -> Any:
    """`attention` while it is traced."""
    plan, inputs = _inputs(variant, params, scale, _use(q, k, v))
    problem = _problem(
        plan, {"q": q, "k": k, "v": v}, inputs, scale, q_offset, target,
        {"kv_len": kv_len, "out": out},
    )  # fmt: skip
    with_lse = return_lse or (partial and not plan.pointwise)
    if problem is not None:
        result, lse = _refuse(q, v, problem, plan.number)
    else:
        offset, offsets, at_end = _offset(q_offset)
        values = (
            q, k, v, *inputs, offset, at_end, offsets, kv_len, target, return_lse, partial,
            with_lse,
        )  # fmt: skip
        if out is None:
            result, lse = _emit(_OPS.call_attention, values, plan.number)
        else:
            result, lse = out, _emit_out(_OPS.call_attention_out, values, out, plan.number)
    return (result, lse) if with_lse else result


def packed(
    q: Any,
    k: Any,
    v: Any,
    q_indptr: Any,
    kv_indptr: Any,
    variant: Any,
    params: Mapping[str, Any],
    max_q_len: Any,
    max_kv_len: Any,
    scale: Any,
    q_offset: Any,
    return_lse: bool,
    partial: bool,
    out: Any,
    target: Any,
) -> Any:
    """`varlen_attention` while it is traced."""
    plan, inputs = _inputs(variant, params, scale, _use(q, k, v))
    tensors = {"q": q, "k": k, "v": v, "q_indptr": q_indptr, "kv_indptr": kv_indptr}
    problem = _problem(plan, tensors, inputs, scale, q_offset, target, {"out": out})
    with_lse = return_lse or (partial and not plan.pointwise)
    if problem is not None:
        result, lse = _refuse(q, v, problem, plan.number)
    else:
        offset, offsets, at_end = _offset(q_offset)
        values = (
            q, k, v, *inputs, q_indptr, kv_indptr, max_q_len, max_kv_len, offset, at_end, offsets,
            target, return_lse, partial, with_lse,
        )  # fmt: skip
        if out is None:
            result, lse = _emit(_OPS.call_varlen_attention, values, plan.number)
        else:
            result, lse = out, _emit_out(_OPS.call_varlen_attention_out, values, out, plan.number)
    return (result, lse) if with_lse else result


def batch(
    owner: Any,
    q: Any,
    k: Any,
    v: Any,
    params: Mapping[str, Any],
    scale: Any,
    return_lse: bool,
    partial: bool,
    out: Any,
) -> Any:
    """`BatchAttention.run` while it is traced. The object, its variant and its plan are met when
    the graph runs: a new plan does not change the graph."""
    given = split_params(params)
    inputs = _Inputs(
        [], given.tensors, _pack(given.scalars, scale), -1, given.tensor_names, given.scalar_names,
        given.fixed, scale is not None,
    )  # fmt: skip
    problem = _problem(Plan(-1), {"q": q, "k": k, "v": v}, inputs, scale, 0, None, {"out": out})
    with_lse = return_lse or (partial and not owner._pointwise)
    if problem is not None:
        result, lse = _refuse(q, v, problem)
    else:
        number = owner._number
        if _use(q, k, v) == "exported":
            number = _exported_number(owner)
        values = (
            q, k, v, inputs.tensors, inputs.numbers, number, inputs.tensor_names,
            inputs.scalar_names, inputs.fixed, inputs.has_scale, return_lse, partial, with_lse,
        )  # fmt: skip
        if out is None:
            result, lse = _emit(_OPS.batch_attention, values)
        else:
            result, lse = out, _emit_out(_OPS.batch_attention_out, values, out)
    return (result, lse) if with_lse else result


def flex(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    want_lse: bool,
    want_max: bool,
) -> tuple[Any, Any, Any]:
    """`run_flex` while it is traced."""
    mask_mod = None if block_mask is None else block_mask.mask_mod
    plan = _function_site(score_mod, mask_mod, _use(query, key, value))
    captured, numbers = _read({"score_mod": score_mod, "mask_mod": mask_mod}, plan)
    inputs = _Inputs(
        captured, [], _pack(numbers, scale), plan.number, [], [], "", scale is not None
    )
    problem = _problem(
        plan, {"query": query, "key": key, "value": value}, inputs, scale, 0, None, {}
    )
    if problem is not None:
        out, lse = _refuse(query, value, problem, plan.number)
        max_scores = lse
    else:
        query, key, value = autocast(query, key, value)
        lists: Sequence[Any] = (None, None, None, None)
        sizes: Sequence[Sequence[int]] = ((), ())
        if block_mask is not None:
            lists, sizes = lists_of(block_mask), (block_mask.BLOCK_SIZE, block_mask.shape)
        values = (query, key, value, *inputs, *lists, *sizes, enable_gqa, want_lse, want_max)
        out, lse, max_scores = _emit(_OPS.call_flex_attention, values, plan.number)
    return out, lse if want_lse else None, max_scores if want_max else None


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    """`run_sdpa` while it is traced."""
    inputs = _Inputs([], [], _pack((), scale), -1, [], [], "", scale is not None)
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        inputs.tensors.append(attn_mask)
        tensors["attn_mask"] = attn_mask
    problem = _problem(Plan(-1), tensors, inputs, scale, 0, None, {})
    if problem is not None:
        return _refuse(query, value, problem)[0]
    query, key, value = autocast(query, key, value)
    values = (
        query, key, value, attn_mask, inputs.numbers, inputs.has_scale, dropout_p, is_causal,
        enable_gqa,
    )  # fmt: skip
    return _emit(_OPS.call_scaled_dot_product_attention, values)


def append(
    k: Any, v: Any, k_pages: Any, v_pages: Any, q_indptr: Any, paged: Any, target: Any
) -> None:
    """`append_paged_kv` while it is traced."""
    if not torch.compiler.is_dynamo_compiling():
        refuse_functionalize("k_pages or v_pages", (k_pages, v_pages))
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
    tables = (paged.page_indptr, paged.page_indices, paged.last_page_len)
    values = (k, v, k_pages, v_pages, q_indptr, *tables, paged.page_size, target)
    _emit(_OPS.call_append_paged_kv, values)


# --- parts ---------------------------------------------------------------------------------------


def _inputs(variant: Any, params: Mapping[str, Any], scale: Any, use: Use) -> tuple[Plan, _Inputs]:
    """The plan of a call's site and what the op is given."""
    given = split_params(params)
    if variant is None:
        variant = FULL
    if isinstance(variant, Variant):
        names = [name.partition(":")[0] for name in given.scalar_names]
        plan = _variant_site(variant, tuple(given.tensor_names), tuple(names), use)
        captured, numbers = _read(variant, plan)
    else:
        plan = _callable_site(variant, use)
        captured, numbers = _read({_hook_name(variant): variant}, plan)
    return plan, _Inputs(
        captured,
        given.tensors,
        _pack([*numbers, *given.scalars], scale),
        plan.number,
        given.tensor_names,
        given.scalar_names,
        given.fixed,
        scale is not None,
    )


def _read(root: Any, plan: Plan) -> tuple[list[torch.Tensor], list[float]]:
    """The captured tensors and numbers, read where the tracer sees it."""
    values: list[Any] = []
    for base, steps in plan.paths:
        if base == CELL:
            values.append(getattr(CELLS, steps[0][1])())
            continue
        value = root if base == ROOT else values[base]
        for kind, key in steps:
            value = value[key] if kind == ITEM else getattr(value, key)
        values.append(value)
    for i in plan.fixed:
        _look(values[i])
    for i in plan.functions:
        _look(id(values[i]))
    return [values[i] for i in plan.tensors], [values[i] for i in plan.numbers]


def _pack(numbers: Sequence[Any], scale: Any) -> torch.Tensor:
    """Numbers as one tensor, an input of the op: new values do not change the graph."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    # A product is what the compiler can make of a float without specialising on its value.
    found: list[Any] = [x for x in (*numbers, scale) if isinstance(x, NUMBERS)]
    values = [one * x for x in found]
    return torch.stack(values) if values else torch.empty(0, dtype=torch.float64, device="cpu")


def _offset(q_offset: Any) -> tuple[Any, Any, bool]:
    """(int, tensor or None, whether it is "end")."""
    if isinstance(q_offset, torch.Tensor):
        return 0, q_offset, False
    if isinstance(q_offset, np.integer):
        q_offset = int(q_offset)
    return (0, None, True) if isinstance(q_offset, str) else (q_offset, None, False)


def _problem(
    plan: Plan,
    tensors: Mapping[str, Any],
    inputs: _Inputs,
    scale: Any,
    q_offset: Any,
    target: Any,
    optional: Mapping[str, Any],
) -> _Problem | None:
    """What the op's schema cannot carry, and gradients, which only the tracer sees."""
    if plan.error is not None:
        return _Problem(*plan.error)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
            return _Problem("InputError", f"{name} must be a torch.Tensor, got {got}")
    for name, tensor in optional.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
            return _Problem("InputError", f"{name} must be a torch.Tensor or None, got {got}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, NUMBERS)):
        return _Problem("InputError", f"scale must be a float or None, got {type(scale).__name__}")
    if isinstance(q_offset, bool) or not (
        isinstance(q_offset, (torch.Tensor, int, torch.SymInt, np.integer)) or q_offset == "end"
    ):
        got = type(q_offset).__name__
        message = f'q_offset must be an int, a tensor [batch] or "end", got {got}'
        return _Problem("InputError", message)
    if target is not None and not isinstance(target, str):
        return _Problem("TargetError", f"target must be a name, got {type(target).__name__}")
    if torch.is_grad_enabled():
        for tensor in (*tensors.values(), *inputs.captured, *inputs.tensors):
            if tensor.requires_grad:
                return _Problem("GradError", GRAD_MESSAGE)
    return None


def _refuse(q: Any, v: Any, problem: _Problem, site: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts the error in the graph: it is raised, as what it is, when the graph runs."""
    q = q.detach() if isinstance(q, torch.Tensor) else torch.empty(1, 1, device="cpu")
    v = v.detach() if isinstance(v, torch.Tensor) else torch.empty(1, 1, device="cpu")
    values = (q, v, problem.kind, problem.message)
    return _emit(_OPS.refuse, values, site)  # type: ignore[no-any-return]
