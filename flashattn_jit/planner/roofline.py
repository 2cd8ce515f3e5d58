"""Where a problem lies on the roofline of a machine, for `explain`: this host, or a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from .. import _C
from ..codegen.spec import host_target
from ..codegen.targets import CPU_ROWS
from .devices import Device
from .tiles import READ_BYTES_PER_S_PER_CORE, Problem, clock_hz

_FMA_PORTS = 2


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates are for all cores together; caches are per core, except L3.

    They are estimates (lanes x ports x clock; 20 GB/s a core) that place a problem on the roofline
    in `explain`; the benchmarks measure the real ones. No kernel choice depends on the rates.
    """

    name: str
    target: str
    cores: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    fp32_flops: float
    bf16_flops: float
    read_bytes_per_s: float

    def flops(self, matrix_dtype: str) -> float:
        """Peak arithmetic rate (FLOP/s) for the dtype in which matrices are multiplied."""
        return self.bf16_flops if matrix_dtype == "bfloat16" else self.fp32_flops

    @property
    def rates(self) -> str:
        """Where the rates come from, in words."""
        return f"{self.cores} cores' estimated"

    @property
    def note(self) -> str:
        """What the rates do not say."""
        return ""


@cache
def host_hardware() -> Hardware:
    """This machine."""
    row = CPU_ROWS[host_target()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    l1, l2, l3 = _C.cache_sizes()
    fp32 = cores * clock_hz() * _FMA_PORTS * 2 * row.lanes
    bf16 = max(row.bf16_rate, 1) * fp32
    return Hardware(
        "host CPU", row.name, cores, l1, l2, l3, fp32, bf16, cores * READ_BYTES_PER_S_PER_CORE
    )


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Where a problem lies: `bound` is ``"compute"`` or ``"memory"``."""

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
