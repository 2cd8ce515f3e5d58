"""The peak rates of this machine's CPU target: fp32 FMAs, bf16 dot products, reads of memory.

    python -m benchmarks.peak [--save]

Other benchmarks run these loops too, interleaved with the kernel, as denominators of their ratios.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

from benchmarks.parts.measure import Row, arguments, interleave, median, report
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.codegen.targets import cpu_flags, has_amx

_STEPS = 1_000_000  # about 12 ms: long enough to time, short enough to interleave
_READ_BYTES = 512 << 20  # far more than an L3


class Peak:
    """The compiled loops. Each method runs a fixed amount of work on `num_threads` threads."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        self.num_threads = num_threads
        for name in ("fma_fp32", "dot_bf16"):
            getattr(library, name).argtypes = [ctypes.c_int64, ctypes.c_int]
            getattr(library, name).restype = ctypes.c_float
        library.tiles_bf16.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.read_words.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.read_words.restype = ctypes.c_int64
        self.has_bf16_dot = bool(library.has_bf16_dot())
        self.has_tiles = has_amx(default_target())
        self._step_flops: float = 2.0 * library.lanes() * library.chains() * _STEPS * num_threads

    def fma_fp32(self) -> None:
        """`fp32_flops` floating-point operations in fp32."""
        self._library.fma_fp32(_STEPS, self.num_threads)

    def dot_bf16(self) -> None:
        """`bf16_flops` operations: by AMX tiles, else by bf16 dot products, else in fp32."""
        if self.has_tiles:
            self._library.tiles_bf16(_STEPS // 2, self.num_threads)
        elif self.has_bf16_dot:
            self._library.dot_bf16(_STEPS, self.num_threads)
        else:
            self.fma_fp32()

    def read(self, tensor: torch.Tensor) -> None:
        """Read every byte of a contiguous tensor once."""
        assert tensor.is_contiguous()
        words = tensor.numel() * tensor.element_size() // 8
        self._library.read_words(tensor.data_ptr(), words, self.num_threads)

    @property
    def fp32_flops(self) -> float:
        """Work of one `fma_fp32`."""
        return self._step_flops

    @property
    def bf16_flops(self) -> float:
        """Work of one `dot_bf16`."""
        if self.has_tiles:
            return 2.0 * (16 * 16 * 32) * 4 * (_STEPS // 2) * self.num_threads
        return 2 * self._step_flops if self.has_bf16_dot else self._step_flops


@functools.cache
def peak(num_threads: int) -> Peak:
    """Compile the loops for the target of calls, so that a narrower target has its own peak."""
    source = Path(__file__).parent / "parts" / "peak.cpp"
    with tempfile.TemporaryDirectory(prefix="flashattn_jit-peak-") as folder:
        library = Path(folder) / "peak.so"
        flags = [*cpu_flags(default_target()), "-fopenmp", "-fno-tree-loop-distribute-patterns"]
        command = ["g++", "-O3", *flags, "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return Peak(ctypes.CDLL(str(library)), num_threads)


def main() -> None:
    """Print the machine's peaks."""
    options = arguments(__doc__)
    machine = peak(torch.get_num_threads())
    data = torch.randint(-(2**62), 2**62, (_READ_BYTES // 8,))
    times = interleave(
        {"fma": machine.fma_fp32, "dot": machine.dot_bf16, "read": lambda: machine.read(data)},
        options.pairs,
    )
    fma = machine.fp32_flops / median(times["fma"]) / 1e9
    dot = machine.bf16_flops / median(times["dot"]) / 1e9
    read = _READ_BYTES / median(times["read"]) / 1e9
    rows = [
        Row("FMA peak, fp32", None, fma, "GFLOP/s"),
        Row("dot-product peak, bf16", None, dot, "GFLOP/s"),
        Row("read bandwidth, 512 MiB", None, read, "GB/s"),
    ]
    report("peak", rows, options)


if __name__ == "__main__":
    main()
