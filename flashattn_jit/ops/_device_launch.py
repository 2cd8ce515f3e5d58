"""One launch of CUDA kernels: its tensors, the plan's memory, the stream that it goes to.

Calls and batches launch alike: nothing is read back or waited for, on torch's current stream, so a
launch can be captured in a CUDA graph.

Memory of ours that a kernel reads must not be reused too early. It is made on one stream: another
one waits for it once and is recorded as a user. What a captured launch reads is kept for good, also
params, which may be defaults that nobody else holds: the graph may be replayed at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import _C


class LaunchTensors(NamedTuple):
    """The tensors of one launch.

    params: the variant's (num_params), then its range tables, named by `names`. workspace: uint8,
    at least the call's workspace_bytes, at a multiple of 16 bytes. states: of a block mask.
    allocations: what the emulator lets the kernels touch, as (name, tensor, writable); by default
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
    workspace: torch.Tensor | None = None
    states: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    key_blocks: torch.Tensor | None = None
    names: Sequence[str] = ()
    num_params: int = 0
    allocations: Sequence[tuple[str, torch.Tensor, bool]] = ()


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """A plan's arrays where its kernels run, uint8.

    ready: event after their copy, None on emulated targets. streams: those that are ordered after
    it.
    """

    memory: torch.Tensor
    ready: Any = None
    streams: set[int] = field(default_factory=set)

    def copied(self, index: int) -> None:
        """Called once the copy is on its way, on the current stream of device `index`."""
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


_captured: dict[int, object] = {}  # what graphs use, by identity


def keep_for_graphs(used: object) -> None:
    """Holds for good what a captured launch reads."""
    _captured[id(used)] = used


def is_capturing() -> bool:
    """Whether torch's current stream is being captured in a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def ordinal(device: torch.device) -> int:
    """A CUDA device's number."""
    return torch.cuda.current_device() if device.index is None else device.index


def enqueue(
    call: _C.Call | _C.BatchCall,
    block: DeviceMemory,
    t: LaunchTensors,
    scale: float,
    device: torch.device,
    used: Sequence[object],
) -> int | None:
    """Launch a call; returns the stream, None where it is being captured.

    used: what the launch reads, to be kept where it is captured; params are kept as well. (Range
    tables and the workspace belong to the graph itself, or to the caller.)

    Raises:
        LaunchError: CUDA refused the launch.
    """
    index = ordinal(device)
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    capturing = is_capturing()
    if capturing:
        for kept in (*used, *t.params[: t.num_params]):
            keep_for_graphs(kept)
    else:
        block.join(stream, index)
    call.launch(*launch_values(block.memory, t, scale), stream=stream, device=index)
    return None if capturing else stream


LaunchValues = tuple[
    int, int, int, int, int, float, int, tuple[int, ...], tuple[int | float, ...],
    int, int, int, int, int,
]  # fmt: skip


def launch_values(block: torch.Tensor, t: LaunchTensors, scale: float) -> LaunchValues:
    """What a native launch takes, in order, up to the stream."""
    # Tensors without entries have the address 0, which kernels refuse; they will not use this one.
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
        _address(t.workspace),
        _address(t.states),
        _address(t.page_indices),
        _address(t.key_blocks),
        block.data_ptr(),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
