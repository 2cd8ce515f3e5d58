"""Resources of CUDA kernels: the limits of each target, and the budget that a tile declares.

A tile declares its shared memory, the number of its thread blocks per multiprocessor (occupancy)
and, following from both, its registers per thread. The template passes them to the compiler
(``__launch_bounds__``), the build compares them with ptxas' resource report, and the planner counts
slots with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..variants.ir.ir import KV_HOOKS, ROW_HOOKS, VariantIR
from ..variants.lower.expressions import Uniforms
from ..variants.lower.row import lower_cuda
from ..variants.lower.row_numbers import RowNumbers, row_numbers
from .spec import CUDA_CODES, DTYPE_BYTES, KernelSpec, stored_bytes
from .targets import architecture

WARP = 32
MOST_NARROW = 256
"""The largest padded head dim of tiles whose warps hold whole rows of the output; that of others is
`prefill_wide`."""

MAX_REGISTERS = 255
"""Most registers per thread, on every target."""

SPILL_BYTES = 64
"""Bytes that a thread may spill outside of matrix products, where that buys a tile of twice the
keys. Here, because a change of it must change the keys of kernels."""

WGMMA_SPILL_BYTES = 512
"""The same for wgmma kernels, in which products and their waits fill the loops: what spills is held
across the loops, for the ends of an item, or is the producer's or the changers' (`CHANGE_SPILLS`).
A store and a load of each byte for an item are an estimated thousandth of the time of 4,096
keys."""

CHANGE_SPILLS = 64
"""Loads and stores of spilled registers in a turn of the changers' loop over tiles, at most. Of the
kernels of tests/cuda/hopper those for int4 codes with zero points in groups of 32, keys and values,
have any: 27 and 29 at head dim 192, of 3,600 and 4,000 instructions. In the model of machine code
these take 0.5 and 4 % of the time, and the next smaller tile would take 13 to 20 %."""

SPILL_RULE_VERSION = 3
"""Read by no code: this file's digest is part of the keys of CUDA kernels. Increase it when the
rule changes by which a build is kept or replaced by a smaller tile, as entries hold its decisions
and their keys do not cover `planner/cuda_tiles.py` or, of `jit/compilation`, `cubin.py`, `loops.py`
and `ptxas_report.py`."""

MAX_WARPS = {"prefill": 8, "few_row": 12, "prefill_wide": 8}
"""Most warps per multiprocessor that a tile declares. Two per scheduler overlap softmax with matrix
products; the registers of more warps are better used for larger tiles and hooks. Kernels that wait
for memory gain from three. A kernel that uses fewer registers than its budget can still have more
resident warps."""

_ITEM_BYTES = 40  # a block's current work item, and its position in the worker's list
_WORKING_REGISTERS = 56  # addresses, operand fragments, row maxima and sums, loop state


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """Resources of one multiprocessor of a target, from the CUDA programming guide.

    shared_per_block: the most bytes that one block may request (opt-in). shared_reserved: bytes per
    block that the system reserves. If the devices of a target differ, the minimum (sm_87 has more
    shared memory than sm_86). matrix_flops_per_clock: fp16 or bf16 products with fp32 accumulation,
    dense; GeForce parts before sm_120 have half. in_flight_bytes: bytes of K and V that should be
    in flight to one multiprocessor: twice its share of the bandwidth of the target's fastest device
    times 800 ns (Little's law; the share is 36 GB/s on an H200).
    """

    shared_per_block: int
    shared_per_sm: int
    shared_reserved: int
    threads_per_sm: int
    blocks_per_sm: int
    matrix_flops_per_clock: int
    in_flight_bytes: int
    registers_per_sm: int = 65536


_KIB = 1024
LIMITS = {
    "sm_75": ArchLimits(64 * _KIB, 64 * _KIB, 0, 1024, 16, 1024, 16 * _KIB),
    "sm_80": ArchLimits(163 * _KIB, 164 * _KIB, _KIB, 2048, 32, 2048, 32 * _KIB),
    "sm_86": ArchLimits(99 * _KIB, 100 * _KIB, _KIB, 1536, 16, 1024, 24 * _KIB),
    "sm_89": ArchLimits(99 * _KIB, 100 * _KIB, _KIB, 1536, 24, 1024, 24 * _KIB),
    "sm_90": ArchLimits(227 * _KIB, 228 * _KIB, _KIB, 2048, 32, 4096, 64 * _KIB),
    "sm_100": ArchLimits(227 * _KIB, 228 * _KIB, _KIB, 2048, 32, 8192, 96 * _KIB),
    "sm_120": ArchLimits(99 * _KIB, 100 * _KIB, _KIB, 1536, 24, 512, 24 * _KIB),
}
"""By `architecture`."""


def limits(target: str) -> ArchLimits:
    """The limits of a CUDA target, emulated or not."""
    return LIMITS[architecture(target)]


def padded(head_dim: int) -> int:
    """Columns of a row in shared memory: a multiple of 16, for matrix instructions."""
    return _up(head_dim, 16)


def row_bytes(head_dim: int) -> int:
    """Bytes from one row of 16-bit values to the next in shared memory (`tile/row_layout.h`).

    Rows whose 16-byte chunks cannot be swizzled are padded to an odd number of chunks.
    """
    chunks = padded(head_dim) // 8
    return 16 * (chunks if chunks % 8 == 0 or chunks in (2, 4) else chunks | 1)


def _panels_bytes(rows: int, head_dim: int) -> int:
    """Bytes of a tile in panels of 64 columns (`tile/panel_layout.h`)."""
    return rows * 128 * -(-head_dim // 64)


def query_stages(spec: KernelSpec) -> int:
    """Stages of Q of a wgmma kernel: two, if as many blocks fit a multiprocessor as with one."""
    one, two = (resident_by_shared(spec.target, _wgmma_bytes(spec, n)) for n in (1, 2))
    wanted = min(one, 2) if _has_two_blocks(spec) else 1
    return 2 if two >= wanted else 1


def _has_two_blocks(spec: KernelSpec) -> bool:
    """Whether the registers of a multiprocessor are enough for two blocks of a wgmma kernel."""
    return spec.tile_q == 64 and not changes_rows(spec)


def _wgmma_bytes(spec: KernelSpec, query_stages: int) -> int:
    """Q, rings of K and V and of their codes, barriers, records, items, the walk, and of row hooks
    and codes the scratch and the numbers of a warp, as `wgmma/ring.h` lays them out."""
    consumers = spec.tile_q // 16
    ring = _panels_bytes(spec.tile_kv, spec.head_dim) + _panels_bytes(spec.tile_kv, spec.head_dim_v)
    queries = query_stages * _panels_bytes(spec.tile_q, spec.head_dim)
    tiles = queries + spec.num_stages * ring
    runs = 4 if _walks_by_chunks(spec) else 0
    count = 4 * spec.num_stages + query_stages * spec.tile_q // 32 + 1 + 2 * runs
    records, hooked = spec.num_stages + runs, consumers
    numbers = 0
    if changes_rows(spec):
        codes = sum(code_pitch(dim, dtype) for dim, dtype in _sides(spec) if dtype in CUDA_CODES)
        tiles += spec.num_stages * spec.tile_kv * codes
        count += 6 * spec.num_stages
        records += 2 * spec.num_stages
        hooked += 4
        numbers = 4 * spec.tile_kv * _decoded_numbers(spec)
    barriers = _up(8 * count, 16)
    warps = 32 * spec.num_warps + _walk_bytes(spec) + hooked * row_temps(spec.variant) * 4
    return tiles + barriers + 16 * records + warps + numbers


def _sides(spec: KernelSpec) -> tuple[tuple[int, str], tuple[int, str]]:
    """The head dim and the dtype of keys, and of values."""
    return (spec.head_dim, spec.k_dtype), (spec.head_dim_v, spec.v_dtype)


def changes_rows(spec: KernelSpec) -> bool:
    """Whether codes, key_mod or value_mod change rows of keys or values."""
    return spec.has_codes or any(map(spec.variant.has, KV_HOOKS))


def _walks_by_chunks(spec: KernelSpec) -> bool:
    """Whether a walk classifies chunks of tiles first (`common/kv_walk.h`)."""
    masked = spec.variant.has("mask_mod") or "block_mask" in spec.features
    return masked and "sparse" not in spec.features


def _walk_bytes(spec: KernelSpec) -> int:
    """The state of a warp's walk over the keys."""
    return 48 if _walks_by_chunks(spec) else 32


def warpgroup_registers(spec: KernelSpec) -> tuple[int, int, int]:
    """Registers of a thread of a wgmma kernel: of the producer, of consumers, of changers.

    0: those that the kernel is launched with. The producer evaluates the mask's interval form,
    which takes more registers than issuing copies. Hooks, of which eight rows are changed at once,
    take more than codes.
    """
    if changes_rows(spec):
        in_place = any(
            dtype not in CUDA_CODES and spec.variant.has(hook)
            for hook, (_, dtype) in zip(KV_HOOKS, _sides(spec), strict=True)
        )
        if spec.tile_q == 64:
            return 56, 240, 0
        if not in_place:
            return 56, 184, 88
        return (56, 168, 120) if max(spec.head_dim, spec.head_dim_v) <= 128 else (56, 176, 104)
    if spec.tile_q == 128:
        return 56, 224, 0
    return (64, 192, 0) if ctas_per_sm(spec) == 2 else (0, 0, 0)


def code_pitch(head_dim: int, dtype: str) -> int:
    """Bytes from one row of keys or values to the next in a ring of codes (`tile/codes.h`)."""
    return _up(math.ceil(stored_bytes(head_dim, dtype)), 16)


def loaded_bytes(spec: KernelSpec) -> int:
    """Bytes of shared memory that a key and its value are loaded to."""
    if spec.has_codes:
        return code_pitch(spec.head_dim, spec.k_dtype) + code_pitch(spec.head_dim_v, spec.v_dtype)
    values = 0 if "values_in_keys" in spec.features else row_bytes(spec.head_dim_v)
    return row_bytes(spec.head_dim) + values


def _decoded_numbers(spec: KernelSpec) -> int:
    """Floats that a row of codes needs for its scales and zero points: see `Widening`."""
    count = 0
    for hook, (head_dim, dtype) in zip(KV_HOOKS, _sides(spec), strict=True):
        if spec.tile_kind == "prefill_wgmma" and dtype not in CUDA_CODES:
            continue  # changed in place, by the hook
        found = _decoding(spec, hook, head_dim, dtype)
        if found is not None:
            count += len(found.scales) + len(found.zeros)
    return count


def _decoding(spec: KernelSpec, hook: str, head_dim: int, dtype: str) -> RowNumbers | None:
    """The numbers by which a hook decodes rows of codes; None where it does more."""
    found = row_numbers(spec.variant.hook(hook), spec.variant.tensors)
    if found is None or (found.codebook >= 0 and DTYPE_BYTES[dtype] != 0.5):
        return None
    return found if head_dim % (8 * len(found.scales)) == 0 else None


def hook_over_codes(spec: KernelSpec) -> str:
    """key_mod or value_mod, where it does more than decode rows of codes; empty if neither does."""
    for hook, (head_dim, dtype) in zip(KV_HOOKS, _sides(spec), strict=True):
        coded = dtype in CUDA_CODES and spec.variant.has(hook)
        if coded and _decoding(spec, hook, head_dim, dtype) is None:
            return hook
    return ""


def _ring_bytes(spec: KernelSpec) -> int:
    """Buffers of keys and values; of codes also the tiles that they are widened to, and the
    numbers of their rows."""
    loaded = spec.num_stages * spec.tile_kv * loaded_bytes(spec)
    if not spec.has_codes:
        return loaded
    wide = row_bytes(spec.head_dim), row_bytes(spec.head_dim_v)
    numbers = 4 * _decoded_numbers(spec)
    if spec.tile_kind == "few_row":  # a warp's values replace its keys
        keys = spec.tile_kv // spec.num_warps
        return loaded + spec.tile_kv * max(wide) + spec.num_warps * _up(keys * numbers, 128)
    return loaded + spec.tile_kv * (sum(wide) + numbers)


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of the attention kernel, as its headers lay it out.

    Q's tile and `num_stages` buffers of K and V; then for each warp its walk over the keys and 16
    bytes for their addresses (32 if page tables or key lists are looked up), with key lists the
    logical positions of the buffers' keys, the scratch of row hooks, and 40 bytes for the work
    item. The fp32 output rows are staged in the space of the buffers, which is enlarged if they
    need more.
    """
    if spec.tile_kind == "prefill_wgmma":
        return _wgmma_bytes(spec, query_stages(spec))
    out_row = 4 * (_up(padded(spec.head_dim_v), 32) + 8)
    queries = spec.tile_q * row_bytes(spec.head_dim)
    ring = _ring_bytes(spec)
    if spec.tile_kind == "prefill_wide":  # and the weights of a tile
        ring = _up(ring, 128) + spec.tile_q * row_bytes(spec.tile_kv)
    if spec.tile_kind == "few_row":
        used = queries + max(ring, spec.num_warps * spec.tile_q * (out_row + 8))
    else:  # 8 rows of each warp, or of each pair of them
        parts = spec.tile_q // 16 if spec.tile_kind == "prefill_wide" else spec.num_warps
        used = max(queries + ring, parts * 8 * out_row)
    looked_up = "paged" in spec.features or "sparse" in spec.features
    walk = _walk_bytes(spec) + (32 if looked_up else 16)
    listed = 0
    if "sparse" in spec.features:
        turns = spec.num_stages if spec.tile_kind == "few_row" else 2
        listed = turns * spec.tile_kv * 4
    temps = row_temps(spec.variant) * 4
    return _up(used, 16) + spec.num_warps * (walk + temps) + listed + _ITEM_BYTES


def merge_shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of the merge kernel: an fp32 row for each of its four warps."""
    return 4 * 4 * (_up(spec.head_dim_v, 32) + row_temps(spec.variant))


@lru_cache(maxsize=4096)
def row_temps(variant: VariantIR) -> int:
    """Floats of scratch that each warp needs for the variant's row hooks."""
    graphs = [(hook, variant.hook(hook)) for hook in ROW_HOOKS]
    if not any(graph for _, graph in graphs):
        return 0
    unread = Uniforms()
    return max(
        lower_cuda(hook, graph, variant.tensors, unread)[1] for hook, graph in graphs if graph
    )


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def accumulator_registers(spec: KernelSpec) -> int:
    """fp32 accumulators of a thread: its share of the output and of the scores of a tile."""
    dv = padded(spec.head_dim_v)
    if spec.tile_kind == "few_row":  # each warp holds all rows, and its own part of the keys
        return (dv + spec.tile_kv // spec.num_warps) // 2
    if spec.tile_kind == "prefill_wgmma":  # scores, the weights of the tile before, the output
        return spec.tile_kv // 2 + spec.tile_kv // 4 + spec.head_dim_v // 2
    if spec.tile_kind == "prefill_wide":  # half of the keys, half of the dims
        return spec.tile_kv // 4 + _up(dv // 2, 16) // 2
    row_blocks = spec.tile_q // (16 * spec.num_warps)
    return row_blocks * (dv + spec.tile_kv) // 2


def register_limit(target: str, num_warps: int, ctas: int) -> int:
    """The most registers per thread with which `ctas` blocks of `num_warps` warps fit."""
    threads = WARP * num_warps * ctas
    return min(MAX_REGISTERS, limits(target).registers_per_sm // threads // 8 * 8)


def ctas_per_sm(spec: KernelSpec) -> int:
    """Thread blocks per multiprocessor, for ``__launch_bounds__``.

    The largest number, up to `MAX_WARPS` warps, that fits shared memory and leaves each thread
    enough registers for its accumulators and a working set. A wgmma kernel divides its registers
    by itself: two blocks of 64 rows fit, where they fit shared memory and have no changers, else
    one.
    """
    if spec.tile_kind == "prefill_wgmma":
        both = resident_by_shared(spec.target, shared_bytes(spec)) >= 2
        return 2 if both and _has_two_blocks(spec) else 1
    needed = accumulator_registers(spec) + _WORKING_REGISTERS
    for ctas in range(MAX_WARPS[spec.tile_kind] // spec.num_warps, 1, -1):
        if (
            ctas <= resident_by_shared(spec.target, shared_bytes(spec))
            and register_limit(spec.target, spec.num_warps, ctas) >= needed
        ):
            return ctas
    return 1


def register_budget(spec: KernelSpec) -> int:
    """Most registers per thread with which `ctas_per_sm` blocks fit; beyond it a kernel spills."""
    return register_limit(spec.target, spec.num_warps, ctas_per_sm(spec))


def resident_by_shared(target: str, bytes_per_block: int) -> int:
    """Blocks that fit a multiprocessor's shared memory; 0 if one block exceeds its limit."""
    arch = limits(target)
    if bytes_per_block > arch.shared_per_block:
        return 0
    return arch.shared_per_sm // (bytes_per_block + arch.shared_reserved)


def fits(spec: KernelSpec) -> bool:
    """Whether the spec's shared memory is within the limit of a block."""
    return resident_by_shared(spec.target, shared_bytes(spec)) > 0
