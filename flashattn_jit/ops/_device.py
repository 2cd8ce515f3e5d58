"""Planned calls of CUDA kernels: on a device, or in the emulator on CPU tensors.

A plan's arrays (lengths, work) are put into device memory once, when the call is planned. A launch
then allocates only its workspace, from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..codegen.spec import KernelSpec
from ..codegen.target import is_emulated
from ..errors import InputError, LaunchError
from ..jit import toolchain
from ..jit.module import load_stepping
from ..planner import choose, fallbacks, min_chunk, slots
from ..planner.devices import Device, device_hardware
from ..planner.tiles import requests_of
from . import _driver
from ._device_launch import DeviceMemory, LaunchTensors, enqueue, is_capturing, ordinal
from ._direct import learn_device
from ._emulated import aligned_empty, record
from ._handles import Structure
from ._launch import Geometry, native_call, planner_problem
from ._recent import Recent

EMULATED_SLOTS = 8
"""Workers that emulated work is planned for: enough that long keys are split."""

_KERNEL = "fajit_attention_kernel"
# A kernel's parameters hold 4096 bytes, of which the argument block takes 480.
_PARAM_BYTES = 3456
_TENSOR_BYTES = 136
_SCALAR_BYTES = 32  # with what the host works out of it


@dataclass(slots=True, eq=False)
class DevicePlan:
    """A planned problem whose arrays lie where its kernels run.

    spec: None for kernels that are of no variant.
    """

    spec: KernelSpec | None
    call: _C.Call
    device: torch.device
    block: DeviceMemory
    emulated: bool = False
    workspace_bytes: int = 0
    schedule: _C.Schedule | None = None


_plans: Recent[Geometry, DevicePlan] = Recent(1024)


def planned(geometry: Geometry, known: Structure, addresses: Sequence[int]) -> DevicePlan:
    """The plan of a geometry, from memory or made now.

    Raises:
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: the kernels cannot be loaded, or a stream is being captured in a graph.
        InputError: a dimension or the number of params is more than a kernel takes.
    """
    plan = _plans.get(geometry)
    if plan is None:
        plan = _plans.keep(geometry, _plan(geometry, known, addresses))
    return plan


def _plan(g: Geometry, known: Structure, addresses: Sequence[int]) -> DevicePlan:
    assert g.device is not None
    refuse_capture(g.device)
    if g.device.type == "cuda":
        learn_device(g.device)
    scalars = len(known.integer_scalars)
    if _TENSOR_BYTES * len(g.params) + _SCALAR_BYTES * scalars > _PARAM_BYTES:
        raise InputError(
            f"the variant reads {len(g.params)} tensors, range tables included, and {scalars} "
            f"numbers; the parameters of a CUDA kernel hold {_PARAM_BYTES // _TENSOR_BYTES} "
            f"tensors or {_PARAM_BYTES // _SCALAR_BYTES} numbers: put some into one tensor"
        )
    spec = choose(known.ir, planner_problem(g), g.target, features_of(g), known.name)
    spec, module = load_spec(spec)
    call, schedule = native_call(
        g, known, spec, module, addresses,
        tile_q=spec.tile_q,
        # A tile that is not full takes as long as a full one.
        row_granule=spec.tile_q,
        min_chunk=min_chunk(spec),
        num_workers=workers(spec, g.device, module),
        device=True,
    )  # fmt: skip
    plan = make_plan(call, module, g.target, g.device, spec)
    plan.schedule = schedule
    return plan


def load_spec(spec: KernelSpec) -> tuple[KernelSpec, _C.Module]:
    """A spec's module; the spec is that of a smaller tile where its kernel would spill."""
    place, module = load_stepping(requests_of(spec))
    return (spec, *fallbacks(spec))[place], module


