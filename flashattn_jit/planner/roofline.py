"""The roofline model of a problem on a machine, for `explain`: this host, or a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..codegen.spec import host_target
from ..codegen.targets import CPU_ROWS
from .devices import Device
from .tiles import READ_BYTES_PER_S_PER_CORE, Problem, clock_hz

_FMA_PORTS = 2


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a CPU, for all cores together.

    They are estimates (lanes x ports x clock; 20 GB/s per core) that place a problem on the
    roofline in `explain`; the benchmarks measure actual rates. No kernel choice depends on them.
    """

    name: str
    target: str
    cores: int
    fp32_flops: float
    bf16_flops: float
    read_bytes_per_s: float
    note: ClassVar[str] = ""  # a caveat about the rates, as of `Device`

    def flops(self, matrix_dtype: str) -> float:
        """Peak arithmetic rate (FLOP/s) for the dtype in which matrices are multiplied."""
        return self.bf16_flops if matrix_dtype == "bfloat16" else self.fp32_flops

    @property
    def rates(self) -> str:
        """Where the rates come from, in words."""
        return f"{self.cores} cores' estimated"


@cache
def host_hardware() -> Hardware:
    """This machine."""
    row = CPU_ROWS[host_target()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    fp32 = cores * clock_hz() * _FMA_PORTS * 2 * row.lanes
    bf16 = max(row.bf16_rate, 1) * fp32
    return Hardware("host CPU", row.name, cores, fp32, bf16, cores * READ_BYTES_PER_S_PER_CORE)


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """A problem's point on the roofline; `bound` is ``"compute"`` or ``"memory"``."""

    intensity: float
    ridge: float
    attainable_flops: float
    bound: str


def roofline(problem: Problem, hardware: Hardware | Device, matrix_dtype: str) -> RooflinePoint:
    """The roofline model (Williams et al., 2009) for one problem on one machine."""
    peak = hardware.flops(matrix_dtype)
    ridge = peak / hardware.read_bytes_per_s
    intensity = problem.intensity()
    attainable = min(peak, intensity * hardware.read_bytes_per_s)
    return RooflinePoint(
        intensity, ridge, attainable, "compute" if intensity >= ridge else "memory"
    )
