"""Kernels on devices: loading them, and one launch of them on torch's current stream.

Calls, batches and utilities launch in the same way: without a device-to-host copy or a
synchronisation, so a launch can be captured in a CUDA graph.

A plan's memory must not be reused while a kernel reads it. It is written on one stream; another
stream that uses it waits for the write once and is recorded as a user. Everything that a captured
launch reads is kept alive for the life of the process, as the graph may be replayed at any time;
that includes params, which may be defaults without another owner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import _C
from ...codegen.spec import KernelSpec
from ...errors import InputError, LaunchError
from ...jit.cache.layers import driver_version, too_old, version_words
from ...jit.module import min_driver, residency_shortages, resources
from ...planner.devices import Device, device_hardware
from ...planner.tiles import slots
from ...torch_modes import is_capturing
from ...variants.binding import Structure
from ..arguments.calls import address_of

if TYPE_CHECKING:
    from .plan_memory import DeviceState

log = logging.getLogger(__name__)

EMULATED_SLOTS = 8
"""Workers that emulated launches are planned for: enough that long keys are split."""

_KERNEL = "fajit_attention_kernel"
# A kernel has 4096 bytes of parameters, of which the argument block takes 488 and tensor maps 256.
_PARAM_BYTES = 3200
_TENSOR_BYTES = 136
_SCALAR_BYTES = 32  # with the values that the host derives from it


# --- kernels --------------------------------------------------------------------------------------


def check_params(known: Structure) -> None:
    """Raises InputError for a variant with more params than a kernel takes."""
    tensors, scalars = len(known.tensor_names), len(known.scalar_kinds)
    if _TENSOR_BYTES * tensors + _SCALAR_BYTES * scalars > _PARAM_BYTES:
        raise InputError(
            f"the variant reads {tensors} tensors, range tables included, and {scalars} numbers; "
            f"the parameters of a CUDA kernel hold {_PARAM_BYTES // _TENSOR_BYTES} tensors or "
            f"{_PARAM_BYTES // _SCALAR_BYTES} numbers: put some into one tensor"
        )


def workers(spec: KernelSpec, device: torch.device, module: _C.Module) -> int:
    """Thread blocks of a kernel that a device runs concurrently."""
    found = hardware(device)
    return EMULATED_SLOTS if found is None else max(1, slots(spec, found, _registers(module)).total)


def hardware(device: torch.device) -> Device | None:
    """The device as the planner sees it; None for emulated targets, which run on the CPU."""
    return _hardware(ordinal(device)) if device.type == "cuda" else None


def _registers(module: _C.Module) -> int | None:
    """Registers per thread, from the resource report of its cache entry; None if it has none."""
    report = resources(module)
    return None if report is None else report.kernel(_KERNEL).registers


_hardware = cache(device_hardware)
_driver_runs: set[str] = set()


def check_driver(module: _C.Module) -> None:
    """Raises LaunchError if the driver is older than the artifact's toolkit requires."""
    if module.path in _driver_runs:
        return
    needed = min_driver(module)
    version = driver_version()
    if needed is not None and too_old(version, needed):
        raise LaunchError(
            f"this machine's driver supports CUDA {version_words(version)}, but "
            f"the kernel needs driver {needed} or newer: update the driver, or compile with an "
            f"older toolkit (FLASHATTN_JIT_CUDA_HOME)\n  artifact: {module.path}"
        )
    _driver_runs.add(module.path)


_compared: dict[tuple[str, int], int] = {}  # (artifact, device): most blocks that were compared
_shortages: set[tuple[str, str]] = set()  # (artifact, shortage) that were logged


def check_residency(module: _C.Module, index: int, planned_workers: int) -> None:
    """Warns, once, of kernels loaded on a device that holds fewer of their blocks than planned.

    A later plan is compared too if it plans for more blocks. Their threads and shared memory are
    the artifact's, the same in all launches.
    """
    slots_per_sm = planned_workers // _hardware(index).num_sms if planned_workers else 0
    if slots_per_sm <= _compared.get((module.path, index), -1):
        return
    _compared[module.path, index] = slots_per_sm
    for shortage in residency_shortages(module.residency(index), index, slots_per_sm):
        if (module.path, shortage) not in _shortages:
            _shortages.add((module.path, shortage))
            log.warning("%s\n  artifact: %s", shortage, module.path)


