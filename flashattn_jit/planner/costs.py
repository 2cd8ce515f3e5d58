"""What work costs: rates of this machine, the roofline, slots of a GPU, and nanoseconds.

A work item of R packed rows over K keys costs ``item + K * max(load, R * pair)``, and ``state`` a
row more where it writes a partial state: the larger of the time that its keys take to arrive and
that its arithmetic takes, for one worker while all others are busy (the roofline model, Williams et
al. 2009). FlashInfer's scheduler has two such coefficients, of rows and keys (arXiv 2501.01005,
algorithm 1); with both bounds one set serves decode and prefill.

Only ratios matter to a schedule, and a coefficient that is wrong by half moves a cut by little: a
device's rates are those of its target's typical device, an emulated target's those of the device
that it stands for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .. import _C
from ..codegen.budget import LIMITS, WARP, register_budget, shared_bytes
from ..codegen.spec import KernelSpec
from ..codegen.target import (
    DTYPE_BYTES,
    LANES,
    compiled_target,
    host_target,
    is_cuda,
    matrix_dtype,
)
from .devices import Device, typical_hardware
from .tiles import Problem, on_tiles

# --- this machine --------------------------------------------------------------------------------

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


# --- slots of a GPU ------------------------------------------------------------------------------

_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_REGISTER_UNIT = 8  # registers a thread come in multiples of this

_MIN_CHUNK = {"prefill": 256, "few_row": 128}
"""Keys. FlashInfer's and FlashAttention 3's least chunks, below which a partial state costs more to
write and merge than its keys cost to read."""


@dataclass(frozen=True, slots=True)
class Slots:
    """per_sm: blocks on one multiprocessor; total: on all, the number of workers to plan for.

    limit: what keeps it from holding more: "shared memory", "registers", "threads" or "blocks".
    """

    per_sm: int
    total: int
    limit: str


def slots(spec: KernelSpec, device: Device, registers: int | None = None) -> Slots:
    """The slots of a kernel on a device: how many of its thread blocks that runs at once.

    Work is split for slots, not for multiprocessors: a device of 132 of them that holds three
    blocks each is filled by 396 blocks, and 133 blocks of a kernel that fits once leave it idle
    half the time.

    registers: a thread's, from the kernel's resource report; its tile's budget when None.
    """
    threads = WARP * spec.num_warps
    taken = register_budget(spec) if registers is None else max(1, registers)
    per_warp = WARP * (-(-taken // _REGISTER_UNIT) * _REGISTER_UNIT)
    warps = _PARTITIONS * (device.registers_per_sm // _PARTITIONS // per_warp)
    shared, arch = shared_bytes(spec), LIMITS[device.target]
    held = device.shared_per_sm // (shared + arch.shared_reserved)
    by = {
        "shared memory": held if shared <= device.shared_per_block else 0,
        "registers": warps // spec.num_warps,
        "threads": device.threads_per_sm // threads,
        "blocks": arch.blocks_per_sm,
    }
    limit = min(by, key=lambda name: by[name])
    return Slots(by[limit], by[limit] * device.num_sms, limit)


def min_chunk(spec: KernelSpec) -> int:
    """The fewest keys that a split of a CUDA kernel's work gets."""
    return max(_MIN_CHUNK[spec.tile_kind], spec.tile_kv)


# --- where a problem lies ------------------------------------------------------------------------


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


# --- costs of work -------------------------------------------------------------------------------

_CUDA_ITEM_NS = 2000.0
"""From the start of a thread block's item to its first product, and from its last one to the stored
rows: three dependent trips to device memory (work item, then q and page table, then keys) of 500 to
800 ns under load, and the warps' reduction."""

_CUDA_MERGE_NS = 3000.0
"""One more kernel in a stream or graph: from the end of the last one to that of a short one."""

_MEMORY_SHARE, _MATRIX_SHARE = 0.85, 0.5
"""Of the rated figures: what streaming reaches of device memory's, and kernels on `mma.sync` with a
softmax of the device's own of the matrix units' (FlashAttention 2 on an A100: 0.5 to 0.73)."""

