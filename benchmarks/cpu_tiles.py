"""The speed of tile kinds and tiles on this CPU: the measurements behind planner/tiles.py.

    python -m benchmarks.cpu_tiles [--save]

It replaces the planner's choice, to time tile kinds and tiles that the planner would not choose.
"""

from __future__ import annotations

from functools import partial

import torch

import flashattn_jit as fa
from benchmarks.parts.measure import Row, arguments, interleave, median, ratio, report
from benchmarks.parts.planned_otherwise import clear_plans, on_tile, planned
from benchmarks.parts.work import attention_flops
from flashattn_jit.codegen.spec import TileKind, default_target, matrix_dtype
from flashattn_jit.planner.tiles import few_rows, prefill_tile, prefill_tiles

_PREFILLS = (
    # head_dim, q_len, kv_len, query heads, kv heads
    (64, 2048, 2048, 4, 4), (128, 1024, 1024, 4, 4), (128, 4096, 4096, 4, 4),
    (256, 2048, 2048, 4, 4), (128, 512, 4096, 32, 8),
)  # fmt: skip
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compare_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: dict[str, tuple[TileKind, int, int]],
    rounds: int,
) -> dict[str, list[float]]:
    """Times of one problem with each tile. Plans are made before: timed calls do not plan."""
    runs = {}
    for name, tile in tiles.items():
        tile_kind, tile_q, tile_kv = tile
        where = on_tile(tile_kind=tile_kind, tile_q=tile_q, tile_kv=tile_kv)
        runs[name], specs = planned(partial(fa.attention, q, k, v), where)
        used = [(spec.tile_kind, spec.tile_q, spec.tile_kv) for spec in specs]
        assert used == [tile], f"asked for {tile}, got {used}"
    times = interleave(runs, rounds)
    clear_plans()
    return times


def crossover_rows(rounds: int) -> list[Row]:
    """Few-row against prefill by packed rows: the crossovers that `few_rows` lies between."""
    target, rows = default_target(), []
    for dtype_name, dtype in _DTYPES.items():
        text = str(dtype).removeprefix("torch.")
        most = few_rows(target, text)
        for where, batch, kv_len in (("memory", 4, 2048), ("cache", 1, 512)):
            for head_dim in (64, 128):
                tile = prefill_tile(target, head_dim, head_dim, matrix_dtype(target, text))
                k, v = (torch.randn(batch, 8, kv_len, head_dim).to(dtype) for _ in "kv")
                for packed_rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
                    q = torch.randn(batch, 8, packed_rows, head_dim).to(dtype)
                    tiles: dict[str, tuple[TileKind, int, int]] = {
                        "few_row": ("few_row", 64, 64),
                        "prefill": ("prefill", *tile),
                    }
                    times = compare_tiles(q, k, v, tiles, rounds)
                    value, spread = ratio(times["prefill"], times["few_row"])
                    chosen = "few_row" if packed_rows <= most else "prefill"
                    claim = f"{dtype_name} D{head_dim} {packed_rows} packed rows, keys in {where}: "
                    claim += "prefill over few_row time"
                    detail = f"the planner chooses {chosen}"
                    rows.append(Row(claim, None, value, "x", "higher", spread, detail))
    return rows


def tile_rows(rounds: int) -> list[Row]:
    """Tiles of the prefill kernel, of one block of rows to sixteen, as shares of the chosen one."""
    target, rows = default_target(), []
    for dtype_name, dtype in _DTYPES.items():
        matrix = matrix_dtype(target, str(dtype).removeprefix("torch."))
        block = prefill_tiles(target, matrix).block_rows
        for head_dim, q_len, kv_len, num_q_heads, num_kv_heads in _PREFILLS:
            q = torch.randn(1, num_q_heads, q_len, head_dim).to(dtype)
            k, v = (torch.randn(1, num_kv_heads, kv_len, head_dim).to(dtype) for _ in "kv")
            chosen = prefill_tile(target, head_dim, head_dim, matrix)
            tried = {(n * block, keys) for n in (1, 2, 4, 8, 16) for keys in (24, 48, 96, 128, 192)}
            tiles: dict[str, tuple[TileKind, int, int]] = {
                f"{tile_q}x{tile_kv}": ("prefill", tile_q, tile_kv)
                for tile_q, tile_kv in sorted({chosen, *tried})
            }
            times = compare_tiles(q, k, v, tiles, rounds)
            flops = attention_flops(q_len * kv_len, 1, num_q_heads, head_dim)
            best = times["x".join(map(str, chosen))]
            for name in tiles:
                value, spread = ratio(best, times[name])
                what = f"{dtype_name} D{head_dim} q{q_len} kv{kv_len}"
                claim = f"{what} tile {name}: rate over the chosen one's"
                detail = f"{flops / median(times[name]) / 1e9:.0f} GFLOP/s"
                detail += ", chosen" if times[name] is best else ""
                rows.append(Row(claim, None, value, "x", "higher", spread, detail))
    return rows


def main() -> None:
    """Measure and report."""
    options = arguments(__doc__)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = crossover_rows(options.pairs) + tile_rows(options.pairs)
    report("cpu_tiles", rows, options)


if __name__ == "__main__":
    main()
