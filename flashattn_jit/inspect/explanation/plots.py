"""Drawings of an explanation: the roofline with the problem's point, and the tile map.

Needs matplotlib, the extra `plot`; imported only when something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...planner.devices import Device
from ...planner.roofline import Hardware, RooflinePoint
from .tiles import Tiles

if TYPE_CHECKING:
    from os import PathLike

_PIXELS = 512


def require_matplotlib() -> Any:
    """matplotlib's `Figure` class, which draws without a display.

    Raises:
        InputError: matplotlib is missing; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "plot= needs matplotlib, which is not installed; install the extra `plot`: "
            "pip install flashattn_jit[plot]"
        ) from error
    return Figure


def draw(
    path: str | PathLike[str],
    title: str,
    point: RooflinePoint,
    hardware: Hardware | Device,
    matrix_dtype: str,
    tiles: Tiles,
) -> None:
    """Write both drawings to one image; its format follows the name's ending.

    Raises:
        InputError: matplotlib is missing, or it cannot write this format.
    """
    figure = require_matplotlib()(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    _draw_roofline(left, point, hardware, matrix_dtype)
    _draw_tiles(right, figure, tiles)
    save(figure, "plot", path)


def save(figure: Any, argument: str, path: str | PathLike[str]) -> None:
    """Write a drawing; its format follows the name's ending. InputError where it has none."""
    try:
        figure.savefig(Path(path), dpi=150)
    except ValueError as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}") from error


def _draw_roofline(
    axes: Any, point: RooflinePoint, hardware: Hardware | Device, matrix_dtype: str
) -> None:
    peak, bandwidth = hardware.flops(matrix_dtype), hardware.read_bytes_per_s
    ends = sorted((min(point.intensity, point.ridge) / 8, max(point.intensity, point.ridge) * 8))
    corners = [ends[0], point.ridge, ends[1]]
    roof = [min(peak, x * bandwidth) / 1e9 for x in corners]
    axes.loglog(corners, roof, color="black")
    axes.axvline(point.ridge, color="gray", linestyle=":", linewidth=1)
    axes.plot([point.intensity], [point.attainable_flops / 1e9], "o", color="tab:red")
    axes.annotate(
        f"{point.intensity:.3g} FLOP/B\n{point.bound} bound",
        (point.intensity, point.attainable_flops / 1e9),
        textcoords="offset points", xytext=(8, -24),
    )  # fmt: skip
    axes.set(
        title=f"roofline of {hardware.name} ({matrix_dtype}, estimated)",
        xlabel="operational intensity, FLOP per byte",
        ylabel="GFLOP/s",
    )


def _draw_tiles(axes: Any, figure: Any, tiles: Tiles) -> None:
    coverage = tiles.coverage(_PIXELS, _PIXELS)
    grid = tiles.runs[0].grid if tiles.runs else None
    extent = None
    if grid is not None and grid.q_end > grid.q_begin and grid.kv_end > grid.kv_begin:
        # Of whole tiles: the last ones may reach beyond the positions, which are what is shown.
        extent = (
            grid.kv_begin, grid.kv_begin + grid.num_kv_tiles * tiles.tile_kv,
            grid.q_begin + grid.num_q_tiles * tiles.tile_q, grid.q_begin,
        )  # fmt: skip
    image = axes.imshow(
        coverage, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest",
        extent=extent,
    )  # fmt: skip
    if grid is not None and extent is not None:
        axes.set_xlim(grid.kv_begin, grid.kv_end)
        axes.set_ylim(grid.q_end, grid.q_begin)
    figure.colorbar(image, ax=axes, label="share of tiles visited")
    axes.set(
        title=f"tiles {tiles.tile_q} x {tiles.tile_kv}: {tiles.counts.visited_share:.1%} visited",
        xlabel="kv_idx", ylabel="q_idx",
    )  # fmt: skip
