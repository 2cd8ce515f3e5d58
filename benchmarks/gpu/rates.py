"""Rates of the device: of reads, and of the instructions that the model of machine code counts.

`rates.cu` is compiled with the pack. On a GPU its kernels go through the driver, in torch's
context; in a dry run through the emulator.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.machine import Machine, interleave
from benchmarks.parts.measure import Row, median
from benchmarks.parts.work import copy_bytes
from flashattn_jit.inspect.machine_code.multiprocessor import SCHEDULERS, multiprocessor
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.emulator.programs import Program

SOURCE = Path(__file__).with_name("rates.cu")
CUBIN, PTX = "rates.cubin", "rates.ptx"
_THREADS, _CHAINS = 128, 8
_WARPS = _THREADS // 32
_BLOCKS_PER_SM = 4  # 16 warps: they hide the latency of any of these instructions
_NUMBERS = 1024  # in `data` of kernels that repeat an instruction


def build(folder: Path, target: str) -> None:
    """Compiles the kernels into a folder: machine code, and PTX for the emulator."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("benchmarks.gpu: no CUDA toolkit was found")
    for kind, name in (("-cubin", CUBIN), ("-ptx", PTX)):
        command = [str(toolkit.nvcc), kind, f"-arch={target}", "-std=c++17", "-O3", str(SOURCE),
                   "-o", str(folder / name)]  # fmt: skip
        subprocess.run(command, check=True)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class OnGpu:
    """Kernels of a cubin, launched through the driver in the current context."""

    def __init__(self, cubin: bytes, library: str = "libcuda.so.1") -> None:
        self._driver = ctypes.CDLL(library)
        self._module = ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(self._module), cubin)

    def launch(self, kernel: str, blocks: int, params: bytes, stream: int) -> None:
        """Queues a kernel whose parameters are 8 bytes each."""
        function = ctypes.c_void_p()
        self._check("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
        given = ctypes.create_string_buffer(params, len(params))
        begin = ctypes.addressof(given)
        addresses = (ctypes.c_void_p * (len(params) // 8))(*range(begin, begin + len(params), 8))
        config = _Config((blocks, 1, 1), (_THREADS, 1, 1), 0, stream, None, 0)
        self._check("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)

    def _check(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} failed with CUresult {result}")


class Rates:
    """The compiled kernels on a machine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self._gpu = OnGpu((folder / CUBIN).read_bytes()) if machine.full else None
        self._ptx = (folder / PTX).read_text()

    def run(self, kernel: str, blocks: int, data: torch.Tensor, count: int) -> torch.Tensor:
        """Launches a kernel; returns `out` [threads, 2]: clocks, and a result."""
        out = torch.empty(blocks * _THREADS, 2, dtype=torch.float32, device=self.machine.device)
        params = struct.pack("<QQq", out.data_ptr(), data.data_ptr(), count)
        if self._gpu is not None:
            self._gpu.launch(kernel, blocks, params, torch.cuda.current_stream().cuda_stream)
        else:
            size = data.numel() * data.element_size()
            Program(self._ptx).run(
                kernel, (blocks, 1, 1), (_THREADS, 1, 1), 0, params,
                [("out", out.data_ptr(), 4 * out.numel(), True, False),
                 ("data", data.data_ptr(), size, False)],
            )  # fmt: skip
        return out


def instruction_rows(rates: Rates, rounds: int) -> Iterator[Row]:
    """Clocks from one instruction of a scheduler to its next one, beside what the model assumes."""
    machine = rates.machine
    known = multiprocessor(machine.hardware)
    blocks = machine.pick(_BLOCKS_PER_SM * machine.hardware.num_sms, 1)
    data = torch.rand(_NUMBERS, dtype=torch.float32, device=machine.device)
    data[8] = 0.0  # read by repeat_ldmatrix
    assumed = {
        "repeat_fma": ("fma", 40_000, 1.0),
        "repeat_exp": ("ex2", 8_000, known and float(known.mufu)),
        "repeat_mma": ("mma 16x8x16", 6_000, known and known.hmma),
        "repeat_ldmatrix": ("ldmatrix.x4", 4_000, 4.0 * SCHEDULERS),
    }
    for name, (what, full, clocks) in assumed.items():
        count = machine.pick(full, 32)
        run = partial(rates.run, name, blocks, data, count)
        seconds = median(interleave(machine, {what: run}, rounds)[what])
        # All blocks of a multiprocessor run at once, so each warp's loop takes as long as all.
        taken = float(run()[:, 0].max())
        each = taken / (count * _CHAINS * _BLOCKS_PER_SM * _WARPS / SCHEDULERS)
        yield Row(f"{what}: clocks of a scheduler", None, each, "clocks", "lower", None,
                  f"{taken / seconds / 1e9:.2f} GHz", clocks)  # fmt: skip


def bandwidth_rows(rates: Rates, rounds: int) -> Iterator[Row]:
    """Reads alone, and a copy, of 1 GiB; the L2 holds neither."""
    machine = rates.machine
    size = machine.pick(1 << 30, 1 << 14)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=machine.device)
    copy = torch.empty_like(data)
    blocks = machine.pick(16 * machine.hardware.num_sms, 2)
    runs = {
        "read": partial(rates.run, "read_words", blocks, data, size // 16),
        "copy": partial(copy.copy_, data),
    }
    times = {n: median(t) for n, t in interleave(machine, runs, rounds).items()}
    rated = machine.hardware.read_bytes_per_s / 1e12
    yield Row("read bandwidth", None, size / times["read"] / 1e12, "TB/s", detail=f"rated {rated}")
    yield Row("copy bandwidth, read and written", None, copy_bytes(size) / times["copy"] / 1e12,
              "TB/s")  # fmt: skip
    a, b = (machine.random(*(machine.pick((8192, 8192), (64, 64)))) for _ in range(2))
    time = median(interleave(machine, {"matmul": partial(torch.matmul, a, b)}, rounds)["matmul"])
    yield Row("bf16 matrix product 8192^3, random data", None, 2.0 * len(a) ** 3 / time / 1e12,
              "TFLOP/s")  # fmt: skip
