"""What only a GPU runs, on stand-ins: rates through the driver, times by events."""

from __future__ import annotations

import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import machine, rates
from benchmarks.gpu.machine import Gpu
from flashattn_jit.inspect.machine_code.disassembly import disassemble
from flashattn_jit.planner.devices import named_hardware
from tests.harness.stand_in_driver import StandIn
from tests.harness.toolkit import needs_nvcc

ROOT = Path(__file__).resolve().parents[2]


@needs_nvcc
def test_the_repeated_instructions_are_in_the_machine_code(folder):
    """Nothing was removed or merged: the loop has as many as the source."""
    code = disassemble((folder / rates.CUBIN).read_bytes())
    for kernel, instruction, unrolled in (
        ("repeat_fma", "FFMA", 16), ("repeat_exp", "MUFU", 16), ("repeat_mma", "HMMA", 16),
        ("repeat_ldmatrix", "LDSM", 16),
    ):  # fmt: skip
        names = [i.name for symbol, body in code.items() if kernel in symbol for i in body]
        assert names.count(instruction) >= 8 * unrolled, kernel
        assert "LDL" not in names
    reads = [i for symbol, body in code.items() if "read_words" in symbol for i in body]
    assert sum(i.name == "LDG" and ".128" in i.opcode for i in reads) >= 8


@needs_nvcc
def test_rates_are_launched_through_the_driver(folder, driver: StandIn):
    driver.set_device(0)
    loaded = rates.OnGpu((folder / rates.CUBIN).read_bytes(), str(driver.path))
    driver.records_params(24)
    driver.calls()
    loaded.launch("read_words", 7, bytes(range(24)), 9)
    (call,) = driver.calls("cuLaunchKernelEx")
    assert call.split()[1:] == ["read_words", "on", "0", "7", "1", "1", "128", "1", "1", "0", "9",
                                bytes(range(24)).hex()]  # fmt: skip
    driver.fail("cuLaunchKernelEx", 700)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUresult 700"):
        loaded.launch("read_words", 7, bytes(24), 9)


class Cuda:
    """What `Gpu` uses of torch.cuda, recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("Event", "Stream", "CUDAGraph"):
            return lambda **options: Part(name, self.calls)
        if name in ("current_stream",):
            return lambda: Part("current", self.calls)
        return lambda *values: self.note(name, *values)

    def note(self, name: str, *values: object) -> Any:
        self.calls.append(name)
        return Scope() if name in ("stream", "graph") else (5, 9)


class Scope:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


class Part:
    cuda_stream = 9

    def __init__(self, kind: str, calls: list[str]) -> None:
        self.kind, self.calls = kind, calls

    def __getattr__(self, name: str) -> Any:
        def call(*values: object) -> float:
            self.calls.append(f"{self.kind}.{name}")
            return 3.0

        return call


def test_a_gpu_is_measured_by_events_behind_a_spin_kernel(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(machine.torch, "cuda", cuda)
    monkeypatch.setattr(machine, "device_hardware", lambda index: named_hardware("H200"))
    monkeypatch.setattr(machine.torch, "empty", lambda *a, **k: torch.zeros(4))
    done = subprocess.CompletedProcess([], 0, "580.1, 1980 MHz, 1980 MHz, 3201 MHz, 1, 2, 3\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: done)
    gpu = Gpu()
    assert gpu.name() == "h200" and gpu.describe()["clocks.sm"] == "1980 MHz"
    assert gpu.seconds(lambda: cuda.calls.append("run")) == 0.003
    assert cuda.calls == ["_sleep", "Event.record", "run", "Event.record", "Event.synchronize",
                          "Event.elapsed_time"]  # fmt: skip
    cuda.calls.clear()
    replay = gpu.graph(lambda: cuda.calls.append("run"), 2)
    assert cuda.calls == ["Stream.wait_stream", "stream", "run", "current.wait_stream", "graph",
                          "run", "run"]  # fmt: skip
    replay()
    assert cuda.calls[-1] == "CUDAGraph.replay"
    assert gpu.free_bytes() == 5
    for step in (gpu.synchronize, gpu.release, gpu.flush):
        step()
    event = types.SimpleNamespace(self_device_time_total=7)
    assert gpu.profiled_us(event) == 7.0
    given: dict[str, Any] = {}
    call: Any = types.SimpleNamespace(launch=lambda *v, **k: given.update(values=v, **k))
    gpu.native_launch(call, (1, 2))()
    assert given == {"values": (1, 2), "stream": 9, "device": 0}
    module: Any = types.SimpleNamespace(
        load=lambda device: cuda.calls.append(f"load {device}"),
        residency=lambda device: [("k", 2, 2)],
    )
    assert gpu.load(module) == [("k", 2, 2)] and cuda.calls[-1] == "load 0"
