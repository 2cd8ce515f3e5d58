"""Queries that go to the keys: each rank attends to the keys that it holds, states are merged.

For few rows over many keys, as in decoding over a cache that is divided by positions. The states of
a row are merged by the rank that holds the row, in the order of the ranks, and finalised once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.arguments.checks import check_scale
from ..ops.batch_base import Params
from ..ops.launching.batch_run import Planned
from ..ops.launching.mixed_run import MixedPlanned, States
from .dealt_batch import DealtBatch, Whole
from .group import Ranks
from .needs import Moves, Spans, cut, key_runs, query_moves
from .routes import Route, begin_moves
from .shares import Requests, Shares

MOST_STATE_ROWS = 1024
"""Query rows of a rank up to which states are considered: each row has one a rank, in memory."""


def rows_at_keys(tiles: NDArray[Any], requests: Requests) -> Shares:
    """The rows that each rank computes with its own keys: of a request one run of rows."""
    world, count = requests.num_ranks, len(requests.q_indptr) - 1
    which, low, high = key_runs(tiles)
    start = requests.kv_indptr[tiles["request"][which]]
    part, begin, end = cut(start + low, start + high, requests.kv_shards)
    rank = requests.kv_shards.searchsorted(begin, "right") - 1
    tile = tiles[which[part]]
    owner = rank * count + tile["request"]
    first, last = np.full(world * count, np.iinfo(np.int64).max), np.zeros(world * count, np.int64)
    row = requests.q_indptr[tile["request"]]
    np.minimum.at(first, owner, row + tile["row_begin"])
    np.maximum.at(last, owner, row + tile["row_end"])
    pairs = (tile["row_end"] - tile["row_begin"]) * (end - begin).astype(np.float64)
    load = np.bincount(rank, pairs, world).astype(np.float64)
    some = np.flatnonzero(last > 0)
    mean = float(load.mean())
    return Shares(some // max(count, 1), first[some], last[some], load, load, mean)


class AtKeys(NamedTuple):
    """A plan of states.

    batch: None for a rank that holds no key of any row. finish: merges the states of the rows that
    the rank holds; None for no rows. back: the states, to a place for each rank and row.
    """

    batch: DealtBatch | None
    finish: MixedPlanned | None
    queries: Route
    back: Route
    pointwise: bool

    def run(
        self, ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any,
        return_lse: bool, params: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of the rows that the rank holds; lse is None unless requested."""
        own_q = q.new_empty((self.queries.moves.num_rows, *q.shape[1:]))
        begin_moves(ranks, [(q, own_q, self.queries)]).wait()

        def computed() -> Any:
            # Merging cannot fail then, after the last agreement.
            if self.finish is not None:
                self.finish.prepare(params)
            if self.batch is None:
                return None
            return self.batch.run(own_q, k, v, scale=scale, partial=True, **params)

        states = ranks.computed(computed)
        if states is None:
            shape = (0, q.shape[1], v.shape[2])
            states = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape[:2]).float()
        elif self.pointwise:
            states = (states,)
        if self.finish is None:
            nowhere = [(x, x[:0], self.back) for x in states[: 1 if self.pointwise else 2]]
            begin_moves(ranks, nowhere).wait()
            empty = q.new_empty((0, q.shape[1], v.shape[2]))
            return empty, q.new_empty((0, q.shape[1])).float() if return_lse else None
        merged = States(self.finish.parts[-1], ranks.size, q)
        # A rank that holds no keys of a row sends no state of it.
        merged.outs.zero_()
        back = [(states[0], merged.outs.flatten(0, 1), self.back)]
        if not self.pointwise:
            merged.lses.fill_(float("-inf"))
            back.append((states[1], merged.lses.flatten(0, 1), self.back))
        begin_moves(ranks, back).wait()
        none = [(k[:0], v[:0])]
        scale = check_scale(scale, q.shape[2])
        return self.finish.finish(q, none, params, scale, merged, return_lse=return_lse)


def plan_states(
    batch: DealtBatch, finish: DealtBatch, whole: Whole, requests: Requests, shares: Shares,
    ranks: Ranks, params: Params,
) -> AtKeys:  # fmt: skip
    """Plan the own part of `rows_at_keys`. batch, finish: objects without a plan."""
    queries = Route(query_moves(shares, requests, ranks.rank), ranks)
    own_rows = int(requests.q_shards[ranks.rank + 1] - requests.q_shards[ranks.rank])
    sent, received, num_rows = queries.moves
    place = Spans(sent.peer, sent.begin + sent.peer * own_rows, sent.num_rows)
    merged: MixedPlanned | None = None
    if own_rows:
        finish.plan_finish(whole, requests, ranks.rank, params)
        planned = finish.in_force()
        assert isinstance(planned, Planned)
        merged = MixedPlanned([planned] * ranks.size, ())
    if num_rows:
        batch.plan_states(whole, requests, shares, ranks.rank, params)
    return AtKeys(
        batch if num_rows else None, merged, queries,
        Route(Moves(received, place, own_rows * ranks.size), ranks), batch.pointwise,
    )  # fmt: skip
