"""Which kernel serves a problem: tile kind and tile, from a class of packed rows; its requests.

A choice depends on the variant, dtypes, head dims, target and class of packed rows alone, never on
lengths, head counts or the machine, so the kernels that a variant can ever need are a short list.

On CPUs few packed rows per key-value head mean that each loaded key serves little arithmetic: the
problem is bound by memory and gets the few-row kernel, which streams K and V without packing. Many
rows mean that arithmetic is the bound: the prefill kernel with the largest tile that its registers
and a core's L2 hold.

In order: the problem; tiles of CPU kernels (those of CUDA are in `cuda_tiles`); the choice; what
the cache is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..codegen.spec import AnySpec, KernelSpec, Request, TileKind, name_of
from ..codegen.target import DTYPE_BYTES, LANES, compiled_target, has_amx, is_cuda, matrix_dtype
from ..variants.ir import VariantIR
from . import cuda_tiles


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
        """Multiply-adds of both products, counted as two, over the share of pairs kept."""
        pairs = sum(q * k for q, k in zip(self.q_len, self.kv_len, strict=True))
        return 2.0 * pairs * self.num_q_heads * (self.head_dim + self.head_dim_v) * density

    def bytes(self, density: float = 1.0) -> float:
        """Bytes that must move at least once: q, out, and the keys and values that are read."""
        q_rows, kv_rows = sum(self.q_len), sum(self.kv_len)
        q_item = DTYPE_BYTES[self.q_dtype]
        ends = q_rows * self.num_q_heads * (self.head_dim + self.head_dim_v) * q_item
        row = (
            self.head_dim * DTYPE_BYTES[self.k_dtype] + self.head_dim_v * DTYPE_BYTES[self.v_dtype]
        )
        return ends + kv_rows * self.num_kv_heads * row * density

    def intensity(self) -> float:
        """Operational intensity in FLOP per byte; the mask's density cancels but for q and out."""
        return self.flops() / max(1.0, self.bytes())


# --- tiles of CPU kernels ------------------------------------------------------------------------

FEW_ROWS = 8
"""Most packed rows of the few-row kernel. See benchmarks/cpu_tiles.py for the crossover."""

FEW_ROWS_OF_TILES = 32
"""The same where products run on AMX tiles, whose time hardly depends on the rows: two blocks of
them. The prefill tile takes 1.06 of its time at 32 rows (benchmarks/cpu_tiles.py)."""

_FEW_ROW_TILE_KV = 64
_L2_BUDGET_BYTES = 768 * 1024  # three quarters of 1 MiB, the smallest L2 among AVX-512 servers


def prefill_tile(target: str, head_dim: int, head_dim_v: int, matrix: str) -> tuple[int, int]:
    """(tile_q, tile_kv) of the prefill kernel: a function of target and head dims alone.

    On AMX a tile packs V once for all its rows, and the more rows the better: 256 x 128 takes 0.94
    of the time of 128 x 128 and 0.83 of that of 96 x 96 (head_dim 128, benchmarks/cpu_tiles.py).
    """
    if on_tiles(target, matrix):
        for tile_q in (256, 128, 64):
            if scratch_bytes(tile_q, 128, head_dim, head_dim_v, matrix) <= _L2_BUDGET_BYTES:
                break
        return tile_q, 128
    vectors = 6 if LANES[target] == 16 else 4
    tile_q = vectors * LANES[target]
    for tile_kv in (96, 48, 24):
        if scratch_bytes(tile_q, tile_kv, head_dim, head_dim_v, matrix) <= _L2_BUDGET_BYTES:
            break
    return tile_q, tile_kv


def scratch_bytes(tile_q: int, tile_kv: int, head_dim: int, head_dim_v: int, matrix: str) -> int:
    """Bytes that one thread touches per tile: Q, scores, weights, K, V and the accumulator."""
    item = 2 if matrix == "bfloat16" else 4
    q_and_k = (tile_q + tile_kv) * head_dim * item
    values = tile_kv * head_dim_v * item
    scores = tile_q * tile_kv * (4 + item)
    return q_and_k + values + scores + tile_q * head_dim_v * 4


def item_rows(spec: KernelSpec, l2_bytes: int) -> int:
    """Most packed rows of a work item: the spec's tile, or fewer where this machine's L2 is small.

    A run-time choice, so it does not reach the key. Three quarters of the L2 are for the tile; 0
    bytes mean that the size is not known.
    """
    if spec.tile_kind == "few_row" or l2_bytes <= 0:
        return spec.tile_q
    lanes, matrix = LANES[spec.target], matrix_dtype(spec.target, spec.q_dtype)
    rows = spec.tile_q
    while rows > lanes and (
        4 * scratch_bytes(rows, spec.tile_kv, spec.head_dim, spec.head_dim_v, matrix) > 3 * l2_bytes
    ):
        rows -= lanes
    return rows


def on_tiles(target: str, matrix: str) -> bool:
    """Whether products of a matrix dtype run on AMX tiles."""
    return has_amx(target) and matrix == "bfloat16"


def place_on_cpu(spec: KernelSpec, kind: TileKind) -> KernelSpec:
    """`spec` with the tile of a tile kind."""
    if kind == "few_row":
        tile_q = few_rows(spec.target, spec.q_dtype)
        return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=_FEW_ROW_TILE_KV)
    matrix = matrix_dtype(spec.target, spec.q_dtype)
    tile_q, tile_kv = prefill_tile(spec.target, spec.head_dim, spec.head_dim_v, matrix)
    return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=tile_kv)


