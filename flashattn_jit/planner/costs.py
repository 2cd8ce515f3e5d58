"""What work costs, in nanoseconds: the coefficients with which the scheduler balances a batch.

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

from typing import NamedTuple

from ..codegen.spec import KernelSpec
from ..codegen.target import DTYPE_BYTES, LANES, compiled_target, is_cuda, matrix_dtype
from .devices import clock_hz, read_bytes_per_s_per_core, typical_hardware
from .slots import min_chunk, slots
from .tiles import on_tiles

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


__all__ = ["Costs", "coefficients", "least_part", "merge_cost"]
