"""The kernel for a problem: tile kind and tile, from a class of packed rows; the costs of its work.

A choice depends on the variant, dtypes, head dims, target and class of packed rows alone, never on
lengths, head counts or the machine, so the kernels that a variant can ever need are a short list.

On CPUs a problem with few packed rows per key-value head does little arithmetic per loaded key: it
is bound by memory and gets the few-row kernel, which streams K and V without packing. A problem
with many rows is bound by arithmetic and gets the prefill kernel, with the largest tile that fits
registers and a core's L2.

In order: the problem; tiles of CPU kernels (those of CUDA are in `cuda_tiles`); the choice; slots
and costs of a chosen kernel; kernel requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeGuard

from ..codegen.budget import LIMITS, WARP, register_budget, shared_bytes
from ..codegen.spec import (
    CUDA_CODES,
    DTYPE_BYTES,
    AnySpec,
    BuildRequest,
    KernelSpec,
    TileKind,
    matrix_dtype,
    name_of,
    stored_bytes,
)
from ..codegen.targets import CPU_ROWS, compiled_target, has_amx, is_cuda
from ..variants.ir.ir import VariantIR
from . import cuda_tiles
from .devices import Device, typical_hardware


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and lengths of one call before planning.

    Lengths are per request; a dense batch repeats one. Dtypes are torch's names.
    """

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: str
    k_dtype: str
    v_dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def packed_rows(self) -> int:
        """The most query rows that share one K and V: q_len x group_size of the longest request."""
        return max(self.q_len, default=0) * self.group_size

    def flops(self, density: float = 1.0) -> float:
        """FLOPs of both products (2 per multiply-add). density: the share of pairs kept."""
        pairs = sum(q * k for q, k in zip(self.q_len, self.kv_len, strict=True))
        return 2.0 * pairs * self.num_q_heads * (self.head_dim + self.head_dim_v) * density

    def bytes(self, density: float = 1.0) -> float:
        """Bytes that must move at least once: q, out, and the `density` of keys and values."""
        q_rows, kv_rows = sum(self.q_len), sum(self.kv_len)
        q_item = DTYPE_BYTES[self.q_dtype]
        ends = q_rows * self.num_q_heads * (self.head_dim + self.head_dim_v) * q_item
        row = stored_bytes(self.head_dim, self.k_dtype) + stored_bytes(
            self.head_dim_v, self.v_dtype
        )
        return ends + kv_rows * self.num_kv_heads * row * density

    def intensity(self) -> float:
        """Operational intensity in FLOP per byte, without a mask."""
        return self.flops() / max(1.0, self.bytes())


# --- tiles of CPU kernels ------------------------------------------------------------------------

_FEW_ROWS = {"float32": 32, "bfloat16": 8}
"""Most packed rows of the few-row kernel by the dtype of its products, without AMX, between the
crossovers of benchmarks/cpu_tiles.py for keys in memory and in cache: 24 to 48 and 10 to 16 rows in
fp32, 8 to 16 and 8 of bf16 dot products (head dims 64 to 576). Four rows share each loaded vector,
and K and V are read in place, where a prefill tile packs V: at head_dim 128 of bf16 that tile takes
1.2 times as long with 8 rows from memory and 1.0 from cache, with 12 rows 1.0 and 0.84
(cpu:avx512_bf16 on a Zen 4)."""

_FEW_ROWS_OF_TILES = 32
"""The same for products on AMX tiles, whose time hardly depends on the rows: two blocks of 16.
The prefill tile takes 1.06 times as long at 32 rows (benchmarks/cpu_tiles.py)."""

_FEW_ROW_TILE_KV = 64

_LONG_ROW_TILE_KV = 32
"""The same on CPUs with AMX for rows of K of 257 to 1,024 bytes, not of codes. The heads of a token
that run together have up to 4 KB there: a tile and the one that is prefetched then have 512 KB, not
1 MB. With 8 heads decoding takes 0.73 (fp32, D96 and D128) and 0.78 (bf16, D256) of the time; with
up to 4 heads the same (2 threads of a Xeon, two processes by turns, by hand), but with 16 to 32
rows of one or two heads of 256 dims 1.05 from memory, 1.05 to 1.2 from L2."""


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """The tiles of the prefill kernels of targets with one width of vectors.

    block_rows: rows that the products process at once (csrc/include/fajit/cpu/microkernel.h).
    choices: (blocks in tile_q, tile_kv), the fastest first. l2_bytes: the L2 of a core that the
    choice is made for. part_keys: the keys whose scores are held at once, besides the weights of
    all; 0: weights overwrite the scores of all.
    """

    block_rows: int
    choices: tuple[tuple[int, int], ...]
    l2_bytes: int
    part_keys: int = 0


