"""Launches as data, run by the emulator on CPU tensors: what a captured graph is on a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ... import _C, env
from ...jit.module import kernel_ptx
from .cuda import DeviceMemory, LaunchTensors, launch_values

if TYPE_CHECKING:
    from ...jit.emulator.programs import Allocation, Program

_ALIGNMENT = 128  # torch's allocations on devices are aligned to more


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of one call as data, with the memory that they may touch.

    tensors: (name, tensor, writable). Results and the workspace hold nothing before they are
    written; merges read the workspace that the kernels before them wrote.
    """

    launches: tuple[tuple[_C.Module, _C.Launch], ...]
    tensors: tuple[tuple[str, torch.Tensor, bool], ...]

    def replay(self) -> None:
        """Runs the launches unchanged, on what memory holds now.

        Raises:
            EmulatorFault: a kernel did what it must not.
        """
        for module, (kernel, grid, block, shared_bytes, params) in self.launches:
            if 0 in grid:
                continue
            merges = "merge" in kernel
            allocations: list[Allocation] = []
            for name, tensor, writable in self.tensors:
                if not tensor.numel():
                    continue
                initialised = name not in _RESULTS
                if name == "workspace":
                    writable, initialised = not merges, merges
                allocations.append(extent(name, tensor, writable, initialised))
            program(module).run(
                kernel, grid, block, shared_bytes, params, allocations,
                async_copies=env.emulator_copies(),
            )  # fmt: skip


_RESULTS = ("out", "lse")  # kernels read of them what they wrote themselves at most


def record(block: DeviceMemory, call: _C.BatchCall, t: LaunchTensors, scale: float) -> Recording:
    """The launches of a call on an emulated target, as a CUDA graph would capture them."""
    launches = call.plan_launches(*launch_values(block.memory, t, scale))
    own = [("plan", block.memory, False)]
    if t.workspace is not None:
        own.append(("workspace", t.workspace, True))
    return Recording(tuple(launches), (*(t.allocations or _allocations(t)), *own))


def _allocations(t: LaunchTensors) -> list[tuple[str, torch.Tensor, bool]]:
    inputs = {
        "q": t.q, "k": t.k, "v": t.v, "block_mask": t.states, "page_indices": t.page_indices,
        "key_blocks": t.key_blocks,
    }  # fmt: skip
    named = [(name, tensor, False) for name, tensor in inputs.items() if tensor is not None]
    named += [(name, tensor, False) for name, tensor in zip(t.names, t.params, strict=True)]
    named.append(("out", t.out, True))
    return named if t.lse is None else [*named, ("lse", t.lse, True)]


@lru_cache(maxsize=64)
def program(module: _C.Module) -> Program:
    """The emulator's program of a module's kernels."""
    from ...jit.emulator.programs import Program  # needed by nobody who has a device

    return Program(kernel_ptx(module))


def extent(
    name: str, tensor: torch.Tensor, writable: bool, initialised: bool
) -> tuple[str, int, int, bool, bool]:
    """An allocation of the emulator: the bytes from a view's first entry to its last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (last + 1) * tensor.element_size()
    return name, tensor.data_ptr(), end, writable, initialised


def aligned_empty(size: int) -> torch.Tensor:
    """uint8 memory, aligned as allocations of a device are."""
    raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    return raw[-raw.data_ptr() % _ALIGNMENT :][:size]