def make_plan(
    call: _C.Call,
    module: _C.Module,
    target: str,
    device: torch.device,
    spec: KernelSpec | None = None,
) -> DevicePlan:
    """A call with its arrays on `device` and its kernels loaded there."""
    content = call.device_block() or b"\0"
    if is_emulated(target):
        block = DeviceMemory(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return DevicePlan(spec, call, device, block, True, call.workspace_bytes)
    _driver.check(module)
    index = ordinal(device)
    module.load(index)
    with torch.cuda.device(index):
        block = DeviceMemory(_upload(content, device))
        block.copied(index)
    return DevicePlan(spec, call, device, block, False, call.workspace_bytes)


def _upload(data: bytes, device: torch.device) -> torch.Tensor:
    """The bytes on a device, by an asynchronous copy on its current stream."""
    # Torch's allocator of pinned memory reuses it once the copy is done.
    pinned = torch.empty(len(data), dtype=torch.uint8, device="cpu", pin_memory=True)
    pinned.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return pinned.to(device, non_blocking=True)


def refuse_capture(device: torch.device) -> None:
    """Nothing is planned, compiled or loaded while a CUDA graph is captured."""
    if device.type == "cuda" and is_capturing():
        raise LaunchError(
            "a call that was not planned yet is being captured in a CUDA graph; make the same call "
            "once before the capture, with the same shapes, strides, dtypes and lengths"
        )


def features_of(g: Geometry) -> tuple[str, ...]:
    """The features of the kernel that a geometry needs."""
    wanted = {
        "block_mask": g.block_mask is not None,
        "unaligned": not _rows_are_aligned(g),
    }
    return tuple(name for name, needed in wanted.items() if needed)


def _rows_are_aligned(g: Geometry) -> bool:
    """Whether every row of q, k, v and out starts at a multiple of 16 bytes and ends at one."""
    if not g.aligned or g.head_dim % 8 or g.head_dim_v % 8:
        return False
    item = g.dtypes[0].itemsize
    out_item = 4 if g.flags & _C.PARTIAL else item
    sizes = (item, item, item, out_item)
    return all(
        stride * size % 16 == 0
        for strides, size in zip(g.strides[:4], sizes, strict=True)
        for stride in strides
    )


def workers(spec: KernelSpec, device: torch.device, module: _C.Module) -> int:
    """Thread blocks of a kernel that a device runs at once."""
    if device.type != "cuda":
        return EMULATED_SLOTS
    return max(1, slots(spec, _hardware(ordinal(device)), _registers(module)).total)


def _registers(module: _C.Module) -> int | None:
    """Registers of a thread, from the artifact's resource report; None where none is kept."""
    from ..jit import resources

    try:
        report = resources.load_report(Path(module.path).with_name(toolchain.RESOURCES))
        return report.kernel(_KERNEL).registers
    except (OSError, ValueError, KeyError, TypeError):
        return None


@cache
def _hardware(index: int) -> Device:
    return device_hardware(index)


def bases_are_aligned(t: LaunchTensors) -> bool:
    """Whether q, k, v and out start at multiples of 16 bytes."""
    return (t.q.data_ptr() | t.k.data_ptr() | t.v.data_ptr() | t.out.data_ptr()) % 16 == 0


_by_signature: dict[tuple[object, ...], DevicePlan] = {}
_KEPT_SIGNATURES = 4096


def run_signature(
    signature: tuple[Any, ...],
    geometry: Callable[..., Geometry],
    known: Structure,
    t: LaunchTensors,
    scale: float,
) -> None:
    """As `run` of ``geometry(*signature)``; a signature seen before makes no geometry."""
    device, aligned = t.q.device, bases_are_aligned(t)
    place = (signature, device, aligned)
    plan = _by_signature.get(place)
    if plan is None:
        g = geometry(*signature)._replace(device=device, aligned=aligned)
        plan = planned(g, known, t.addresses)
        if len(_by_signature) >= _KEPT_SIGNATURES:
            _by_signature.clear()
        _by_signature[place] = plan
    launch(plan, t, scale)


def run(g: Geometry, known: Structure, t: LaunchTensors, scale: float) -> None:
    """Plan, or find the plan of, a geometry whose device and alignment are still to be set."""
    g = g._replace(device=t.q.device, aligned=bases_are_aligned(t))
    launch(planned(g, known, t.addresses), t, scale)


# --- launches -------------------------------------------------------------------------------------


def launch(plan: DevicePlan, t: LaunchTensors, scale: float) -> None:
    """Run a plan on the tensors that it was made for: on torch's current stream, or emulated.

    Raises:
        LaunchError: CUDA refused the launch.
        EmulatorFault: a kernel did what it must not.
    """
    if plan.emulated:
        _emulate(plan, t, scale)
        return
    if plan.workspace_bytes:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=plan.device)
        t = t._replace(workspace=workspace)
    enqueue(plan.call, plan.block, t, scale, plan.device, (plan,))


def _emulate(plan: DevicePlan, t: LaunchTensors, scale: float) -> None:
    workspace = aligned_empty(plan.workspace_bytes)
    record(plan.block, plan.call, t._replace(workspace=workspace), scale).replay()