_VECTOR_TILES = {
    4: PrefillTiles(8, ((4, 96), (4, 48), (4, 24)), 256 << 10),
    8: PrefillTiles(24, ((16, 96), (8, 96), (4, 96), (4, 48), (2, 24)), 1 << 20),
    16: PrefillTiles(48, ((8, 96), (4, 96), (2, 96), (2, 48), (2, 24)), 1 << 20),
}
"""By fp32 lanes of a vector. K and V are converted and packed once for all rows of a tile, and more
rows hide more of it: 512 rows over 4,096 keys, 32 heads over 8 of dim 128, run 1.19 times as fast
with 384 x 96 as with 96 x 96 on AVX-512 and 1.2 times on AVX2 (fp32; bf16 1.13 and 1.01 times;
benchmarks/cpu_tiles.py, on a Zen 4). Machines with a smaller L2 than l2_bytes run fewer of the rows
(`item_rows`)."""

_AMX_TILES = PrefillTiles(
    32, ((16, 256), (16, 128), (8, 128), (4, 128), (2, 128)), 2 << 20, part_keys=64
)
"""On AMX a tile packs V once for all its rows, so more rows are faster: 512 x 256 takes 0.91 of the
time of 256 x 128 and 0.84 of that of 128 x 128 (head_dim 128, 2,048 rows and keys, one thread of a
Xeon, least times, by hand)."""


def prefill_tiles(target: str, matrix: str) -> PrefillTiles:
    """The tiles of a target's prefill kernels whose products are in this dtype."""
    return _AMX_TILES if on_tiles(target, matrix) else _VECTOR_TILES[CPU_ROWS[target].lanes]


def prefill_tile(target: str, head_dim: int, head_dim_v: int, matrix: str) -> tuple[int, int]:
    """(tile_q, tile_kv) of the prefill kernel: a function of target, head dims and matrix dtype.

    The first choice that takes at most three quarters of the L2, or else the last.
    """
    tiles = prefill_tiles(target, matrix)
    for blocks, tile_kv in tiles.choices:
        tile_q = blocks * tiles.block_rows
        used = scratch_bytes(target, (tile_q, tile_kv), (head_dim, head_dim_v), matrix)
        if 4 * used <= 3 * tiles.l2_bytes:
            break
    return tile_q, tile_kv


def scratch_bytes(
    target: str, tile: tuple[int, int], head_dims: tuple[int, int], matrix: str
) -> int:
    """Bytes that one thread of a prefill kernel accesses again and again in a tile.

    tile: (tile_q, tile_kv). Q, K and V as the products read them, the accumulator, and the scores
    and weights of one block; rows that are read once to be converted do not count.
    """
    (tile_q, tile_kv), (head_dim, head_dim_v) = tile, head_dims
    tiles = prefill_tiles(target, matrix)
    item = 2 if matrix == "bfloat16" else 4
    q_and_k = (tile_q + tile_kv) * head_dim * item
    values = tile_kv * head_dim_v * item
    key_bytes = tile_kv * 4
    if tiles.part_keys:
        key_bytes = min(tile_kv, tiles.part_keys) * 4 + tile_kv * item
    scores = min(tile_q, tiles.block_rows) * key_bytes
    return q_and_k + values + scores + tile_q * head_dim_v * 4


def item_rows(spec: KernelSpec, l2_bytes: int) -> int:
    """Most packed rows of a work item: the spec's tile, or fewer if this machine's L2 is small.

    The choice is made at run time and is no part of the key. The tile may take three quarters of
    the L2; l2_bytes is 0 if unknown.
    """
    if spec.tile_kind == "few_row" or l2_bytes <= 0:
        return spec.tile_q
    lanes, matrix = CPU_ROWS[spec.target].lanes, matrix_dtype(spec.target, spec.q_dtype)
    rows, head_dims = spec.tile_q, (spec.head_dim, spec.head_dim_v)
    while rows > lanes:
        used = scratch_bytes(spec.target, (rows, spec.tile_kv), head_dims, matrix)
        if 4 * used <= 3 * l2_bytes:
            break
        rows -= lanes
    return rows