def _touched_bytes(spec: KernelSpec) -> int:
    """`scratch_bytes` of a placed spec."""
    matrix = matrix_dtype(spec.target, spec.q_dtype) if spec.tile_kind == "prefill" else "float32"
    return scratch_bytes(spec.tile_q, spec.tile_kv, spec.head_dim, spec.head_dim_v, matrix)


def _considered_on_cpu(
    blank: KernelSpec, packed_rows: int
) -> list[tuple[KernelSpec, int, bool, str]]:
    """(spec, bytes touched, chosen, reason) of each tile kind."""
    prefill, few = place_on_cpu(blank, "prefill"), place_on_cpu(blank, "few_row")
    chosen = "few_row" if packed_rows <= few.tile_q else "prefill"
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
    """A kernel that could serve a problem, with what speaks for or against it.

    scratch_bytes: what its tile takes of the L2 (CPU) or of shared memory (CUDA).
    """

    spec: KernelSpec
    scratch_bytes: int
    chosen: bool
    reason: str

    @property
    def tile_kind(self) -> TileKind:
        """Of the spec."""
        return self.spec.tile_kind

    @property
    def tile_q(self) -> int:
        """Of the spec."""
        return self.spec.tile_q

    @property
    def tile_kv(self) -> int:
        """Of the spec."""
        return self.spec.tile_kv


def tile_kind(packed_rows: int, target: str, q_dtype: str) -> TileKind:
    """The tile kind that a number of packed rows of a dtype gets on a target."""
    return "few_row" if packed_rows <= few_rows(target, q_dtype) else "prefill"


def few_rows(target: str, q_dtype: str) -> int:
    """Most packed rows of a request that the few-row kernels of a target serve."""
    if is_cuda(compiled_target(target)):
        return cuda_tiles.ROW_CLASSES[0]
    return FEW_ROWS_OF_TILES if on_tiles(target, matrix_dtype(target, q_dtype)) else FEW_ROWS


ALL_ROWS = 2**30
"""Packed rows that get the prefill tile of the largest class."""


def choose_rows(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    packed_rows: int,
    features: tuple[str, ...] = (),
    name: str = "variant",
) -> KernelSpec:
    """The kernel for requests of up to `packed_rows` packed rows; always one of `reachable`.

    head_dims: (head_dim, head_dim_v). dtypes: of q, k and v.
    """
    return _placed(_blank(variant, head_dims, dtypes, target, features, name), packed_rows)


def choose(
    variant: VariantIR,
    problem: Problem,
    target: str,
    features: tuple[str, ...] = (),
    name: str = "variant",
) -> KernelSpec:
    """The kernel for a problem; always one of `reachable`. Its target is the compiled one."""
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    dims = (problem.head_dim, problem.head_dim_v)
    return _placed(_blank(variant, dims, dtypes, target, features, name), problem.packed_rows)


def placed(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: Sequence[tuple[str, ...]] = ((),),
    name: str = "variant",
) -> tuple[KernelSpec, ...]:
    """Every kernel that `choose` and `choose_rows` can return for these sets of features.

    Most rows first. `reachable` knows which features there are.
    """
    cuda = is_cuda(compiled_target(target))
    few = few_rows(target, dtypes[0])
    rows = cuda_tiles.ROW_CLASSES if cuda else (few, few + 1)
    specs = [
        _placed(_blank(variant, head_dims, dtypes, target, feature, name), n)
        for n in reversed(rows)
        for feature in features
    ]
    return tuple(dict.fromkeys(specs))


def fallbacks(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels that replace `spec`, in order, when it spills. Only CUDA kernels have any."""
    return cuda_tiles.step_down(spec) if is_cuda(spec.target) else ()


def candidates(
    problem: Problem, target: str, variant: VariantIR | None = None
) -> tuple[TileChoice, ...]:
    """The kernels considered, each with the reason for or against it, for `explain`.

    variant: decides between tiles on CUDA; plain attention by default.
    """
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    dims = (problem.head_dim, problem.head_dim_v)
    blank = _blank(variant or VariantIR(()), dims, dtypes, target, (), "variant")
    considered = cuda_tiles.considered if is_cuda(blank.target) else _considered_on_cpu
    return tuple(TileChoice(*c) for c in considered(blank, problem.packed_rows))


def _blank(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: tuple[str, ...],
    name: str,
) -> KernelSpec:
    """A spec whose tile is still to be placed."""
    return KernelSpec(
        variant, *dtypes, *head_dims, compiled_target(target), "prefill", 0, 0, features, name
    )


def _placed(blank: KernelSpec, packed_rows: int) -> KernelSpec:
    if is_cuda(blank.target):
        return cuda_tiles.place(blank, cuda_tiles.row_class(packed_rows))
    return place_on_cpu(blank, tile_kind(packed_rows, blank.target, blank.q_dtype))


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Render:
    """Makes a spec's source when it is called."""

    spec: AnySpec

    def __call__(self) -> str:
        from ..codegen.render import render  # imports Jinja: only on a miss

        return render(self.spec)


def request_of(spec: AnySpec) -> Request:
    """The request for one spec, without what may take its place."""
    return Request(spec.document(), spec.template, spec.target, _Render(spec), name_of(spec))


def requests_of(spec: AnySpec) -> tuple[Request, ...]:
    """What `load_stepping` is asked for: `spec`, then the same kernel on smaller tiles.

    They take its place where it spills. Only attention kernels of CUDA targets have others.
    """
    others = fallbacks(spec) if isinstance(spec, KernelSpec) else ()
    return tuple(request_of(s) for s in (spec, *others))
