"""Planned calls of CUDA kernels: on a device, or in the emulator on CPU tensors.

A plan's arrays (lengths, work) are put into device memory once, when the call is planned. A launch
then reads nothing back, waits for nothing and allocates only its workspace, from torch's allocator,
on torch's current stream; so a planned call can be captured in a CUDA graph.

Memory of ours that a kernel reads must not be reused too early. The plan's block is made on one
stream: another one waits for it once and is recorded as a user. A plan that was captured is kept
for good with the params that the graph reads, which may be defaults that nobody else holds: the
graph may be replayed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from .. import _C, env
from ..codegen.spec import KernelSpec
from ..codegen.target import is_emulated
from ..errors import InputError, LaunchError
from ..jit import toolchain
from ..jit.module import kernel_ptx, load_stepping
from ..planner import choose, fallbacks, min_chunk, slots
from ..planner.devices import Device, device_hardware
from ..planner.requests import requests_of
from . import _driver
from ._direct import learn_device
from ._handles import Structure
from ._launch import (
    Geometry,
    heads_share_tiles,
    native_problem,
    planner_problem,
)

EMULATED_SLOTS = 8
"""Workers that emulated work is planned for: enough that long keys are split."""

_KERNEL = "fajit_attention_kernel"
_KEPT_CALLS = 1024
# A kernel's parameters hold 4096 bytes, of which the argument block takes 480.
_PARAM_BYTES = 3456
_TENSOR_BYTES = 136
_SCALAR_BYTES = 32  # with what the host works out of it


class CallTensors(NamedTuple):
    """The tensors of one launch. params: the variant's, then its range tables.

    allocations: what the emulator lets the kernel touch, as (name, tensor, writable); by default
    what the other fields say.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    params: Sequence[torch.Tensor] = ()
    addresses: tuple[int, ...] = ()
    scalars: tuple[int | float, ...] = ()
    states: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    allocations: Sequence[tuple[str, torch.Tensor, bool]] = ()


@dataclass(slots=True, eq=False)
class DevicePlan:
    """A planned problem whose arrays lie where its kernels run.

    spec: None for kernels that are of no variant. ptx: of emulated targets. streams: those that
    are ordered after the block's copy.
    """

    spec: KernelSpec | None
    call: _C.Call
    device: torch.device
    block: torch.Tensor
    ptx: str | None = None
    workspace_bytes: int = 0
    schedule: _C.Schedule | None = None
    num_params: int = 0  # of the variant; range tables follow
    param_names: tuple[str, ...] = ()
    ready: Any = None  # event after the block's copy
    streams: set[int] = field(default_factory=set)


_plans: dict[Geometry, DevicePlan] = {}
_captured: dict[int, object] = {}  # what graphs use, by identity
_lock = Lock()


def planned(geometry: Geometry, known: Structure, addresses: Sequence[int]) -> DevicePlan:
    """The plan of a geometry, from memory or made now.

    Raises:
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: the kernels cannot be loaded, or a stream is being captured in a graph.
        InputError: a dimension or the number of params is more than a kernel takes.
    """
    plan = _plans.get(geometry)
    if plan is None:
        plan = _plan(geometry, known, addresses)
        with _lock:
            _plans[geometry] = plan
            while len(_plans) > _KEPT_CALLS:
                _plans.pop(next(iter(_plans)))
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
    native = native_problem(g, known)
    classify = known.costed_by_mask and g.block_mask is None
    schedule = _C.schedule(
        module if classify else None,
        native,
        tile_q=spec.tile_q,
        # A tile that is not full takes as long as a full one.
        row_granule=spec.tile_q,
        tile_kv=spec.tile_kv,
        min_chunk=min_chunk(spec),
        num_workers=workers(spec, g.device, module),
        share_heads=heads_share_tiles(g),
        classify=classify,
        device=True,
        tensors=tuple(addresses),
        scalars=g.scalars or (0,) * len(known.integer_scalars),
    )
    call = _C.Call(
        module,
        native,
        schedule["work"],
        schedule["merge_work"],
        schedule["partial_rows"],
        g.flags,
    )
    names = tuple(t.name for t in known.ir.tensors)
    plan = make_plan(call, module, g.target, g.device, spec)
    plan.schedule = schedule
    plan.num_params = len(names)
    plan.param_names = names + tuple(
        f"{side} table of {names[table.slot]}" for table in known.tables for side in ("lo", "hi")
    )
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
    if is_emulated(target):
        block = torch.frombuffer(bytearray(call.device_block() or b"\0"), dtype=torch.uint8)
        ptx = kernel_ptx(module)
        return DevicePlan(spec, call, device, block, ptx, call.workspace_bytes)
    _driver.check(module)
    index = ordinal(device)
    module.load(index)
    with torch.cuda.device(index):
        block = _upload(call.device_block() or b"\0", device)
        stream = torch.cuda.current_stream(index)
        ready = torch.cuda.Event()
        ready.record(stream)
    return DevicePlan(
        spec, call, device, block, None, call.workspace_bytes, ready=ready,
        streams={stream.cuda_stream},
    )  # fmt: skip


def _upload(data: bytes, device: torch.device) -> torch.Tensor:
    """The bytes on a device, by an asynchronous copy on its current stream."""
    # Torch's allocator of pinned memory reuses it once the copy is done.
    pinned = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
    pinned.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return pinned.to(device, non_blocking=True)


