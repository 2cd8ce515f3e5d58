"""`merge_states` on CUDA and emulated targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C
from ...codegen.spec import UtilitySpec
from ...codegen.targets import compiled_target
from ..arguments.calls import address_of
from ..device.cuda import LaunchTensors
from .utility import UtilityWork, layouts, load_kernel, run_utility

MAX_STATES = 32
"""States that one launch merges, as they are kernel parameters; more need several launches."""


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of out, in the order of the kernel's numbers."""


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    target: str,
) -> None:
    """Writes the merge of states of one shape, in order, to out and lse.

    lses: empty for pointwise states, whose lse is not written. mask: [*rows] or None. out and lse
    may be those of the first state.
    """
    outs = [o if o.stride(-1) == 1 or o.shape[-1] == 1 else o.contiguous() for o in outs]
    so_far, so_far_lse = out, lse
    if len(outs) > MAX_STATES and out.dtype != torch.float32:
        so_far, so_far_lse = (torch.empty_like(t, dtype=torch.float32) for t in (out, lse))
    begin = 0
    while begin < len(outs):
        end = begin + MAX_STATES - bool(begin)
        states, more = outs[begin:end], lses[begin:end]
        if begin:
            states, more = [so_far, *states], [so_far_lse, *more] if lses else ()
        last = end >= len(outs)
        result = (out, lse) if last else (so_far, so_far_lse)
        _merge_some(states, more, mask, *result, target)
        begin = end


def _merge_some(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    target: str,
) -> None:
    first = outs[0]
    rows = out.numel() // out.shape[-1]
    if rows == 0:
        return
    none = torch.empty(0, 0, 0, dtype=torch.bool, device=first.device)
    states = [_three_dims(o, 4) for o in outs] + [_three_dims(x, 3) for x in lses]
    states.append(none if mask is None else _three_dims(mask, 3))
    out_strides = _three(_three_dims(out, 4))
    lse_strides = _three(_three_dims(lse, 3)) if lses else None
    shapes = layouts(states)

    def work() -> UtilityWork:
        spec = UtilitySpec("merge_states", compiled_target(target))
        return UtilityWork(
            load_kernel(spec),
            _C.BatchLengths.dense(1, rows, 0),
            torch.tensor([[0, 0, 1, 0, rows, 0, 0, -1]], device="cpu"),
            shapes,
            (first.shape[-1], first.shape[-1]),
            out_strides=out_strides,
            lse_strides=lse_strides,
            scalar_kinds="i",
        )

    names = [f"outs[{i}]" for i in range(len(outs))] + [f"lses[{i}]" for i in range(len(lses))]
    results = {t.data_ptr() for t in (out, lse)}
    # A result in place of a state is one allocation, which the kernel reads and writes.
    allocations = [
        (name, state, state.data_ptr() in results)
        for name, state in zip([*names, "mask"], states, strict=True)
    ]
    read = {t.data_ptr() for t in states}
    allocations += [
        (name, t, True) for name, t in (("out", out), ("lse", lse)) if t.data_ptr() not in read
    ]
    tensors = LaunchTensors(
        first, first, first, out, lse if lses else None, states, tuple(map(address_of, states)),
        (_DTYPES.index(out.dtype),), allocations=allocations,
    )  # fmt: skip
    run_utility(
        ("merge_states", shapes, out_strides, lse_strides), target, first.device, work, tensors
    )


def _three(t: torch.Tensor) -> tuple[int, int, int]:
    """Strides of the first three dims."""
    return t.stride(0), t.stride(1), t.stride(2)


def _three_dims(t: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor with leading dims of size 1, so that it has `rank` dims."""
    return t[(None,) * (rank - t.dim())]
