"""Tiles of the CPU kernels: tile kind and tile, from a class of packed rows.

Few packed rows per key-value head mean that each loaded key serves little arithmetic: the problem
is bound by memory and gets the few-row kernel, which streams K and V without packing. Many rows
mean that arithmetic is the bound: the prefill kernel with the largest tile that its registers and
a core's L2 hold.
"""

from __future__ import annotations

from dataclasses import replace

from ..codegen.spec import KernelSpec, TileKind
from ..codegen.target import LANES, has_amx, matrix_dtype

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


def few_rows(target: str, q_dtype: str) -> int:
    """Most packed rows of a request that the few-row kernel serves."""
    return FEW_ROWS_OF_TILES if on_tiles(target, matrix_dtype(target, q_dtype)) else FEW_ROWS


def on_tiles(target: str, matrix: str) -> bool:
    """Whether products of a matrix dtype run on AMX tiles."""
    return has_amx(target) and matrix == "bfloat16"


def place(spec: KernelSpec, kind: TileKind) -> KernelSpec:
    """`spec` with the tile of a tile kind."""
    if kind == "few_row":
        tile_q = few_rows(spec.target, spec.q_dtype)
        return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=_FEW_ROW_TILE_KV)
    matrix = matrix_dtype(spec.target, spec.q_dtype)
    tile_q, tile_kv = prefill_tile(spec.target, spec.head_dim, spec.head_dim_v, matrix)
    return replace(spec, tile_kind=kind, tile_q=tile_q, tile_kv=tile_kv)


def touched_bytes(spec: KernelSpec) -> int:
    """`scratch_bytes` of a placed spec."""
    matrix = matrix_dtype(spec.target, spec.q_dtype) if spec.tile_kind == "prefill" else "float32"
    return scratch_bytes(spec.tile_q, spec.tile_kv, spec.head_dim, spec.head_dim_v, matrix)


def considered(blank: KernelSpec, packed_rows: int) -> list[tuple[KernelSpec, int, bool, str]]:
    """(spec, bytes touched, chosen, reason) of each tile kind."""
    prefill, few = place(blank, "prefill"), place(blank, "few_row")
    chosen = "few_row" if packed_rows <= few.tile_q else "prefill"
    filled = min(1.0, packed_rows / prefill.tile_q) * 100
    return [
        (prefill, touched_bytes(prefill), chosen == "prefill",
         f"{packed_rows} packed rows fill {filled:.0f} % of a tile of {prefill.tile_q}"),
        (few, touched_bytes(few), chosen == "few_row",
         f"streams K and V without packing; serves at most {few.tile_q} packed rows a pass"),
    ]  # fmt: skip
