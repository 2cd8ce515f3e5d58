"""Launches recorded as data and run by the emulator on CPU tensors, as a CUDA graph's are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ... import _C, env
from ...jit.module import kernel_ptx
from ..arguments import checks
from .cuda import DeviceBlock, LaunchTensors, launch_values

if TYPE_CHECKING:
    from ...jit.emulator.programs import Allocation, Program


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of one call as data, with the memory that they may access.

    tensors: (name, tensor, writable). Results and the workspace are uninitialised before the first
    kernel; merge kernels read the workspace that the kernels before them wrote.
    """

    launches: tuple[tuple[_C.Module, _C.Launch], ...]
    tensors: tuple[tuple[str, torch.Tensor, bool], ...]

    def replay(self) -> None:
        """Runs the launches unchanged, on the current contents of memory.

        Raises:
            EmulatorFault: a kernel made an illegal access or another error.
        """
        written = {name for name, _, writable in self.tensors if writable}
        for module, (kernel, grid, block, shared_bytes, params, overlaps) in self.launches:
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
                async_copies=env.emulator_copies(), overlaps=written if overlaps else None,
            )  # fmt: skip


_RESULTS = ("out", "lse")  # kernels read only entries that they wrote before


def record(block: DeviceBlock, call: _C.BatchCall, t: LaunchTensors, scale: float) -> Recording:
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
    from ...jit.emulator.programs import Program  # not needed on machines with a device

    return Program(kernel_ptx(module))


def extent(
    name: str, tensor: torch.Tensor, writable: bool, initialised: bool
) -> tuple[str, int, int, bool, bool]:
    """An allocation of the emulator: name, address, bytes, writable, initialised."""
    return name, tensor.data_ptr(), checks.extent(tensor), writable, initialised
