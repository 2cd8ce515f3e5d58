"""Plans in device memory: uploads, memory at fixed addresses for CUDA graphs, launches.

plan() writes the plan's arrays into a pinned host buffer and copies them to the device, on torch's
current stream. Buffers form a ring: a buffer is reused only when the event after its copy has
completed, so the host never waits; if all copies are pending, a new buffer is allocated.

Without `fixed` every plan has a block of its own. With it (for CUDA graphs) a batch keeps one
block, and fixed copies of the other arrays that plans pass by address (page indices, key lists,
mask params), so that a captured launch reads the arrays of the latest plan. A copy is ordered after
the runs that read the previous plan, on all of their streams. Replays of a graph cannot be tracked:
the caller replays on the stream that plans, or orders them.

Another thread may be capturing a graph in CUDA's global mode, which a query of an event or an
allocation in any thread invalidates. So plans query and allocate in the relaxed mode; the min/max
tables of mask params on a device, which torch computes, are not covered.

Emulated targets do the same on CPU tensors. `record` is their capture: launches as data, which
`Recording.replay` runs unchanged, on the contents of memory at that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch

from ... import _C
from ...codegen.targets import is_emulated
from ...errors import InputError
from ...torch_modes import PLAN_FIRST, refuse_capture
from ..arguments.calls import aligned_empty
from .cuda import (
    DeviceBlock,
    LaunchTensors,
    check_driver,
    check_residency,
    enqueue,
    ordinal,
)
from .emulated import record


class _Slot(NamedTuple):
    memory: torch.Tensor
    sent: Any  # a torch.cuda.Event after the copy


class Ring:
    """Pinned host buffers that are reused when their copies have completed.

    Args:
        allocate: returns a uint8 host buffer of the given size in bytes.
        recorded: returns an event, recorded on the current stream, where copies are enqueued.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], recorded: Callable[[], Any]
    ) -> None:
        self._allocate = allocate
        self._recorded = recorded
        self._slots: list[_Slot] = []  # oldest copy first

    def __len__(self) -> int:
        return len(self._slots)

    def send(self, fill: Callable[[torch.Tensor], object], target: torch.Tensor) -> None:
        """Fills a buffer of the size of `target` (uint8 [bytes]) and copies it to `target`."""
        size = target.numel()
        memory = self._take(size)
        fill(memory[:size])
        target.copy_(memory[:size], non_blocking=True)
        self._slots.append(_Slot(memory, self._recorded()))

    def _take(self, size: int) -> torch.Tensor:
        for i, slot in enumerate(self._slots):
            if slot.memory.numel() >= size and slot.sent.query():
                return self._slots.pop(i).memory
        # Twice the size needed now: batches grow, and pinning memory is slow.
        return self._allocate(max(4096, 2 * size))


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """A context in which this thread's calls do not invalidate the captures of other threads."""
    previous = _C.exchange_capture_mode(_C.RELAXED_CAPTURES)
    try:
        yield
    finally:
        _C.exchange_capture_mode(previous)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