def on_tiles(target: str, matrix: str) -> bool:
    """Whether matrix products in this dtype run on AMX tiles."""
    return has_amx(target) and matrix == "bfloat16"


def with_cpu_tile(spec: KernelSpec, kind: TileKind) -> KernelSpec:
    """`spec` with the CPU tile of a tile kind."""
    matrix = matrix_dtype(spec.target, spec.q_dtype)
    if kind == "few_row":
        tile_q = few_rows(spec.target, spec.q_dtype)
        coded = {spec.k_dtype, spec.v_dtype} & CUDA_CODES.keys()
        long_rows = not coded and 256 < stored_bytes(spec.head_dim, spec.k_dtype) <= 1024
        tile_kv = _LONG_ROW_TILE_KV if long_rows and has_amx(spec.target) else _FEW_ROW_TILE_KV
        return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=tile_kv)
    tile_q, tile_kv = prefill_tile(spec.target, spec.head_dim, spec.head_dim_v, matrix)
    return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=tile_kv)


def _touched_bytes(spec: KernelSpec) -> int:
    """`scratch_bytes` of a spec with a tile."""
    matrix = matrix_dtype(spec.target, spec.q_dtype) if spec.tile_kind == "prefill" else "float32"
    tile, head_dims = (spec.tile_q, spec.tile_kv), (spec.head_dim, spec.head_dim_v)
    return scratch_bytes(spec.target, tile, head_dims, matrix)


def _considered_on_cpu(
    choice: KernelSpec, packed_rows: int
) -> list[tuple[KernelSpec, int, bool, str]]:
    """(spec, bytes accessed, chosen, reason) of each tile kind."""
    prefill, few = with_cpu_tile(choice, "prefill"), with_cpu_tile(choice, "few_row")
    chosen = choice.tile_kind
    filled = min(1.0, packed_rows / prefill.tile_q) * 100
    return [
        (prefill, _touched_bytes(prefill), chosen == "prefill",
         f"{packed_rows} packed rows fill {filled:.0f} % of a tile of {prefill.tile_q}"),
        (few, _touched_bytes(few), chosen == "few_row",
         f"streams K and V without packing; serves at most {few.tile_q} packed rows a pass"),
    ]  # fmt: skip


# --- the choice ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A candidate kernel for a problem, with the reason for or against it.

    scratch_bytes: of its tile, in L2 (CPU) or shared memory (CUDA).
    """

    spec: KernelSpec
    scratch_bytes: int
    chosen: bool
    reason: str


def tile_kind(packed_rows: int, target: str, q_dtype: str) -> TileKind:
    """The tile kind for a number of packed rows of queries of a dtype on a target."""
    return "few_row" if packed_rows <= few_rows(target, q_dtype) else "prefill"


@cache
def few_rows(target: str, q_dtype: str) -> int:
    """Most packed rows of a request that gets a few-row kernel of a target."""
    if is_cuda(compiled_target(target)):
        return cuda_tiles.ROW_CLASSES[0]
    matrix = matrix_dtype(target, q_dtype)
    return _FEW_ROWS_OF_TILES if on_tiles(target, matrix) else _FEW_ROWS[matrix]


ALL_ROWS = 2**30
"""A number of packed rows in the largest class."""


def choose_rows(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    packed_rows: int,
    features: tuple[str, ...] = (),
    name: str = "variant",
    tma: bool = True,
) -> KernelSpec:
    """The kernel for requests of up to `packed_rows` packed rows; always one of `reachable`.

    head_dims: (head_dim, head_dim_v). dtypes: of q, k and v. tma: see `Needs`.
    """
    blank = KernelSpec(
        variant, *dtypes, *head_dims, compiled_target(target), "prefill", 0, 0, features, name
    )
    if "values_in_keys" in features and not cuda_tiles.shares_rows(blank):
        blank = replace(blank, features=tuple(f for f in features if f != "values_in_keys"))
    if is_cuda(blank.target):
        return cuda_tiles.with_tile(blank, cuda_tiles.row_class(packed_rows), tma)
    return with_cpu_tile(blank, tile_kind(packed_rows, blank.target, blank.q_dtype))


def choose(
    variant: VariantIR,
    problem: Problem,
    target: str,
    features: tuple[str, ...] = (),
    name: str = "variant",
    tma: bool = True,
) -> KernelSpec:
    """The kernel for a problem; always one of `reachable`. Its target is the compiled one."""
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    dims = (problem.head_dim, problem.head_dim_v)
    return choose_rows(variant, dims, dtypes, target, problem.packed_rows, features, name, tma)


def kernels_by_rows(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: Sequence[tuple[str, ...]] = ((),),
    name: str = "variant",
) -> tuple[KernelSpec, ...]:
    """Every kernel that `choose` and `choose_rows` can return for these sets of features.

    Most rows first. `reachable` lists the sets of features.
    """
    cuda = is_cuda(compiled_target(target))
    few = few_rows(target, dtypes[0])
    rows = cuda_tiles.ROW_CLASSES if cuda else (few, few + 1)
    specs = [
        choose_rows(variant, head_dims, dtypes, target, n, feature, name, tma)
        for n in reversed(rows)
        for feature in features
        for tma in ((True, False) if cuda and "paged" in feature else (True,))
    ]
    return tuple(dict.fromkeys(specs))


def fallbacks(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels that replace `spec`, in order, if it spills. Only CUDA kernels have any."""
    return cuda_tiles.step_down(spec) if _steps(spec) else ()


