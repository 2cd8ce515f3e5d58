"""`merge_states` on CUDA and emulated targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C
from ...codegen.spec import UtilitySpec
from ...codegen.targets import compiled_target
from ..device.cuda import LaunchTensors
from .utility import UtilityWork, addresses, layouts, run_utility

MAX_STATES = 32
"""States that one launch merges, as they are kernel parameters; more need several launches."""


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of states of one shape, merged in order; lse is empty for pointwise states."""
    outs = [o if o.stride(-1) == 1 or o.shape[-1] == 1 else o.contiguous() for o in outs]
    out, lse = _merge_some(outs[:MAX_STATES], lses[:MAX_STATES], target)
    for begin in range(MAX_STATES, len(outs), MAX_STATES - 1):
        end = begin + MAX_STATES - 1
        more = [lse, *lses[begin:end]] if lses else ()
        out, lse = _merge_some([out, *outs[begin:end]], more, target)
    return out, lse


def _merge_some(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    first = outs[0]
    out = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    lse = torch.empty(first.shape[:-1] if lses else 0, dtype=torch.float32, device=first.device)
    rows = out.numel() // out.shape[-1]
    if rows == 0:
        return out, lse
    states = [_three_dims(o, 4) for o in outs] + [_three_dims(x, 3) for x in lses]
    merged, merged_lse = _three_dims(out, 4), _three_dims(lse, 3) if lses else None
    shapes = layouts(states)

    def work() -> UtilityWork:
        return UtilityWork(
            UtilitySpec("merge_states", compiled_target(target)),
            _C.BatchLengths.dense(1, rows, 0),
            torch.tensor([[0, 0, 1, 0, rows, 0, 0, -1]], device="cpu"),
            shapes,
            first.shape[-1],
            _three(merged),
            None if merged_lse is None else _three(merged_lse),
        )

    names = [f"outs[{i}]" for i in range(len(outs))] + [f"lses[{i}]" for i in range(len(lses))]
    tensors = LaunchTensors(
        first, first, first, out, lse if lses else None, states, addresses(states),
        allocations=[
            *zip(names, states, [False] * len(states), strict=True),
            ("out", out, True),
            ("lse", lse, True),
        ],
    )  # fmt: skip
    run_utility(("merge_states", shapes, bool(lses)), target, first.device, work, tensors)
    return out, lse


def _three(t: torch.Tensor) -> tuple[int, int, int]:
    """Strides of the first three dims."""
    return t.stride(0), t.stride(1), t.stride(2)


def _three_dims(t: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor with leading dims of size 1, so that it has `rank` dims."""
    return t[(None,) * (rank - t.dim())]
