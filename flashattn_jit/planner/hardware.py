"""What a machine offers: cores, caches, arithmetic and memory rates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import _C
from ..codegen.target import LANES, host_target

_FMA_PORTS = 2
_DEFAULT_HZ = 3.0e9
_BF16_OVER_FP32 = {"cpu:avx512_bf16": 2, "cpu:amx_bf16": 16}
_READ_BYTES_PER_S_PER_CORE = 20e9


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
def clock_hz() -> float:
    """The highest clock that the kernel reports, or 3 GHz."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            speeds = [float(x.split(":")[1]) for x in lines if x.startswith("cpu MHz")]
    except (OSError, ValueError, IndexError):
        return _DEFAULT_HZ
    return max(speeds, default=_DEFAULT_HZ / 1e6) * 1e6


def read_bytes_per_s_per_core() -> float:
    """Bytes that one core reads a second while the others do: an estimate."""
    return _READ_BYTES_PER_S_PER_CORE


@cache
def host_hardware() -> Hardware:
    """This machine."""
    target = host_target()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    l1, l2, l3 = _C.cache_sizes()
    fp32 = cores * clock_hz() * _FMA_PORTS * 2 * LANES[target]
    bf16 = _BF16_OVER_FP32.get(target, 1) * fp32
    return Hardware(
        "host CPU", target, cores, l1, l2, l3, fp32, bf16, cores * read_bytes_per_s_per_core()
    )