def _steps(spec: AnySpec) -> TypeGuard[KernelSpec]:
    """Whether a kernel has a tile of registers, which a smaller one may replace."""
    return isinstance(spec, KernelSpec) and is_cuda(spec.target) and spec.tile_kind != "append"


def candidates(
    problem: Problem,
    target: str,
    variant: VariantIR | None = None,
    features: tuple[str, ...] = (),
    tma: bool = True,
) -> tuple[TileChoice, ...]:
    """The kernels considered, each with the reason for or against it, for `explain`.

    variant, features, tma: decide between tiles on CUDA; plain attention by default.
    """
    chosen = choose(variant or VariantIR(()), problem, target, features, tma=tma)
    considered = (
        cuda_tiles.considered(chosen, problem.packed_rows, tma)
        if is_cuda(chosen.target)
        else _considered_on_cpu(chosen, problem.packed_rows)
    )
    return tuple(TileChoice(*c) for c in considered)


# --- slots of a GPU ------------------------------------------------------------------------------

_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_REGISTER_UNIT = 8  # registers a thread come in multiples of this


@dataclass(frozen=True, slots=True)
class Slots:
    """per_sm: blocks on one multiprocessor; total: on all, the number of workers to plan for.

    limit: the resource that limits per_sm: "shared memory", "registers", "threads" or "blocks".
    """

    per_sm: int
    total: int
    limit: str


