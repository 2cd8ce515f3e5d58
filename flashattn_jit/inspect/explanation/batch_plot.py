"""The timeline of a plan's workers as an image: `Plan.plot` forwards here.

Needs matplotlib, the extra `plot`; imported only when something is drawn.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ops.launching.batch_run import Planned
from .batch import LaunchWork, launches_of
from .plots import require_matplotlib, save

_MOST_WORKERS = 512  # lanes of one drawing; more would be thinner than a pixel


def plot_plan(planned: Planned, path: str | PathLike[str]) -> None:
    """Write the timeline to `path`; the format follows its ending.

    Each worker is a lane, each item a bar of its predicted time; the colour is that of its request.

    Raises:
        InputError: matplotlib is missing, or it cannot write this format.
    """
    figure = require_matplotlib()(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    launches = launches_of(planned.first)
    begin = np.zeros(max((len(x.load_ns) for x in launches), default=1))
    shared = planned.batch.options.cpu
    for launch in launches:
        if not shared:
            begin = np.full(len(launch.load_ns), begin.max(initial=0.0))
        begin = _draw(axes, launch, begin)
    native = planned.first.native
    axes.axvline(native.critical_ns / 1e3, color="black", linewidth=1, linestyle=":")
    axes.set(
        title=f"{planned.batch.lengths.num_requests} requests, critical path "
        f"{native.critical_ns / 1e3:.1f} us, at most {native.most_splits} splits",
        xlabel="predicted time, us", ylabel="worker",
    )  # fmt: skip
    axes.invert_yaxis()
    if launches:
        axes.legend(loc="upper right")
    save(figure, "path", path)


def _draw(axes: Any, launch: LaunchWork, begin: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw one launch from the times `begin` of the workers; returns their times of completion."""
    from matplotlib import colormaps

    colours = colormaps["tab20" if launch.kind == "prefill" else "Set3"]
    for worker in range(min(len(launch.load_ns), _MOST_WORKERS)):
        items = launch.work[launch.indptr[worker] : launch.indptr[worker + 1]]
        if not len(items):
            continue
        # Shares of the worker's predicted load, by rows x keys.
        cost = np.diff(items[:, 3:5])[:, 0] * np.maximum(np.diff(items[:, 5:7])[:, 0], 1.0)
        widths = launch.load_ns[worker] * cost / cost.sum() / 1e3
        starts = begin[worker] / 1e3 + np.cumsum(widths) - widths
        axes.broken_barh(
            list(zip(starts, widths, strict=True)),
            (worker - 0.4, 0.8),
            facecolors=[colours(int(b) % colours.N) for b in items[:, 0]],
            edgecolor="white",
            linewidth=0.3,
            hatch=None if launch.kind == "prefill" else "//",
        )
    axes.plot([], [], "s", color=colours(0), label=launch.kind)
    return begin + launch.load_ns
