"""The owners of a cache's pages over time as an image: `fa.kv.Timeline.plot` forwards here.

Needs matplotlib, the extra `plot`; imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import numpy as np

from ...errors import InputError
from ...kv.timeline import Sample
from .plots import require_matplotlib, save

_MOST_NAMED = 12  # sequences in the legend


def plot_pages(samples: Sequence[Sample], path: str | PathLike[str]) -> None:
    """Write a stack of areas to `path`: sequences in the order of opening, shared, cached, free.

    Raises:
        InputError: there is no sample, matplotlib is missing, or it cannot write this format.
    """
    if not samples:
        raise InputError("the timeline has no samples: call sample() after each step")
    figure = require_matplotlib()(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    numbers = sorted({number for s in samples for number in s.own})
    rows = [[s.own.get(number, 0) for s in samples] for number in numbers]
    rows += [[getattr(s, name) for s in samples] for name in ("shared", "evictable", "free")]
    colours = [f"C{i % 10}" for i in range(len(numbers))] + ["0.35", "0.7", "0.93"]
    names = [f"sequence {n}" if i < _MOST_NAMED else "_" for i, n in enumerate(numbers)]
    axes.stackplot(
        np.arange(len(samples)), np.array(rows), labels=[*names, "shared", "cached", "free"],
        colors=colours, linewidth=0,
    )  # fmt: skip
    axes.set(xlabel="samples", ylabel="pages", title="pages by owner", xlim=(0, len(samples) - 1))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    save(figure, "path", path)