# --- launches -------------------------------------------------------------------------------------


class LaunchTensors(NamedTuple):
    """The tensors of one launch.

    params: the variant's (num_params), then its range tables; `names` are their names. workspace:
    uint8, at least the call's workspace_bytes, at a multiple of 16 bytes. states: of a block mask.
    allocations: the memory that the emulator lets kernels access, as (name, tensor, writable); by
    default that of the other fields.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    params: Sequence[torch.Tensor] = ()
    addresses: tuple[int, ...] = ()
    scalars: tuple[int | float, ...] = ()
    workspace: torch.Tensor | None = None
    states: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    key_blocks: torch.Tensor | None = None
    names: Sequence[str] = ()
    num_params: int = 0
    allocations: Sequence[tuple[str, torch.Tensor, bool]] = ()


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """A plan's arrays in the memory of the device that runs its kernels, uint8.

    state: the `DeviceState` that owns it. ready: event after the copy, None on emulated targets.
    streams: the streams that are ordered after the copy. used: events after the runs, by stream.
    """

    memory: torch.Tensor
    state: DeviceState
    ready: Any = None
    streams: set[int] = field(default_factory=set)
    used: dict[int, Any] = field(default_factory=dict)

    def copied(self, index: int) -> None:
        """Record that the copy was enqueued on the current stream of device `index`."""
        stream = torch.cuda.current_stream(index)
        self.ready = torch.cuda.Event()
        self.ready.record(stream)
        self.streams.add(stream.cuda_stream)

    def join(self, stream: int, index: int) -> None:
        """Order a stream after the copy, and the memory's release after the stream's work."""
        if stream not in self.streams:
            current = torch.cuda.current_stream(index)
            self.ready.wait(current)
            self.memory.record_stream(current)
            self.streams.add(stream)


_captured: dict[int, object] = {}  # objects that captured launches read, by identity


def ordinal(device: torch.device) -> int:
    """A CUDA device's number."""
    return torch.cuda.current_device() if device.index is None else device.index


def enqueue(
    call: _C.BatchCall,
    block: DeviceBlock,
    t: LaunchTensors,
    scale: float,
    device: torch.device,
    used: Sequence[object],
) -> int | None:
    """Launch a call; returns the stream, None if it is being captured.

    used: objects that the launch reads, kept alive if it is captured; params are kept as well.
    (Range tables and the workspace belong to the graph's memory pool, or to the caller.) Raises
    LaunchError.
    """
    index = ordinal(device)
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    capturing = is_capturing(device)
    if capturing:
        _captured.update((id(kept), kept) for kept in (*used, *t.params[: t.num_params]))
    else:
        block.join(stream, index)
    call.launch(*launch_values(block.memory, t, scale), stream=stream, device=index)
    return None if capturing else stream


LaunchValues = tuple[
    int, int, int, int, int, float, int, tuple[int, ...], tuple[int | float, ...],
    int, int, int, int, int,
]  # fmt: skip


def launch_values(block: torch.Tensor, t: LaunchTensors, scale: float) -> LaunchValues:
    """The arguments of a native launch, in order, up to the stream."""
    # Tensors without entries have address 0, which kernels refuse; this address is never read.
    address = t.q.data_ptr() or block.data_ptr()
    return (
        address,
        t.k.data_ptr() or address,
        t.v.data_ptr() or address,
        t.out.data_ptr(),
        0 if t.lse is None else t.lse.data_ptr() or address,
        scale,
        1,  # num_threads
        t.addresses,
        t.scalars,
        address_of(t.workspace),
        address_of(t.states),
        address_of(t.page_indices),
        address_of(t.key_blocks),
        block.data_ptr(),
    )
