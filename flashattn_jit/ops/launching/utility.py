"""Kernels that are no attention, planned like calls: the bound of their work is known to the host.

Their tensors are param tensors of a call without hooks, and their work is a list of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ... import _C
from ...codegen.spec import UtilitySpec
from ...jit.module import load_stepping
from ...planner.tiles import requests_of
from ...torch_modes import refuse_capture
from ..arguments.calls import Layouts, Recent
from ..device.cuda import LaunchTensors
from ..device.plan_memory import DeviceBlock, launch, state_of

Strides3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class UtilityWork:
    """What a utility does: its kernel, its requests, and items as `fajit_work` has them [n, 8].

    out_strides, lse_strides: of what it writes by rows, where it does.
    """

    spec: UtilitySpec
    lengths: _C.BatchLengths
    items: torch.Tensor
    tensors: Layouts
    head_dim: int = 1
    out_strides: Strides3 = (0, 0, 0)
    lse_strides: Strides3 | None = None
    num_pages: int = 0


_plans: Recent[tuple[object, ...], tuple[_C.BatchCall, DeviceBlock]] = Recent(64)


def run_utility(
    signature: tuple[object, ...],
    target: str,
    device: torch.device,
    make: Callable[[], UtilityWork],
    tensors: LaunchTensors,
) -> None:
    """Plan a utility, or find the plan of a signature, and launch it.

    signature: all that `make` depends on.

    Raises:
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: CUDA refused the launch or the kernel, or a stream is being captured in a graph
            and there is no plan yet.
    """
    key = (target, device, *signature)
    found = _plans.get(key)
    if found is None:
        refuse_capture(
            device, "a call that was not planned yet is made", "make the same call once before it"
        )
        found = _plans.keep(key, _plan(make(), target, device))
    call, block = found
    launch(block, call, tensors, 1.0)


def _plan(work: UtilityWork, target: str, device: torch.device) -> tuple[_C.BatchCall, DeviceBlock]:
    _, module = load_stepping(requests_of(work.spec))
    items = work.items.to(torch.int32).contiguous().numpy().tobytes()
    core = _C.BatchCall(
        _C.BatchPlan.of_work(items),
        work.lengths,
        (module, None),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=work.head_dim,
        head_dim_v=work.head_dim,
    )
    none = (0, 0, 0)
    call = core.bind(
        strides=(none, none, none, work.out_strides, work.lse_strides or none),
        layouts=work.tensors,
        num_pages=work.num_pages,
        flags=0 if work.lse_strides is None else _C.WRITE_LSE,
    )
    state = state_of(device, target)
    state.prepare(module)
    return call, state.upload(core)


def layouts(tensors: Sequence[torch.Tensor]) -> Layouts:
    """Sizes and strides of param tensors."""
    return tuple((tuple(t.shape), t.stride()) for t in tensors)


def addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Where tensors with entries begin, else 0."""
    return tuple(t.data_ptr() if t.numel() else 0 for t in tensors)