class DeviceState:
    """The device memory of one batch, over all its plans.

    Args:
        device: a CUDA device; the CPU for emulated targets.
        fixed: whether later plans reuse the addresses of the first plan, which graphs need.

    latest: the block of the latest plan.
    """

    def __init__(self, device: torch.device, target: str, fixed: bool) -> None:
        self.device = device
        self.emulated = is_emulated(target)
        self.fixed = fixed
        self._ring = Ring(_pinned, _recorded)
        self._memory: torch.Tensor | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self.latest: DeviceBlock | None = None
        self._lock = Lock()

    def prepare(self, module: _C.Module, workers: int = 0) -> None:
        """Loads a module's kernels, once, so that captured runs need not.

        workers: that work is planned for, on all multiprocessors; 0 if each item has its own.
        Logs kernels that run fewer blocks than planned. Raises LaunchError.
        """
        if not self.emulated:
            check_driver(module)
            index = ordinal(self.device)
            module.load(index)
            check_residency(module, index, workers)

    def upload(self, core: _C.BatchCall) -> DeviceBlock:
        """A plan's block. If `fixed`, it overwrites the previous plan's.

        Raises:
            LaunchError: the current stream is being captured in a graph.
            InputError: `fixed`, and the block has another size than the first plan's.
        """
        refuse_capture(self.device, "a plan was made", PLAN_FIRST)
        size = core.block_bytes
        with self._lock:
            memory = self._memory
            if memory is None or not self.fixed:
                memory = self._empty(max(size, 1))
            elif memory.numel() != max(size, 1):
                raise InputError(
                    f"the plan's block has {size} bytes, the first plan's {memory.numel()}: plans "
                    f"of one batch share their limits, worker counts and kinds of storage"
                )
            if self.fixed:
                self._memory = memory
                self._wait_for_uses()
            block = DeviceBlock(memory, state=self)
            if self.emulated:
                core.write_block(memory.data_ptr(), size)
            else:
                self._send(lambda host: core.write_block(host.data_ptr(), size), memory[:size])
                block.copied(ordinal(self.device))
            self.latest = block
            return block

    def stage(self, name: str, tensor: torch.Tensor, entries: int | None = None) -> torch.Tensor:
        """A contiguous copy on the device of a tensor that plans pass by address.

        If `fixed`, it is copied to the memory of `name`, which has a fixed address and room for
        `entries` (by default those of the first tensor). For a tensor of one dim, all of that
        memory is returned, so that it has an address even if the tensor is empty. plan() calls this
        before `upload`. Raises InputError for a tensor of another dtype or with too many entries.
        """
        refuse_capture(self.device, "a plan was made", PLAN_FIRST)
        if not self.fixed:
            return self.moved(tensor)
        with self._lock:
            room = self._staged.get(name)
            if room is None:
                size = tensor.numel() if entries is None else entries
                raw = self._empty(max(size * tensor.element_size(), 1))
                room = raw[: size * tensor.element_size()].view(tensor.dtype)
            if tensor.dtype != room.dtype or tensor.numel() > room.numel():
                raise InputError(
                    f"{name} has {tensor.numel()} entries of {tensor.dtype}, but the limits leave "
                    f"room for {room.numel()} of {room.dtype}"
                )
            self._staged[name] = room
            self._wait_for_uses()
            fixed = room[: tensor.numel()].view(tensor.shape)
            if tensor.numel():
                if tensor.device.type == "cpu" and not self.emulated:
                    self._copy(tensor, fixed)
                else:
                    fixed.copy_(tensor, non_blocking=True)
            return room if tensor.dim() == 1 else fixed

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, or the tensor itself where it is one."""
        if self.emulated or not tensor.is_cpu or not tensor.numel():
            with contextlib.nullcontext() if self.emulated else _beside_captures():
                return tensor.contiguous().to(self.device)
        tensor = tensor.contiguous()
        moved = self._empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        with self._lock:
            self._copy(tensor, moved)
        return moved

    def _copy(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a host tensor to contiguous device memory, through the ring."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        self._send(lambda host: host.copy_(flat), target.view(-1).view(torch.uint8))

    def _send(self, fill: Callable[[torch.Tensor], object], target: torch.Tensor) -> None:
        with torch.cuda.device(ordinal(self.device)), _beside_captures():
            self._ring.send(fill, target)

    def _empty(self, size: int) -> torch.Tensor:
        if self.emulated:
            return aligned_empty(size)
        with _beside_captures():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _wait_for_uses(self) -> None:
        """Orders the current stream after the runs that read the memory about to be written."""
        latest = self.latest
        if self.emulated or latest is None:
            return
        current = torch.cuda.current_stream(ordinal(self.device))
        if current.cuda_stream not in latest.streams:
            latest.ready.wait(current)
        for event in latest.used.values():
            event.wait(current)


@lru_cache(maxsize=64)
def state_of(device: torch.device, target: str) -> DeviceState:
    """The memory of all plans of dense and packed calls on a device, one block per plan."""
    return DeviceState(device, target, fixed=False)


def launch(block: DeviceBlock, call: _C.BatchCall, t: LaunchTensors, scale: float) -> None:
    """Run a plan: on torch's current stream, or emulated.

    Raises:
        InputError: a later plan has overwritten the block.
        LaunchError: CUDA refused a launch.
        EmulatorFault: a kernel made an illegal access or another error.
    """
    state = block.state
    if state.fixed and block is not state.latest:
        raise InputError("a later plan() has replaced this plan: run with the latest one")
    if state.emulated:
        record(block, call, t, scale).replay()
        return
    used = (block, t.page_indices, t.key_blocks)
    stream = enqueue(call, block, t, scale, state.device, used)
    if state.fixed and stream is not None:
        if stream not in block.used:
            block.used[stream] = torch.cuda.Event()
        block.used[stream].record(torch.cuda.current_stream(ordinal(state.device)))
