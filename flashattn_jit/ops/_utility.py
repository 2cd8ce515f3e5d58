"""Kernels that are no attention, planned like calls: the bound of their work is known to the host.

Their tensors are param tensors of a call without hooks, and their work is a list of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import _C
from ..codegen.spec import UtilitySpec
from ..jit.module import load_stepping
from ..planner.tiles import requests_of
from ._device import DevicePlan, make_plan, refuse_capture
from ._recent import Recent

_plans: Recent[tuple[object, ...], DevicePlan] = Recent(64)

WORK_FIELDS = 8
"""request, head_begin, head_count, row_begin, row_end, kv_begin, kv_end, partial."""


@dataclass(frozen=True, slots=True)
class UtilityWork:
    """What a utility does: its kernel, the runtime's problem and the items [n, WORK_FIELDS]."""

    spec: UtilitySpec
    problem: _C.Problem
    items: torch.Tensor
    flags: int = 0


def plan_utility(
    signature: tuple[object, ...],
    target: str,
    device: torch.device,
    make: Callable[[], UtilityWork],
) -> DevicePlan:
    """The plan of a signature, which holds all that `make` depends on; from memory or made now.

    Raises:
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: the kernel cannot be loaded, or a stream is being captured in a graph.
    """
    key = (target, device, *signature)
    plan = _plans.get(key)
    if plan is not None:
        return plan
    refuse_capture(device)
    work = make()
    _, module = load_stepping(requests_of(work.spec))
    call = _C.Call(module, work.problem, _bytes_of(work.items), flags=work.flags)
    return _plans.keep(key, make_plan(call, module, target, device))


def _bytes_of(items: torch.Tensor) -> bytes:
    return items.to(torch.int32).contiguous().numpy().tobytes()


def layouts(tensors: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Sizes and strides, as `_C.Problem` takes them."""
    return tuple((tuple(t.shape), t.stride()) for t in tensors)


def addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Where tensors with entries begin, else 0."""
    return tuple(t.data_ptr() if t.numel() else 0 for t in tensors)
