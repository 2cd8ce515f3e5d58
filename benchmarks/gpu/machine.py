"""The machine that is measured: a GPU, or for a dry run the emulator.

All calls of torch.cuda are in `Gpu`. The rest of the package uses a `Machine` alone, so a dry run
executes it without a GPU: each section with smaller sizes, each kernel in the emulator. Its times
are those of the emulator and mean nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts.measure import Run
from benchmarks.parts.progress import show, steps
from flashattn_jit import _C
from flashattn_jit.planner.devices import Device, device_hardware, named_hardware

T = TypeVar("T")

_SPIN_CYCLES = 10_000_000  # about 5 ms
_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
          "temperature.gpu")  # fmt: skip


class Machine(ABC):
    """What a section needs: tensors, times, graphs, memory.

    device: of tensors. target: of calls; None for the device's own. hardware: what the planner
    knows of it. full: whether sizes are the real ones. all_cases: whether all cases run.
    """

    device: str
    target: str | None
    hardware: Device
    full: bool
    all_cases: bool
    activity: ProfilerActivity

    @property
    def architecture(self) -> str:
        """The target that kernels are compiled for, such as sm_90."""
        return self.hardware.target

    def pick(self, full: T, reduced: T) -> T:
        """A size: the second in a dry run."""
        return full if self.full else reduced

    def cases(self, full: Sequence[T], fewer: int) -> Sequence[T]:
        """Cases to run: in a dry run that makes no pack, the first ones."""
        return full if self.all_cases else full[:fewer]

    def random(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal values."""
        return torch.randn(sizes, dtype=dtype, device=self.device)

    def options(self) -> dict[str, Any]:
        """Options of objects that plan: device and target."""
        return {"device": self.device, "target": self.target}

    def kernel_seconds(self, run: Run) -> dict[str, float]:
        """Seconds of each kernel in one run, by name, as torch's profiler reports them."""
        run()
        self.synchronize()
        with profile(activities=[self.activity]) as found:
            run()
            self.synchronize()
        totals: dict[str, float] = {}
        for event in found.key_averages():
            totals[event.key] = totals.get(event.key, 0.0) + self.profiled_us(event) * 1e-6
        return totals

    @abstractmethod
    def name(self) -> str:
        """Of files with results, such as ``nvidia-h200``."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Driver, clocks and power."""

    def works(self) -> bool:
        """Whether the device can still be used: an illegal access spoils its context for good."""
        try:
            self.synchronize()
            self.release()
        except Exception:  # torch raises several classes
            return False
        return True

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work."""

    @abstractmethod
    def seconds(self, run: Run) -> float:
        """The time that `run` takes the device."""

    @abstractmethod
    def flush(self) -> None:
        """Evicts the L2."""

    @abstractmethod
    def graph(self, run: Run, calls: int) -> Run:
        """A function that replays a captured graph of `calls` calls."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Free device memory."""

    @abstractmethod
    def load(self, module: _C.Module) -> list[tuple[str, int, int]]:
        """Loads a module; (kernel, planned blocks of a multiprocessor, blocks that it holds)."""

    @abstractmethod
    def native_launch(self, call: _C.BatchCall, values: tuple[Any, ...]) -> Run:
        """A function that launches a call whose kernels are loaded; values: `launch_values`."""

    @abstractmethod
    def profiled_us(self, event: Any) -> float:
        """The profiler's time of an event in microseconds."""

    @abstractmethod
    def release(self) -> None:
        """Returns unused memory."""


class Gpu(Machine):
    """CUDA device 0.

    Launching takes the host longer than a short kernel takes the device. So each timed call is
    queued behind a spin kernel, which gives the host time to queue it; the events then measure the
    device.
    """

    device, target, full, all_cases = "cuda", None, True, True
    activity = ProfilerActivity.CUDA

    def __init__(self) -> None:
        self.hardware = device_hardware(0)
        self._evicting = torch.empty(
            max(self.hardware.l2_bytes, 1 << 24), dtype=torch.int32, device="cuda"
        )

    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.hardware.name.lower()).strip("-")

    def describe(self) -> dict[str, str]:
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return {}
        return described(done)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def flush(self) -> None:
        self._evicting.max()  # reads: lines that were written would be written back later

    def graph(self, run: Run, calls: int) -> Run:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        return graph.replay

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def load(self, module: _C.Module) -> list[tuple[str, int, int]]:
        module.load(0)
        return module.residency(0)

    def native_launch(self, call: _C.BatchCall, values: tuple[Any, ...]) -> Run:
        stream = torch.cuda.current_stream().cuda_stream
        return partial(call.launch, *values, stream=stream, device=0)

    def profiled_us(self, event: Any) -> float:
        return float(event.self_device_time_total)

    def release(self) -> None:
        torch.cuda.empty_cache()


class Emulated(Machine):
    """A dry run: the kernels of an H100 in the emulator, on CPU tensors.

    all_cases: needs every kernel that the real run needs, which is what a pack is made by.
    """

    device, target, full = "cpu", "emulated:sm_90", False
    activity = ProfilerActivity.CPU

    def __init__(self, all_cases: bool = False) -> None:
        self.hardware, self.all_cases = named_hardware("H100"), all_cases

    def name(self) -> str:
        return "dry-run"

    def describe(self) -> dict[str, str]:
        values = subprocess.CompletedProcess([], 0, ", ".join("0" for _ in _QUERY))
        return described(values)

    def synchronize(self) -> None:
        pass

    def seconds(self, run: Run) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def flush(self) -> None:
        pass

    def graph(self, run: Run, calls: int) -> Run:
        def replay() -> None:
            for _ in range(calls):
                run()

        return replay

    def free_bytes(self) -> int:
        return 0

    def load(self, module: _C.Module) -> list[tuple[str, int, int]]:
        kernels = json.loads(module.description)["kernels"]
        return [(name, k["min_blocks"], k["min_blocks"]) for name, k in kernels.items()]

    def native_launch(self, call: _C.BatchCall, values: tuple[Any, ...]) -> Run:
        return partial(call.plan_launches, *values)

    def profiled_us(self, event: Any) -> float:
        return float(event.self_cpu_time_total)

    def release(self) -> None:
        pass


def described(done: Any) -> dict[str, str]:
    """The values that nvidia-smi printed; empty if it failed."""
    if done.returncode:
        return {}
    values = done.stdout.partition("\n")[0].split(",")
    return dict(zip(_QUERY, (value.strip() for value in values), strict=False))


def interleave(
    machine: Machine,
    candidates: Mapping[str, Run],
    rounds: int,
    flush: bool = False,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Device seconds of each candidate, A B C A B C. flush: with the L2 evicted before each."""
    what = ", ".join(candidates)
    show(f"{what}: first calls")
    for _ in range(machine.pick(warm_up, 1)):
        for run in candidates.values():
            run()
    machine.synchronize()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in steps(what, range(rounds)):
        for name, run in candidates.items():
            if flush:
                machine.flush()
            times[name].append(machine.seconds(run))
    return times


def host_seconds(machine: Machine, run: Run, calls: int, rounds: int) -> list[float]:
    """Host seconds a call, the device's queue empty at the start of each round."""
    calls = machine.pick(calls, 2)
    for _ in range(machine.pick(20, 1)):
        run()
    times = []
    for _ in range(rounds):
        machine.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    machine.synchronize()
    return times