def slots(spec: KernelSpec, device: Device, registers: int | None = None) -> Slots:
    """The slots of a kernel on a device: how many of its thread blocks run concurrently.

    Work is split for slots, not for multiprocessors: 132 multiprocessors with three blocks each run
    396 blocks at once; with one block each, 133 blocks need two waves, of which the second is
    almost empty.

    registers: per thread, from the kernel's resource report; by default the tile's budget.
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


# --- costs of work -------------------------------------------------------------------------------

_CACHED_SHARE = 0.25  # of the L2, for keys: an H100's two halves hold copies of what both read
_CUDA_ITEM_NS = 2000.0
"""Latency from the start of a thread block's item to its first product, and from its last one to
the stored rows: three dependent loads from device memory (work item, then q and page table, then
keys) of 500 to 800 ns under load, and the reduction over warps."""

_CUDA_PARTIAL_NS = 0.5
"""The same for a block, of about its share of 3 TB/s for 8 bytes an element. Not measured."""

_CUDA_MERGE_NS = 3000.0
"""A short kernel more in a stream or graph: from the end of the previous kernel to its end."""

_CUDA_LOAD_LATENCY_NS = 1000.0
"""From the start of a copy from device memory to its end on a loaded device. The upper end of what
is assumed (`codegen/budget.py` has 800 ns for the depth of rings): if it is too high, more workers
are thought to be needed, and a split is made that gains little."""

_MEMORY_SHARE = 0.85
_MATRIX_SHARE = {"prefill": 0.5, "few_row": 0.5, "prefill_wgmma": 0.65, "prefill_wide": 0.4}
"""Attained shares of rated figures: of memory bandwidth by streaming, and of the matrix units' rate
by kernels that also compute a softmax (FlashAttention 2 on an A100: 0.5 to 0.73; FlashAttention 3
on an H100: 0.65 at head_dim 128). prefill_wide is not measured: a product of 16 x 8 x 16 has a load
of 512 bytes of shared memory for its operands, which takes longer than the product."""

_CPU_ITEM_NS = 1000.0
_CPU_MERGE_NS = 2000.0  # a barrier of the thread team and a second call into the artifact
_CPU_PARTIAL_NS = 2.5
"""A core's time for an element of a partial state, written, read and added: 300 ns for 128 of them.
Measured as the time that cascades of 64 shared keys take above flat plans (benchmarks.kv)."""
_CUDA_LEAST_PART = 256
"""Keys of prefill. The smallest chunk of FlashInfer and FlashAttention 3: with fewer keys a partial
state costs more to write and merge than its keys cost to read."""

_CPU_LEAST_PART = 256  # keys; a shorter part costs more to merge than it saves
_CPU_FMAS_PER_CLOCK = {"prefill": 1.5, "few_row": 1.2}
"""Vector multiply-adds per clock, of the two that a core can issue; the softmax takes the rest."""
_AMX_FMAS_PER_CLOCK = {"prefill": 10.5, "few_row": 4.2}
"""The same for kernels on AMX tiles: 750 GFLOP/s per core in prefill and 370 with 32 packed rows (a
clock of 2.6 GHz by /proc/cpuinfo, head_dim 128, measured)."""

READ_BYTES_PER_S_PER_CORE = 20e9
"""Read bandwidth of one core while all cores read: an estimate."""

_DEFAULT_HZ = 3.0e9


class Costs(NamedTuple):
    """Coefficients of one kernel on one worker, in nanoseconds.

    A work item of R packed rows over K keys costs ``item + K * max(load, R * pair)``, plus
    ``state`` per row if it writes a partial state: the larger of the times to load its keys and to
    do its arithmetic, on one worker while all others are busy (the roofline model, Williams et al.
    2009). FlashInfer's scheduler has two such coefficients, of rows and keys (arXiv 2501.01005,
    algorithm 1); with both bounds one set fits decode and prefill.

    Only ratios matter to a schedule, and a coefficient that is wrong by half moves a split by
    little. The rates of a CUDA target are those of the device that runs the work, or of the
    target's typical device where that is not known, as on emulated targets.

    The bandwidth of a device is shared by its active workers: with fewer of them each is faster, up
    to ``alone`` per key, where the bytes in flight to one thread block per latency limit it
    (Little's law). About a quarter of the slots saturate an H100, so a batch with as many items
    gains nothing from splits. On CPUs, and for prefill, ``alone`` is ``load``.

    cached_keys: of one kv head, how many fit a quarter of a device's L2. Prefill goes through
    requests and heads in sections of so many keys.
    """

    item_ns: float
    load_ns: float
    alone_ns: float
    pair_ns: float
    state_ns: float
    cached_keys: float = 0.0


@cache
def clock_hz() -> float:
    """The highest clock that the operating system reports, or 3 GHz."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            speeds = [float(x.split(":")[1]) for x in lines if x.startswith("cpu MHz")]
    except (OSError, ValueError, IndexError):
        return _DEFAULT_HZ
    return max(speeds, default=_DEFAULT_HZ / 1e6) * 1e6


def coefficients(spec: KernelSpec, target: str, device: Device | None = None) -> Costs:
    """The costs of a spec's work on a worker of `target`: a thread, or a slot of a device.

    Args:
        spec: a spec with its tile, as `choose` returns it.
        target: any target, emulated ones included.
        device: the one that runs the work; by default the typical one of a CUDA target.

    Example:
        >>> coefficients(spec, "sm_90")
        Costs(item_ns=2000.0, load_ns=71.2, alone_ns=15.6, pair_ns=0.41, state_ns=143.5,
              cached_keys=25600.0)
    """
    key_bytes = stored_bytes(spec.head_dim, spec.k_dtype)
    if "values_in_keys" not in spec.features:
        key_bytes += stored_bytes(spec.head_dim_v, spec.v_dtype)
    flops = 2.0 * (spec.head_dim + spec.head_dim_v)
    state_bytes = 2 * 4 * (spec.head_dim_v + 1)  # fp32, written and read back
    compiled = compiled_target(target)
    if is_cuda(compiled):
        device = device or typical_hardware(compiled)
        workers = max(1, slots(spec, device).total)
        bytes_per_ns = device.read_bytes_per_s * _MEMORY_SHARE / workers * 1e-9
        flops_per_ns = device.matrix_flops * _MATRIX_SHARE[spec.tile_kind] / workers * 1e-9
        item_ns = _CUDA_ITEM_NS
        cached_keys = device.l2_bytes * _CACHED_SHARE / key_bytes
        load_ns = alone_ns = key_bytes / bytes_per_ns
        if spec.tile_kind == "few_row":
            flying_per_ns = cuda_tiles.block_bytes_in_flight(spec) / _CUDA_LOAD_LATENCY_NS
            alone_ns = min(load_ns, key_bytes / flying_per_ns)
    else:
        lanes = CPU_ROWS[compiled].lanes
        matrix = matrix_dtype(compiled, spec.q_dtype)
        fmas = _CPU_FMAS_PER_CLOCK[spec.tile_kind]
        if on_tiles(compiled, matrix):
            fmas = _AMX_FMAS_PER_CLOCK[spec.tile_kind]
        elif spec.tile_kind == "prefill" and matrix == "bfloat16":
            lanes *= 2  # two products per lane
        bytes_per_ns = READ_BYTES_PER_S_PER_CORE * 1e-9
        flops_per_ns = 2 * lanes * fmas * clock_hz() * 1e-9
        item_ns = _CPU_ITEM_NS
        cached_keys = 0.0
        load_ns = alone_ns = key_bytes / bytes_per_ns
    state_ns = state_bytes / bytes_per_ns
    return Costs(item_ns, load_ns, alone_ns, flops / flops_per_ns, state_ns, cached_keys)


def merge_cost(target: str) -> float:
    """The cost of merging in nanoseconds, besides reading states: a launch, or a barrier."""
    return _CUDA_MERGE_NS if is_cuda(compiled_target(target)) else _CPU_MERGE_NS


def partial_rows_cost(target: str, rows: int, head_dim_v: int, workers: int) -> float:
    """Nanoseconds to write and merge partial rows, shared out to the workers."""
    cuda = is_cuda(compiled_target(target))
    each = _CUDA_PARTIAL_NS if cuda else _CPU_PARTIAL_NS
    return rows * head_dim_v * each / max(1, workers)


def least_part(spec: KernelSpec) -> int:
    """The fewest keys of a part when a request's keys are split.

    One tile for few-row kernels on CUDA: the fixed cost of a part is in `Costs`, and only such
    short parts can even out the workers' loads.
    """
    if not is_cuda(spec.target):
        return _CPU_LEAST_PART
    if spec.tile_kind == "few_row":
        return spec.tile_kv
    return -(-_CUDA_LEAST_PART // spec.tile_kv) * spec.tile_kv


# --- kernel requests -----------------------------------------------------------------------------


def _render(spec: AnySpec) -> str:
    from ..codegen.render import render  # imports Jinja: only on a miss

    return render(spec)


def build_request(spec: AnySpec) -> BuildRequest:
    """The kernel request for one spec, without fallbacks."""
    render = partial(_render, spec)
    spill_bytes = cuda_tiles.spill_bytes(spec) if _steps(spec) else 0
    return BuildRequest(
        spec.document(), spec.template, spec.target, render, name_of(spec), spill_bytes
    )


def build_requests(spec: AnySpec) -> tuple[BuildRequest, ...]:
    """The kernel requests for `load_stepping`: `spec`, then its fallbacks on smaller tiles.

    Fallbacks replace a kernel that spills more than it may. Only attention kernels of CUDA targets
    have any.
    """
    others = fallbacks(spec) if isinstance(spec, KernelSpec) else ()
    return tuple(build_request(s) for s in (spec, *others))
