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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch

from .. import _C, env
from ..codegen.target import is_emulated
from ..errors import InputError, LaunchError
from ..jit.module import kernel_ptx
from . import _device, _driver

_ALIGNMENT = 128  # of blocks; torch's allocations on devices are aligned to more


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
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _recorded() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """A plan's arrays where its kernels run.

    memory: uint8. ready: event after its copy; streams: those that are ordered after it; used:
    events after runs on streams other than the one that planned.
    """

    state: DeviceState
    memory: torch.Tensor
    version: int
    ready: Any = None
    streams: set[int] = field(default_factory=set)
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
            _driver.check(module)
            module.load(_device.ordinal(self.device))

    def upload(self, core: _C.BatchCall) -> DeviceBlock:
        """A plan's block. Under `fixed` it takes the place of the previous plan's.

        Raises:
            LaunchError: the current stream is being captured in a graph.
            InputError: under `fixed`, a plan of other limits.
        """
        _refuse_capture(self.device)
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
            block = DeviceBlock(self, memory, 1 + (self._latest.version if self._latest else 0))
            if self.emulated:
                core.write_block(memory.data_ptr(), size)
            else:
                self._send(lambda host: core.write_block(host.data_ptr(), size), memory[:size])
                self._mark(block)
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
        _refuse_capture(self.device)
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
        with torch.cuda.device(_device.ordinal(self.device)):
            self._ring.send(fill, target)

    def _empty(self, size: int) -> torch.Tensor:
        if not self.emulated:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        return raw[-raw.data_ptr() % _ALIGNMENT :][:size]

    def _mark(self, block: DeviceBlock) -> None:
        index = _device.ordinal(self.device)
        stream = torch.cuda.current_stream(index)
        block.ready = torch.cuda.Event()
        block.ready.record(stream)
        block.streams.add(stream.cuda_stream)

    def _wait_for_uses(self) -> None:
        """Orders the current stream after the runs that read what is about to be overwritten."""
        latest = self._latest
        if self.emulated or latest is None:
            return
        current = torch.cuda.current_stream(_device.ordinal(self.device))
        if current.cuda_stream not in latest.streams:
            latest.ready.wait(current)
        for event in latest.used.values():
            event.wait(current)

    def is_stale(self, block: DeviceBlock) -> bool:
        """Whether a later plan has taken a block's place."""
        return self.fixed and block is not self._latest


def _copy(host: torch.Tensor, source: torch.Tensor) -> None:
    host.copy_(source)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "plan() was called while a CUDA graph is being captured: plan before the capture, then "
            "capture run(), and plan again before each replay"
        )


class BatchTensors(NamedTuple):
    """The tensors of one run. params: the variant's, then its range tables, named by `names`.

    workspace: uint8, at least the call's workspace_bytes, at a multiple of 16 bytes. num_params: of
    the variant; None where there are no range tables.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    params: Sequence[torch.Tensor] = ()
    addresses: tuple[int, ...] = ()
    scalars: tuple[int | float, ...] = ()
    page_indices: torch.Tensor | None = None
    key_blocks: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    names: Sequence[str] = ()
    num_params: int | None = None


def launch(block: DeviceBlock, call: _C.BatchCall, t: BatchTensors, scale: float) -> None:
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
    index = _device.ordinal(state.device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        # Range tables, and the workspace, belong to the graph itself or to the caller.
        for used in (block, t.page_indices, t.key_blocks, *t.params[: t.num_params]):
            _device.keep_for_graphs(used)
    elif stream not in block.streams:
        current = torch.cuda.current_stream(index)
        block.ready.wait(current)
        block.memory.record_stream(current)
        block.streams.add(stream)
    call.launch(*_native(block, t, scale), stream=stream, device=index)
    if state.fixed and not capturing:
        _note_use(block, stream, index)


def _note_use(block: DeviceBlock, stream: int, index: int) -> None:
    event = block.used.get(stream)
    if event is None:
        event = block.used[stream] = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))


_Native = tuple[
    int, int, int, int, int, float, int, tuple[int, ...], tuple[int | float, ...],
    int, int, int, int,
]  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _native(block: DeviceBlock, t: BatchTensors, scale: float) -> _Native:
    """What `_C.BatchCall.launch` takes, in order, up to the stream."""
    # Tensors without entries have the address 0, which kernels refuse; they will not use this one.
    address = t.q.data_ptr() or block.memory.data_ptr()
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
        _address(t.workspace),
        _address(t.page_indices),
        _address(t.key_blocks),
        block.memory.data_ptr(),
    )


# --- emulated targets -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of one run as data, with the memory that they may touch: a captured graph."""

    launches: tuple[tuple[_C.Module, _C.Launch], ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]

    def replay(self) -> None:
        """Runs the launches unchanged, on what memory holds now.

        Raises:
            EmulatorFault: a kernel did what it must not.
        """
        for module, (kernel, grid, block, shared_bytes, params) in self.launches:
            if 0 in grid:
                continue
            # Merges read what the kernels before them wrote.
            written = ("out", "lse") if "merge" in kernel else ("out", "lse", "workspace")
            allocations = [
                _device.extent(name, tensor, name in written, name not in written)
                for name, tensor in self.tensors
                if tensor.numel()
            ]
            _program(module).run(
                kernel, grid, block, shared_bytes, params, allocations,
                async_copies=env.emulator_copies(),
            )  # fmt: skip


def record(block: DeviceBlock, call: _C.BatchCall, t: BatchTensors, scale: float) -> Recording:
    """The launches of a run on an emulated target, as a CUDA graph would capture them."""
    launches = call.plan_launches(*_native(block, t, scale))
    named = {
        "q": t.q, "k": t.k, "v": t.v, "page_indices": t.page_indices, "key_blocks": t.key_blocks,
        "workspace": t.workspace, "plan": block.memory, "out": t.out, "lse": t.lse,
    }  # fmt: skip
    tensors = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    tensors += zip(t.names, t.params, strict=True)
    return Recording(tuple(launches), tuple(tensors))


def _program(module: _C.Module) -> Any:
    return _device.program(kernel_ptx(module))
