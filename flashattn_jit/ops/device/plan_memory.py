"""What a batch needs on devices: its plan's block, fixed memory under graphs, launches, replays.

plan() writes the plan's arrays into a pinned host buffer and copies them to the device, on torch's
current stream. Buffers form a ring: one is used again only when the event after its copy has
passed, so nothing waits and nothing is read back; where all are on their way, a new one is made.

Without limits every plan has a block of its own. With them (`fixed`) a batch has one block for
good, and copies of whatever else plans give by address (page indices, key lists, mask params): a
launch captured in a CUDA graph finds the arrays of the latest plan there. Copies come after the
runs that read the previous plan, on whichever stream those were; replays of a graph are known to
nobody, so they belong on the stream that plans, or are ordered by the caller.

Emulated targets do the same on CPU tensors. `record` is their capture: launches as data, which
`Recording.replay` runs unchanged, on what memory holds by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch

from ... import _C
from ...codegen.targets import is_emulated
from ...errors import InputError
from ...torch_modes import PLAN_FIRST, refuse_capture
from .cuda import DeviceMemory, LaunchTensors, check_driver, enqueue, ordinal
from .emulated import aligned_empty, record


class Event(Protocol):
    """As much of `torch.cuda.Event` as is used here."""

    def query(self) -> bool: ...


class _Slot(NamedTuple):
    memory: torch.Tensor
    sent: Event


class Ring:
    """Pinned host buffers that are used again when their copies are done.

    Args:
        allocate: a host buffer of so many bytes, uint8.
        recorded: an event, recorded on the stream that the last copy was put on.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], recorded: Callable[[], Event]
    ) -> None:
        self._allocate = allocate
        self._recorded = recorded
        self._slots: list[_Slot] = []  # oldest copy first

    def __len__(self) -> int:
        return len(self._slots)

    def send(self, fill: Callable[[torch.Tensor], None], target: torch.Tensor) -> None:
        """Fills a buffer of the size of `target` (uint8 [bytes]) and copies it there."""
        size = target.numel()
        memory = self._take(size)
        fill(memory[:size])
        target.copy_(memory[:size], non_blocking=True)
        self._slots.append(_Slot(memory, self._recorded()))

    def _take(self, size: int) -> torch.Tensor:
        for i, slot in enumerate(self._slots):
            if slot.memory.numel() >= size and slot.sent.query():
                return self._slots.pop(i).memory
        # Twice as large as needed now: batches grow, and pinning memory is slow.
        return self._allocate(max(4096, 2 * size))


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _recorded() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceBlock(DeviceMemory):
    """The memory of a batch's plan. used: events after the runs of each stream."""

    state: DeviceState
    used: dict[int, Any] = field(default_factory=dict)


class DeviceState:
    """The memory of one batch on a device, over all its plans.

    Args:
        device: a CUDA device; the CPU for emulated targets.
        fixed: whether memory stays where it is from the first plan on, as graphs need it.
    """

    def __init__(self, device: torch.device, target: str, fixed: bool) -> None:
        self.device = device
        self.emulated = is_emulated(target)
        self.fixed = fixed
        self._ring = Ring(_pinned, _recorded)
        self._memory: torch.Tensor | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._latest: DeviceBlock | None = None
        self._lock = Lock()

    def prepare(self, module: _C.Module) -> None:
        """Loads a module's kernels, once; runs under graph capture load nothing.

        Raises:
            LaunchError: the driver is too old, or the kernels cannot be loaded.
        """
        if not self.emulated:
            check_driver(module)
            module.load(ordinal(self.device))

    def upload(self, core: _C.BatchCall) -> DeviceBlock:
        """A plan's block. Under `fixed` it takes the place of the previous plan's.

        Raises:
            LaunchError: the current stream is being captured in a graph.
            InputError: under `fixed`, a plan of other limits.
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
            self._latest = block
            return block

    def stage(self, name: str, tensor: torch.Tensor, entries: int | None = None) -> torch.Tensor:
        """A tensor that plans give by address, as runs shall have it: contiguous, on the device.

        Under `fixed` it is copied to memory of `name` with a fixed address and room for `entries`
        (by default as many as the first tensor has). One dim: all of that memory is returned, so
        that it has an address whatever this plan needs of it. Call it before `upload`, in plan().

        Raises:
            InputError: the tensor has more entries than there is room for, or another dtype.
        """
        refuse_capture(self.device, "a plan was made", PLAN_FIRST)
        if not self.fixed:
            return self._moved(tensor)
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
                    flat = tensor.contiguous().view(-1).view(torch.uint8)
                    self._send(lambda host: _copy(host, flat), fixed.view(-1).view(torch.uint8))
                else:
                    fixed.copy_(tensor, non_blocking=True)
            return room if tensor.dim() == 1 else fixed

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        if self.emulated or tensor.device.type != "cpu" or not tensor.numel():
            return tensor.to(self.device)
        moved = torch.empty_like(tensor, device=self.device)
        flat = tensor.view(-1).view(torch.uint8)
        with self._lock:
            self._send(lambda host: _copy(host, flat), moved.view(-1).view(torch.uint8))
        return moved

    def _send(self, fill: Callable[[torch.Tensor], None], target: torch.Tensor) -> None:
        with torch.cuda.device(ordinal(self.device)):
            self._ring.send(fill, target)

    def _empty(self, size: int) -> torch.Tensor:
        if not self.emulated:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        return aligned_empty(size)

    def _wait_for_uses(self) -> None:
        """Orders the current stream after the runs that read what is about to be overwritten."""
        latest = self._latest
        if self.emulated or latest is None:
            return
        current = torch.cuda.current_stream(ordinal(self.device))
        if current.cuda_stream not in latest.streams:
            latest.ready.wait(current)
        for event in latest.used.values():
            event.wait(current)

    def is_stale(self, block: DeviceBlock) -> bool:
        """Whether a later plan has taken a block's place."""
        return self.fixed and block is not self._latest


def _copy(host: torch.Tensor, source: torch.Tensor) -> None:
    host.copy_(source)


@lru_cache(maxsize=64)
def state_of(device: torch.device, target: str) -> DeviceState:
    """The memory of all plans of dense and packed calls on a device, one block a plan."""
    return DeviceState(device, target, fixed=False)


def launch(block: DeviceBlock, call: _C.BatchCall, t: LaunchTensors, scale: float) -> None:
    """Run a plan: on torch's current stream, or emulated.

    Raises:
        InputError: a later plan has taken the block's place.
        LaunchError: CUDA refused a launch.
        EmulatorFault: a kernel did what it must not.
    """
    state = block.state
    if state.is_stale(block):
        raise InputError("a later plan() has replaced this plan: run with the latest one")
    if state.emulated:
        record(block, call, t, scale).replay()
        return
    used = (block, t.page_indices, t.key_blocks)
    stream = enqueue(call, block, t, scale, state.device, used)
    if state.fixed and stream is not None:
        _note_use(block, stream, ordinal(state.device))


def _note_use(block: DeviceBlock, stream: int, index: int) -> None:
    event = block.used.get(stream)
    if event is None:
        event = block.used[stream] = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))
