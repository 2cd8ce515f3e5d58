"""Time and memory of finding the tiles of a 65,536 x 65,536 mask, 128 x 128 tiles.

    python -m benchmarks.mask_analysis [--save]

The tiles are derived from the mask's formula. For scale: a byte per tile would take 256 KiB, a bit
per pair 512 MiB. The peer is torch's `create_block_mask`, with 16 times fewer rows and columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashattn_jit as fa
from benchmarks.parts.measure import (
    Row,
    Run,
    arguments,
    interleave,
    median,
    ratio,
    report,
    time_row,
)
from benchmarks.parts.peers import causal
from flashattn_jit.variants.interval.tile_runs import Grid, MaskParams, TileRuns, tile_runs
from flashattn_jit.variants.params import Dims

_LENGTH, _TILE = 65_536, 128
_SMALL = 4_096


def masks() -> dict[str, fa.Variant]:
    """Masks of positions alone, of runtime scalars, of captured tensors."""
    documents = fa.document_ids([1_000] * 65 + [_LENGTH - 65_000])[None]
    return {
        "causal": fa.Causal(),
        "sliding window 4096": fa.SlidingWindow(4096),
        "window 1024 and 4 sinks": fa.StreamingLLM(1024, 4),
        "prefix 8192": fa.PrefixLM(torch.tensor([8192])),
        "66 documents, causal": fa.DocumentMask(documents) & fa.Causal(),
    }


def analysis(variant: fa.Variant) -> Callable[[], TileRuns]:
    """A function that finds the tiles of a mask; tracing is not part of it."""
    bound = variant.bind(Dims(1, 1, 1, _LENGTH, _LENGTH, 64, 64), {})
    mask = bound.ir.hook("mask_mod")
    assert mask is not None
    params = MaskParams(bound.tensors, bound.scalars, [_LENGTH], [_LENGTH], [0], [0], [0])
    grid = Grid(0, _LENGTH, 0, _LENGTH, _TILE, _TILE)
    return lambda: tile_runs(mask, params, grid)


def growth(run: Run) -> int:
    """Bytes of resident memory at the peak of a run, beyond those before it."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    run()
    return max(0, status("VmHWM") - before)


def rows(options: argparse.Namespace) -> list[Row]:
    """Time, and growth of the process, of each mask."""
    out = []
    for name, variant in masks().items():
        run = analysis(variant)
        most = growth(run)
        times = interleave({"ours": run}, options.pairs)["ours"]
        out.append(time_row(f"{name}: time", 15.0, times, "ms", f"tiles {run().counts()}"))
        out.append(Row(f"{name}: peak memory", 16.0, most / 2**20, "MiB", "lower"))
    return out


def torch_rows() -> list[Row]:
    """torch's block mask of a causal mask, 4,096 x 4,096, and our tiles of the same mask."""
    mask = fa.Causal().bind(Dims(1, 1, 1, _SMALL, _SMALL, 64, 64), {}).ir.hook("mask_mod")
    assert mask is not None
    grid = Grid(0, _SMALL, 0, _SMALL, _TILE, _TILE)
    times = interleave(
        {
            "ours": lambda: tile_runs(mask, MaskParams(), grid),
            "torch": lambda: create_block_mask(causal, None, None, _SMALL, _SMALL, "cpu"),
        },
        3,
        warm_up=1,
    )
    value, spread = ratio(times["torch"], times["ours"])
    detail = f"torch {median(times['torch']) * 1e3:.0f} ms, ours {median(times['ours']) * 1e3:.2f}"
    return [Row("causal 4,096 x 4,096: times torch", None, value, "x", "higher", spread, detail)]


def main() -> None:
    """Measure and report."""
    options = arguments(__doc__)
    report("mask_analysis", rows(options) + torch_rows(), options)


if __name__ == "__main__":
    main()