def refuse_capture(device: torch.device) -> None:
    """Nothing is planned, compiled or loaded while a CUDA graph is captured."""
    if device.type == "cuda" and _is_capturing():
        raise LaunchError(
            "a call that was not planned yet is being captured in a CUDA graph; make the same call "
            "once before the capture, with the same shapes, strides, dtypes and lengths"
        )


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def ordinal(device: torch.device) -> int:
    """A CUDA device's number."""
    return torch.cuda.current_device() if device.index is None else device.index


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


def bases_are_aligned(t: CallTensors) -> bool:
    """Whether q, k, v and out start at multiples of 16 bytes."""
    return (t.q.data_ptr() | t.k.data_ptr() | t.v.data_ptr() | t.out.data_ptr()) % 16 == 0


_by_signature: dict[tuple[object, ...], DevicePlan] = {}
_KEPT_SIGNATURES = 4096


def run_signature(
    signature: tuple[Any, ...],
    geometry: Callable[..., Geometry],
    known: Structure,
    t: CallTensors,
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


def run(g: Geometry, known: Structure, t: CallTensors, scale: float) -> None:
    """Plan, or find the plan of, a geometry whose device and alignment are still to be set."""
    g = g._replace(device=t.q.device, aligned=bases_are_aligned(t))
    launch(planned(g, known, t.addresses), t, scale)


# --- launches -------------------------------------------------------------------------------------


def launch(plan: DevicePlan, t: CallTensors, scale: float) -> None:
    """Run a plan on the tensors that it was made for: on torch's current stream, or emulated.

    Raises:
        LaunchError: CUDA refused the launch.
        EmulatorFault: a kernel did what it must not.
    """
    if plan.ptx is not None:
        _emulate(plan, t, scale)
        return
    index = ordinal(plan.device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    if _is_capturing():
        # Range tables come last; those made during the capture belong to the graph itself.
        for used in (plan, *t.params[: plan.num_params]):
            keep_for_graphs(used)
    elif stream not in plan.streams:
        _join(plan, stream, index)
    workspace = None
    if plan.workspace_bytes:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=plan.device)
    address = 0 if workspace is None else workspace.data_ptr()
    plan.call.launch(*_native(plan, t, scale, address), stream=stream, device=index)


def keep_for_graphs(used: object) -> None:
    """Holds for good what a captured launch reads: its graph may be replayed at any time."""
    _captured[id(used)] = used


def _join(plan: DevicePlan, stream: int, index: int) -> None:
    """Order a stream after the block's copy, and the block's release after the stream's work."""
    current = torch.cuda.current_stream(index)
    plan.ready.wait(current)
    plan.block.record_stream(current)
    plan.streams.add(stream)


_Native = tuple[
    int, int, int, int, int, float, int, tuple[int, ...], tuple[int | float, ...],
    int, int, int, int,
]  # fmt: skip


def _native(plan: DevicePlan, t: CallTensors, scale: float, workspace: int) -> _Native:
    """What `_C.Call.launch` takes, in order, up to the stream."""
    address = t.q.data_ptr()
    return (
        address,
        # Without keys their address is 0, which kernels refuse; they will not read this one.
        t.k.data_ptr() or address,
        t.v.data_ptr() or address,
        t.out.data_ptr(),
        0 if t.lse is None else t.lse.data_ptr(),
        scale,
        1,  # num_threads
        t.addresses,
        t.scalars,
        0 if t.states is None else t.states.data_ptr(),
        workspace,
        0 if t.page_indices is None else t.page_indices.data_ptr(),
        plan.block.data_ptr(),
    )


def _emulate(plan: DevicePlan, t: CallTensors, scale: float) -> None:
    assert plan.ptx is not None
    # 128 bytes more than asked for: allocations of a device are aligned to at least as much.
    workspace = torch.empty(plan.workspace_bytes + 128, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 128 :][: plan.workspace_bytes]
    launches = plan.call.plan_launches(*_native(plan, t, scale, workspace.data_ptr()))
    named = [*(t.allocations or _allocations(plan, t)), ("plan", plan.block, False)]
    allocations = [
        extent(name, tensor, writable, name not in _RESULTS)
        for name, tensor, writable in named
        if tensor.numel()
    ]
    kernels = program(plan.ptx)
    for i, (kernel, grid, block, shared_bytes, params) in enumerate(launches):
        if 0 in grid:
            continue
        visible = allocations
        if plan.workspace_bytes:
            # The merge reads what the first kernel wrote.
            visible = [*allocations, extent("workspace", workspace, i == 0, i > 0)]
        kernels.run(
            kernel, grid, block, shared_bytes, params, visible, async_copies=env.emulator_copies()
        )


def _allocations(plan: DevicePlan, t: CallTensors) -> list[tuple[str, torch.Tensor, bool]]:
    inputs = {
        "q": t.q, "k": t.k, "v": t.v, "block_mask": t.states, "page_indices": t.page_indices,
    }  # fmt: skip
    named = [(name, tensor, False) for name, tensor in inputs.items() if tensor is not None]
    named += [(n, x, False) for n, x in zip(plan.param_names, t.params, strict=True)]
    named.append(("out", t.out, True))
    return named if t.lse is None else [*named, ("lse", t.lse, True)]


@lru_cache(maxsize=64)
def program(ptx: str) -> Any:
    """The emulator's program of a kernel's PTX."""
    from .. import _emulator  # needed by nobody who has a device

    return _emulator.Program(ptx)


_RESULTS = ("out", "lse")  # kernels read of them what they wrote themselves at most


def extent(
    name: str, tensor: torch.Tensor, writable: bool, initialised: bool
) -> tuple[str, int, int, bool, bool]:
    """An allocation of the emulator: the bytes from a view's first entry to its last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (last + 1) * tensor.element_size()
    return name, tensor.data_ptr(), end, writable, initialised
