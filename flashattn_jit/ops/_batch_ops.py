"""The op of a planned batch: what `run` is where torch's dispatcher listens, and inside graphs.

The batch is named by a number; its plan is met when the op runs, so that a graph outlives plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._batch_base import by_number
from ._graph_ops import params_of, register, split_params
from ._launch import filled
from ._shapes import packed_shapes

_VALUES = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, Tensor numbers, SymInt batch, "
    "str[] tensor_names, str[] scalar_names, str fixed, bool has_scale, bool return_lse, "
    "bool partial, bool with_lse"
)


def run_by_op(
    number: int,
    pointwise: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: Any,
    scale: Any,
    return_lse: bool,
    partial: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) through the registered op."""
    given = split_params(params)
    with_lse = return_lse or (partial and not pointwise)
    scalars = [*given.scalars] if scale is None else [*given.scalars, scale]
    numbers = torch.tensor(scalars, dtype=torch.float64, device="cpu")
    values = (
        given.tensors, numbers, number, given.tensor_names,
        given.scalar_names, given.fixed, scale is not None, return_lse, partial, with_lse,
    )  # fmt: skip
    ops = torch.ops.flashattn_jit
    if out is None:
        result, lse = ops.batch_attention(q, k, v, *values)
    else:
        result, lse = out, ops.batch_attention_out(q, k, v, *values, out)
    return result, lse if with_lse else None


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    number: int,
    tensor_names: Sequence[str],
    scalar_names: Sequence[str],
    fixed: str,
    has_scale: bool,
    return_lse: bool,
    partial: bool,
    with_lse: bool,
    *outs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = outs[0] if outs else None
    _, params, scale = params_of(tensors, numbers, tensor_names, scalar_names, fixed, has_scale)
    planned = by_number(number).in_force()
    result, lse = planned.run(q, k, v, params, scale, return_lse, partial, out)
    return result, filled(lse, q)


def _run_out(*inputs: Any) -> torch.Tensor:
    return _run(*inputs)[1]


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return packed_shapes(q, v, *rest[-2:])


def _shapes_out(*inputs: Any) -> torch.Tensor:
    return _shapes(*inputs[:-1])[1]


register(f"batch_attention({_VALUES}) -> (Tensor, Tensor)", _run, _shapes)
register(f"batch_attention_out({_VALUES}, Tensor(a!) out) -> Tensor", _run_out, _shapes_out)
