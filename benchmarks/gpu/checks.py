"""The first call: is anything wrong? Values of each kind of kernel, what the driver says, rates."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import flashattn_jit as fa
from benchmarks.gpu.kernels import last_kernel
from benchmarks.gpu.machine import Machine, host_seconds
from benchmarks.gpu.rates import Rates, bandwidth_rows, instruction_rows
from benchmarks.gpu.sections import Measurement
from benchmarks.gpu.smoke import SMOKE
from benchmarks.parts.measure import ROOT, Row, time_row
from flashattn_jit import _C
from flashattn_jit.codegen.targets import is_cuda
from flashattn_jit.jit.module import default
from flashattn_jit.ops.device.cuda import LaunchTensors, launch_values
from flashattn_jit.ops.launching.launches import _launches

_AT_ONCE = 4
_SMOKE_S = 60
WORD = "share of the allowed error: "


def checks(machine: Machine, rounds: int, pack: Path) -> Iterator[Measurement]:
    """All measurements, in the order in which a failure says the most."""
    yield Measurement("smoke", _SMOKE_S, partial(smoke_rows, machine))
    yield Measurement("blocks", 10, partial(block_rows, machine))
    rates: list[Rates] = []

    def made() -> Rates:
        if not rates:
            rates.append(Rates(machine, pack))
        return rates[0]

    yield Measurement("bandwidth", 10, lambda: bandwidth_rows(made(), rounds))
    yield Measurement("instructions", 10, lambda: instruction_rows(made(), rounds))
    yield Measurement("launches", 10, partial(launch_rows, machine, rounds))
    for count in machine.pick((50, 200, 400), (3,)):
        yield Measurement(f"{count} modules", 20, partial(module_rows, machine, count))


def smoke_rows(machine: Machine) -> Iterator[Row]:
    """Each call of `SMOKE` in a process of its own, which a fault cannot spoil for the others."""
    with ThreadPoolExecutor(machine.pick(_AT_ONCE, 2)) as pool:
        for name, (share, words) in zip(
            SMOKE, pool.map(partial(_smoked, machine), SMOKE), strict=True
        ):
            if share is None:
                yield Row(f"{name}: FAILED", 0.0, 1.0, "errors", "lower", detail=words)
            else:
                claim = f"{name}: RMS error"
                yield Row(claim, 1.0, share, "of the allowed error", "lower", detail=words)


def _smoked(machine: Machine, name: str) -> tuple[float | None, str]:
    """The share of the allowed error, and words; None and the reason if the process failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "smoke", name]
    if not machine.full:
        command.append("--dry-run")
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_SMOKE_S
        )
    except subprocess.TimeoutExpired:
        return None, f"still running after {_SMOKE_S} s"
    words = [x for x in done.stdout.splitlines() if x.startswith(WORD)]
    if done.returncode or not words:
        return None, (done.stderr or done.stdout).strip()[-300:]
    return float(words[0].removeprefix(WORD)), f"{time.perf_counter() - begin:.1f} s"


def print_smoke(share: float) -> None:
    """What `_smoked` reads in the output of a process."""
    print(f"{WORD}{share:.3f}")


def block_rows(machine: Machine) -> Iterator[Row]:
    """Blocks that a multiprocessor holds, as the driver says, beside the planned number."""
    for head_dim in (64, 128):
        for q_len in (160, 1):
            q = machine.random(1, 2, q_len, head_dim)
            fa.attention(q, q, q, target=machine.target)
            plan, _ = list(_launches.values())[-1]
            for kernel in plan.kernels:
                if kernel is None or kernel.module is None:
                    continue
                for name, planned, held in machine.load(kernel.module):
                    claim = f"D{head_dim}, {kernel.spec.tile_kind}: blocks of {name}"
                    yield Row(claim, float(planned), float(held), "blocks", detail=last_kernel())


def launch_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Host time of a repeated call, and of its native launch alone, without splits."""
    q = machine.random(1, 32, 1, 128)
    k, v = (machine.random(1, 8, 64, 128) for _ in range(2))
    call = partial(fa.attention, q, k, v, target=machine.target)
    host = host_seconds(machine, call, 200, rounds)
    yield time_row("fa.attention, host time of a repeated call", None, host, "us")
    plan, ready = list(_launches.values())[-1]
    out = torch.empty_like(q)
    values = launch_values(plan.block.memory, LaunchTensors(q, k, v, out, None), 0.1)
    times = host_seconds(machine, machine.native_launch(ready.call, values), 200, rounds)
    yield time_row("launch of a planned call, host time", 4.0, times, "us")


def module_rows(machine: Machine, count: int) -> Iterator[Row]:
    """Time and memory of loading copies of one artifact."""
    loaded = next(loaded.module for loaded in default.loaded() if is_cuda(loaded.request.target))
    with tempfile.TemporaryDirectory() as folder:
        free, resident, begin = machine.free_bytes(), _resident_bytes(), time.perf_counter()
        kept = []
        for i in range(count):
            copy = Path(folder) / f"{i}.so"
            shutil.copy(loaded.path, copy)
            module = _C.Module(str(copy))
            machine.load(module)
            kept.append(module)
        machine.synchronize()
        each_ms = (time.perf_counter() - begin) / count * 1e3
        on_device = (free - machine.free_bytes()) / count / 2**20
        on_host = (_resident_bytes() - resident) / count / 2**20
    detail = f"host {on_host:.2f} MiB and {each_ms:.2f} ms each"
    yield Row(f"device memory of a loaded module, of {count}", 1.0, on_device, "MiB", "lower",
              None, detail)  # fmt: skip


def _resident_bytes() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(words[1]) * 4096
