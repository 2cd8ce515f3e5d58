"""Small kernels for the emulator: PTX from text or from nvcc, arrays as tensors, launches."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.emulator import programs

MOMENTS: tuple[Any, ...] = ("late", "early", *range(20))
"""When asynchronous operations complete: names, and seeds of random moments."""

HEADER = ".version 8.0\n.target {target}\n.address_size 64\n"


def kernel(body: str, params: int = 4, target: str = "sm_80", shared: int = 0) -> str:
    """A PTX module with one kernel `k` whose parameters are `params` pointers: %a0, %a1, ...

    shared: bytes of a variable `buffer`. Registers: %r, %w (64 bits), %f, %d, %h (16 bits), %p.
    """
    declared = "\n".join(f"ld.param.u64 %a{i}, [p{i}];" for i in range(params))
    buffer = f".shared .align 128 .b8 buffer[{shared}];" if shared else ""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    return (
        HEADER.format(target=target)
        + f".visible .entry k({names}) {{\n"
        + ".reg .b32 %r<64>; .reg .b64 %w<64>; .reg .f32 %f<64>; .reg .f64 %d<32>;\n"
        + ".reg .b16 %h<32>; .reg .pred %p<32>; .reg .b64 %a<8>;\n"
        + f"{buffer}\n{declared}\n{body}\nret;\n}}\n"
    )


def launch(
    ptx: str,
    arrays: Sequence[np.ndarray[Any, Any]],
    *,
    name: str = "k",
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    read_only: Sequence[int] = (),
    unwritten: Sequence[int] = (),
    extra: bytes = b"",
    **options: Any,
) -> None:
    """Runs a kernel whose parameters are pointers to `arrays`, then the bytes `extra`."""
    params = b"".join(struct.pack("<Q", array.ctypes.data) for array in arrays) + extra
    allocations: list[Any] = [
        (f"array{i}", array.ctypes.data, array.nbytes, i not in read_only, i not in unwritten)
        for i, array in enumerate(arrays)
    ]
    programs.Program(ptx).run(name, grid, block, shared_bytes, params, allocations, **options)


@cache
def compile_cuda(source: str, target: str = "sm_80", options: tuple[str, ...] = ()) -> str:
    """The PTX of a CUDA source, by nvcc."""
    toolkit = find_toolkit()
    assert toolkit is not None
    name = hashlib.sha256(source.encode()).hexdigest()[:12]
    with tempfile.TemporaryDirectory(prefix="fajit-ptx-") as folder:
        path = Path(folder, f"{name}.cu")
        path.write_text(source)
        command = [
            str(toolkit.nvcc),
            "-ptx",
            "-lineinfo",
            f"-arch={target}",
            "-std=c++17",
            *options,
        ]
        subprocess.run([*command, path.name, "-o", "kernel.ptx"], cwd=folder, check=True)
        return Path(folder, "kernel.ptx").read_text()
