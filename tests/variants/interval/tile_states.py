"""States of boxes, and the states that `TileRuns` give to tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flashattn_jit.variants.interval.tile_runs import MaskParams, TileRuns, form_and_arguments
from flashattn_jit.variants.ir.ir import Graph


def classify_boxes(graph: Graph, params: MaskParams, boxes: Any) -> Any:
    """The state of every box, uint8 [N]. A box without queries or keys is empty.

    boxes: int64 [N, 8], the first and the last value of b, h, q and k.
    """
    form, arguments, _held = form_and_arguments(graph, params)
    states = form.classify(np.ascontiguousarray(boxes, np.int64).data, **arguments)
    return np.frombuffer(states, np.uint8)


def runs_of_row(runs: TileRuns, b: int, h: int, q_tile: int) -> Iterator[tuple[int, int, int]]:
    """The (begin, end, state) runs of one row; `b` and `h` count from the grid's begin."""
    b, h = min(b, runs.shape[0] - 1), min(h, runs.shape[1] - 1)
    r = (b * runs.shape[1] + h) * runs.shape[2] + q_tile
    for i in range(int(runs.indptr[r]), int(runs.indptr[r + 1])):
        yield int(runs.begin[i]), int(runs.end[i]), int(runs.state[i])


def dense_states(runs: TileRuns) -> Any:
    """The states as uint8 [B', H', query tiles, key tiles]."""
    width = runs.grid.num_kv_tiles
    rows = np.repeat(np.arange(len(runs.indptr) - 1), np.diff(runs.indptr))
    steps = np.zeros((len(runs.indptr) - 1) * (width + 1), np.int16)
    state = runs.state.astype(np.int16)
    np.add.at(steps, rows * (width + 1) + runs.begin, state)
    np.add.at(steps, rows * (width + 1) + runs.end, -state)
    states = np.cumsum(steps.reshape(-1, width + 1), axis=1)[:, :width]
    return states.astype(np.uint8).reshape(*runs.shape, width)