_CPU_ITEM_NS = 1000.0
_CPU_MERGE_NS = 2000.0  # a barrier of the team and a second entry into the artifact
_CPU_LEAST_PART = 256  # keys; a shorter one costs more in merging than it gains
_CPU_FMAS_PER_CLOCK = {"prefill": 1.2, "few_row": 0.6}
"""Vector multiply-adds a clock, of the two that a core can start; the softmax takes the rest."""
_AMX_LANES = 7
"""Times those rates, of kernels on AMX tiles: 600 GFLOP/s a core in prefill and 370 with 32 packed
rows (a clock of 2.6 GHz by /proc/cpuinfo, head_dim 128, measured)."""


class Costs(NamedTuple):
    """Coefficients of one kernel on one worker, in nanoseconds; see the module."""

    item_ns: float
    load_ns: float
    pair_ns: float
    state_ns: float


def coefficients(spec: KernelSpec, target: str) -> Costs:
    """The costs of a placed spec's work on a worker of `target`: a thread, or a slot of a device.

    Args:
        spec: a spec with its tile, as `choose` gives it.
        target: any target, emulated ones included.

    Example:
        >>> coefficients(spec, "sm_90")
        Costs(item_ns=2000.0, load_ns=71.2, pair_ns=0.41, state_ns=143.5)
    """
    k_bytes, v_bytes = DTYPE_BYTES[spec.k_dtype], DTYPE_BYTES[spec.v_dtype]
    key_bytes = spec.head_dim * k_bytes + spec.head_dim_v * v_bytes
    flops = 2.0 * (spec.head_dim + spec.head_dim_v)
    state_bytes = 2 * 4 * (spec.head_dim_v + 1)  # fp32, written and read back
    compiled = compiled_target(target)
    if is_cuda(compiled):
        device = typical_hardware(compiled)
        workers = max(1, slots(spec, device).total)
        bytes_per_ns = device.read_bytes_per_s * _MEMORY_SHARE / workers * 1e-9
        flops_per_ns = device.flops("bfloat16") * _MATRIX_SHARE / workers * 1e-9
        item_ns = _CUDA_ITEM_NS
    else:
        lanes = LANES[compiled]
        matrix = matrix_dtype(compiled, spec.q_dtype)
        if on_tiles(compiled, matrix):
            lanes *= _AMX_LANES
        elif spec.tile_kind == "prefill" and matrix == "bfloat16":
            lanes *= 2  # two products a lane
        bytes_per_ns = read_bytes_per_s_per_core() * 1e-9
        flops_per_ns = 2 * lanes * _CPU_FMAS_PER_CLOCK[spec.tile_kind] * clock_hz() * 1e-9
        item_ns = _CPU_ITEM_NS
    return Costs(
        item_ns, key_bytes / bytes_per_ns, flops / flops_per_ns, state_bytes / bytes_per_ns
    )


def merge_cost(target: str) -> float:
    """Nanoseconds that merging costs apart from reading states: its launch, or its barrier."""
    return _CUDA_MERGE_NS if is_cuda(compiled_target(target)) else _CPU_MERGE_NS


def least_part(spec: KernelSpec) -> int:
    """The fewest keys of a part where a request is cut.

    A tile for few-row kernels on CUDA: what a part costs besides its keys is counted already, and
    parts so short even out what nothing else does.
    """
    if not is_cuda(spec.target):
        return _CPU_LEAST_PART
    return spec.tile_kv if spec.tile_kind == "few_row" else min_chunk(spec)


__all__ = [
    "Costs",
    "Hardware",
    "RooflinePoint",
    "Slots",
    "clock_hz",
    "coefficients",
    "host_hardware",
    "least_part",
    "merge_cost",
    "min_chunk",
    "read_bytes_per_s_per_core",
    "roofline",
    "slots",
]
