"""A CUDA source compiled to PTX and run in the emulator on tensors, for tests of device headers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from flashattn_jit.env import include_dir
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.emulator import programs

TARGET = "sm_80"


def nvcc(source: Path, *flags: str) -> str:
    """Compiles a source in its folder with the flags; returns the compiler's output."""
    toolkit = find_toolkit()
    assert toolkit is not None
    folders = [include_dir()]
    lean: list[str] = []
    if toolkit.takes_lean_header():
        folders.insert(0, Path(include_dir()) / "fajit/cuda/lean")
        lean = ["-Xcompiler=-D__NV_LEGACY_LAUNCH,-D__COMMON_FUNCTIONS_H__"]
    command = [str(toolkit.nvcc), "-std=c++17", f"-arch={TARGET}", *lean, *flags]
    command += [f"-I{folder}" for folder in folders]
    run = subprocess.run(
        [*command, source.name], cwd=source.parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


class Unit:
    """The kernels of a CUDA source, as a program of the emulator."""

    def __init__(self, text: str, folder: Path) -> None:
        source = folder / "unit.cu"
        source.write_text(text)
        nvcc(source, "-ptx", "-lineinfo", "-o", "unit.ptx")
        self.program = programs.Program((folder / "unit.ptx").read_text())

    def run(
        self,
        kernel: str,
        params: bytes,
        tensors: Mapping[str, torch.Tensor],
        written: tuple[str, ...],
        *,
        blocks: tuple[int, int, int] = (1, 1, 1),
        threads: int = 32,
    ) -> None:
        """Runs a kernel with the param struct `params`; it may use only the memory of `tensors`."""
        allocations = [
            (name, t.data_ptr(), t.untyped_storage().nbytes(), name in written)
            for name, t in tensors.items()
            if t.numel()
        ]
        self.program.run(kernel, blocks, (threads, 1, 1), 0, params, allocations)


def pointers(*tensors: torch.Tensor) -> bytes:
    """A param struct of the tensors' addresses."""
    return b"".join(ctypes.c_uint64(t.data_ptr()) for t in tensors)
