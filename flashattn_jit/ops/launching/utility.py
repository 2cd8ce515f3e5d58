"""Kernels that are no attention (merging states, appending to pages), launched as calls are.

Their tensors are passed as the param tensors of a call without hooks; their work is a list of rows
that the host computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ... import _C
from ...codegen.spec import AnySpec, on_cpu
from ...jit.module import load_stepping
from ...planner.tiles import build_requests
from ...torch_modes import refuse_capture
from ..arguments.calls import Layouts, Recent
from ..device.cuda import DeviceBlock, LaunchTensors
from ..device.plan_memory import launch, state_of

Strides3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class UtilityWork:
    """The work of such a kernel: its module, its requests and its `fajit_work` items [n, 8].

    num_kv_heads: for its hooks. out_strides, lse_strides: of results that are written row by row.
    scalar_kinds: see `_C.BatchCall.bind`.
    """

    module: _C.Module
    lengths: _C.BatchLengths
    items: torch.Tensor
    tensors: Layouts
    head_dims: tuple[int, int] = (1, 1)
    num_kv_heads: int = 1
    out_strides: Strides3 = (0, 0, 0)
    lse_strides: Strides3 | None = None
    num_pages: int = 0
    scalar_kinds: str = ""


def load_kernel(spec: AnySpec) -> _C.Module:
    """The module of a kernel, built if no cache has it. Raises CompileError."""
    return load_stepping(build_requests(spec))[1]


Planned = tuple[_C.BatchCall, DeviceBlock | None]
"""A launch, and its arrays in the memory of a device, None on CPU targets."""

_plans: Recent[tuple[object, ...], Planned] = Recent(64)


def planned(
    signature: tuple[object, ...],
    target: str,
    device: torch.device,
    make: Callable[[], UtilityWork],
) -> Planned:
    """The launch of such a kernel, planned at the first call with an equal signature.

    signature: every value that the result of `make` depends on. target: CPU targets included.

    Raises:
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: a stream is being captured in a graph and there is no plan yet.
    """
    key = (target, device, *signature)
    found = _plans.get(key)
    if found is None:
        refuse_capture(
            device, "a call that was not planned yet is made", "make the same call once before it"
        )
        found = _plans.keep(key, _plan(make(), target, device))
    return found


def run_utility(
    signature: tuple[object, ...],
    target: str,
    device: torch.device,
    make: Callable[[], UtilityWork],
    tensors: LaunchTensors,
) -> None:
    """Launch such a kernel on a device, planned as by `planned`.

    Raises LaunchError where CUDA refuses the launch or the kernel, and what `planned` raises.
    """
    call, block = planned(signature, target, device, make)
    assert block is not None
    launch(block, call, tensors, 1.0)


def _plan(work: UtilityWork, target: str, device: torch.device) -> Planned:
    items = work.items.to(torch.int32).contiguous().numpy().tobytes()
    core = _C.BatchCall(
        _C.BatchPlan.of_work(items),
        work.lengths,
        (work.module, None),
        num_q_heads=work.num_kv_heads,
        num_kv_heads=work.num_kv_heads,
        head_dim=work.head_dims[0],
        head_dim_v=work.head_dims[1],
    )
    none = (0, 0, 0)
    call = core.bind(
        strides=(none, none, none, work.out_strides, work.lse_strides or none),
        layouts=work.tensors,
        scalar_kinds=work.scalar_kinds,
        num_pages=work.num_pages,
        flags=0 if work.lse_strides is None else _C.WRITE_LSE,
    )
    if on_cpu(target):
        return call, None
    state = state_of(device, target)
    state.prepare(work.module)
    return call, state.upload(core)


def layouts(tensors: Sequence[torch.Tensor]) -> Layouts:
    """Sizes and strides of param tensors."""
    return tuple((tuple(t.shape), t.stride()) for t in tensors)
