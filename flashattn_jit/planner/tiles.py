"""Which kernel serves a problem: tile kind and tile, from a class of packed rows.

Few packed rows per key-value head mean that each loaded key serves little arithmetic: the problem
is bound by memory and gets the few-row kernel, which streams K and V without packing. Many rows
mean that arithmetic is the bound: the prefill kernel with the largest tile that its registers and
a core's L2 hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.spec import KernelSpec, TileKind
from ..codegen.target import LANES, matrix_dtype
from ..variants.ir import VariantIR
from .problem import Problem

FEW_ROWS = 8
"""Most packed rows of the few-row kernel. See benchmarks/cpu_tiles.py for the crossover."""

_L2_BUDGET_BYTES = 768 * 1024  # three quarters of 1 MiB, the smallest L2 among AVX-512 servers


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A tile kind and tile with what speaks for or against it."""

    tile_kind: TileKind
    tile_q: int
    tile_kv: int
    scratch_bytes: int
    chosen: bool
    reason: str


def prefill_tile(target: str, head_dim: int, head_dim_v: int, matrix: str) -> tuple[int, int]:
    """(tile_q, tile_kv) of the prefill kernel: a function of target and head dims alone."""
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


_FEW_ROW_TILE_KV = 64


def tile_kind(packed_rows: int) -> TileKind:
    """The tile kind of a class of packed rows."""
    return "few_row" if packed_rows <= FEW_ROWS else "prefill"


def _spec(
    variant: VariantIR,
    kind: TileKind,
    dtypes: Sequence[str],
    head_dim: int,
    head_dim_v: int,
    target: str,
    features: tuple[str, ...],
    name: str,
) -> KernelSpec:
    if kind == "prefill":
        matrix = matrix_dtype(target, dtypes[0])
        tile_q, tile_kv = prefill_tile(target, head_dim, head_dim_v, matrix)
    else:
        tile_q, tile_kv = FEW_ROWS, _FEW_ROW_TILE_KV
    return KernelSpec(
        variant, dtypes[0], dtypes[1], dtypes[2], head_dim, head_dim_v, target,
        kind, tile_q, tile_kv, features, name,
    )  # fmt: skip


def choose(
    variant: VariantIR,
    problem: Problem,
    target: str,
    features: tuple[str, ...] = (),
    name: str = "variant",
) -> KernelSpec:
    """The kernel for a problem; always one of `reachable`."""
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    # A block mask is planned per query block, whose rows the few-row kernel would cut needlessly.
    kind = tile_kind(problem.packed_rows)
    return _spec(
        variant, kind, dtypes, problem.head_dim, problem.head_dim_v, target, features, name
    )


def reachable(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: Sequence[tuple[str, ...]] = ((), ("block_mask",)),
) -> tuple[KernelSpec, ...]:
    """Every kernel that `choose` can return for these dims and dtypes, whatever the lengths.

    Args:
        variant: the variant's IR.
        head_dims: (head_dim, head_dim_v).
        dtypes: of q, k and v.
        target: a CPU target.
        features: the feature sets that may be asked for.
    """
    kinds: tuple[TileKind, ...] = ("prefill", "few_row")
    return tuple(
        _spec(variant, kind, dtypes, head_dims[0], head_dims[1], target, feature, "variant")
        for kind in kinds
        for feature in features
    )


def candidates(problem: Problem, target: str) -> tuple[TileChoice, ...]:
    """All tile kinds with the reason for and against each, for `explain`."""
    matrix = matrix_dtype(target, problem.q_dtype)
    d, dv, rows = problem.head_dim, problem.head_dim_v, problem.packed_rows
    tile_q, tile_kv = prefill_tile(target, d, dv, matrix)
    few = tile_kind(rows) == "few_row"
    filled = min(1.0, rows / tile_q) * 100
    return (
        TileChoice(
            "prefill", tile_q, tile_kv, scratch_bytes(tile_q, tile_kv, d, dv, matrix), not few,
            f"{rows} packed rows fill {filled:.0f} % of a tile of {tile_q}",
        ),
        TileChoice(
            "few_row", FEW_ROWS, _FEW_ROW_TILE_KV,
            scratch_bytes(FEW_ROWS, _FEW_ROW_TILE_KV, d, dv, "float32"), few,
            f"streams K and V without packing; serves at most {FEW_ROWS} packed rows a pass",
        ),
    )  # fmt: skip
