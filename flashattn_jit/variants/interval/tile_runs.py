"""Classifies the tiles of a mask as empty, full or partial without evaluating pairs.

``_C.IntervalForm`` (csrc/interval) evaluates the interval form of the mask (`simplify`). The same
form is compiled into every kernel (`cpp`), so that neither a compiler nor a device is needed to
tell which tiles a kernel skips. The states are sound for every mask and exact for the usual ones,
tail tiles included.

`tile_runs`, which `explain` uses, divides large boxes into tiles only where a box is partial: for
causal, window and document masks it needs far fewer evaluations than there are tiles. Its result is
runs of equal tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _C
from ..ir.ir import Graph
from .range_tables import build_tables
from .simplify import range_tables, simplify
from .statements import code_of
from .terms import FULL, PARTIAL
from .translate import kind

Array: TypeAlias = NDArray[np.int64]
Lengths: TypeAlias = Sequence[int] | NDArray[Any]


@dataclass(frozen=True, slots=True)
class MaskParams:
    """The values that a mask reads at run time.

    tensors, scalars: the variant's params in slot order. The other fields have one entry per
    request, or none: masks that use `fa.q_len`, `fa.kv_len`, `fa.q_row` or `fa.kv_slot` are then
    partial everywhere. ``fajit_args`` documents them.
    """

    tensors: Sequence[torch.Tensor] = ()
    scalars: Sequence[int | float] = ()
    q_len: Lengths = ()
    kv_len: Lengths = ()
    q_offset: Lengths = ()
    q_token0: Lengths = ()
    kv_token0: Lengths = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of a problem: requests and heads (half-open ranges), positions, tile sizes.

    Queries ``q_begin <= q_idx < q_end`` are tiled from `q_begin`, keys from `kv_begin`; the last
    tiles end with the range.
    """

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    tile_q: int
    tile_kv: int
    b_begin: int = 0
    b_end: int = 1
    h_begin: int = 0
    h_end: int = 1

    @property
    def num_q_tiles(self) -> int:
        """Tiles along the queries."""
        return max(0, -(-(self.q_end - self.q_begin) // self.tile_q))

    @property
    def num_kv_tiles(self) -> int:
        """Tiles along the keys."""
        return max(0, -(-(self.kv_end - self.kv_begin) // self.tile_kv))


@dataclass(frozen=True, slots=True)
class TileRuns:
    """Runs of neighbouring non-empty tiles of one state, row by row.

    A row is a (request, head, query tile), in that order; `shape` is [B', H', query tiles], with
    B' or H' 1 where the mask ignores the request or the head. Row r has the runs
    ``indptr[r] .. indptr[r + 1]``; run i covers key tiles ``begin[i] <= tile < end[i]`` and has
    ``state[i]``, PARTIAL or FULL. Runs of a row ascend; tiles in no run are empty.
    """

    grid: Grid
    shape: tuple[int, int, int]
    indptr: Array
    begin: Array
    end: Array
    state: NDArray[np.uint8]

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, partial and full, over all requests and heads."""
        repeat = (self.grid.b_end - self.grid.b_begin) // self.shape[0]
        repeat *= (self.grid.h_end - self.grid.h_begin) // self.shape[1]
        lengths = self.end - self.begin
        partial = int(lengths[self.state == PARTIAL].sum())
        full = int(lengths[self.state == FULL].sum())
        total = int(np.prod(self.shape)) * self.grid.num_kv_tiles
        return (total - partial - full) * repeat, partial * repeat, full * repeat


def tile_runs(graph: Graph, params: MaskParams, grid: Grid) -> TileRuns:
    """The non-empty tiles of the mask `graph` as runs; see `TileRuns`.

    Time and memory grow with the number of boxes along the mask's border, not of tiles.
    """
    form, arguments, _held = form_and_arguments(graph, params)
    program = simplify(graph)
    b = _axis(program.uses("b"), grid.b_begin, grid.b_end)
    h = _axis(program.uses("h"), grid.h_begin, grid.h_end)
    indptr, begin, end, states = form.tile_runs(
        q_begin=grid.q_begin, q_end=grid.q_end, tile_q=grid.tile_q, kv_begin=grid.kv_begin,
        kv_end=grid.kv_end, tile_kv=grid.tile_kv, b=b, h=h, **arguments,
    )  # fmt: skip
    return TileRuns(
        grid,
        (len(b), len(h), grid.num_q_tiles),
        np.frombuffer(indptr, np.int64),
        np.frombuffer(begin, np.int64),
        np.frombuffer(end, np.int64),
        np.frombuffer(states, np.uint8),
    )


def _axis(used: bool, begin: int, end: int) -> list[tuple[int, int]]:
    """Intervals along b or h: one per value, or a single one where the mask ignores it."""
    return [(x, x) for x in range(begin, end)] if used else [(begin, max(begin, end - 1))]


class _Arguments(TypedDict):
    """The arguments of every method of ``_C.IntervalForm``."""

    tensors: list[int]
    layouts: list[tuple[tuple[int, ...], tuple[int, ...]]]
    scalars: list[int | float]
    lengths: list[list[int]]


def form_and_arguments(
    graph: Graph, params: MaskParams
) -> tuple[_C.IntervalForm, _Arguments, list[torch.Tensor]]:
    """The mask's form, its arguments, and the tensors on the host that the arguments point to.

    The caller must keep a reference to the tensors while the form is evaluated.
    """
    tensors = [t.cpu().resolve_neg() for t in params.tensors]  # no copies of host tensors
    described = tuple((str(t.dtype).removeprefix("torch."), t.ndim) for t in tensors)
    kinds = ["f" if isinstance(s, float) else "i" for s in params.scalars]
    for node in graph.nodes:
        if node.op == "scalar":
            kinds[node.int_attr("slot")] = kind(node.dtype)
    tensors += build_tables(range_tables(graph), tensors)
    arguments: _Arguments = {
        "tensors": [t.data_ptr() for t in tensors],
        "layouts": [(tuple(t.shape), t.stride()) for t in tensors],
        "scalars": list(params.scalars),
        "lengths": [
            [int(n) for n in values]
            for values in (params.q_len, params.kv_len, params.q_offset, params.q_token0,
                           params.kv_token0)
        ],
    }  # fmt: skip
    return _form(graph, described, "".join(kinds)), arguments, tensors


@lru_cache(maxsize=64)
def _form(graph: Graph, tensors: tuple[tuple[str, int], ...], kinds: str) -> _C.IntervalForm:
    code, tables = code_of(graph, tensors), len(range_tables(graph))
    return _C.IntervalForm(code, tensors=tensors, num_tables=tables, scalar_kinds=kinds)
