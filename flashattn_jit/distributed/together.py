"""Query rows and the keys that they need come together at one rank, which computes them.

Rows that need only what the rank holds are computed while the other rows and keys are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.batch_base import Params
from .dealt_batch import DealtBatch, Whole, runs_of
from .group import Ranks
from .needs import Pages, cut, key_moves, query_moves, rows_without_others
from .routes import Route, Rows, begin_moves, bring_home, rows_at
from .shares import Ints, Requests, Shares, starts_of

_LEAST_SHARE = 0.1
"""The part of a rank's rows from which on rows are computed ahead of the others' arrival."""


Spans = tuple[Ints, Ints]
"""Begins and ends of runs of rows."""


class Stage(NamedTuple):
    """Rows of the own buffer, and their plan."""

    batch: DealtBatch
    rows: Rows


class Together(NamedTuple):
    """A plan of keys. early: rows that need nothing of others. late: rows that do."""

    early: Stage | None
    late: Stage | None
    queries: Route
    keys: Route
    page_size: int

    @property
    def overlap(self) -> float:
        """The part of the own rows that are computed while rows and keys are on their way."""
        rows = self.queries.moves.num_rows
        late = 0 if self.late is None else self.late.batch.num_rows
        return 1 - late / rows if rows else 0.0

    def run(
        self, ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any,
        return_lse: bool, params: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of the rows that the rank holds; lse is None unless requested."""
        own_q, own_k, own_v = (
            x.new_empty((route.moves.num_rows, *x.shape[1:]))
            for x, route in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        own_v[-self.page_size :].zero_()  # the empty page
        moving = begin_moves(
            ranks, [(q, own_q, self.queries), (k, own_k, self.keys), (v, own_v, self.keys)]
        )
        own_out = q.new_empty((*own_q.shape[:2], v.shape[2]))
        own_lse = q.new_empty(own_q.shape[:2], dtype=torch.float32) if return_lse else None
        keys, values = (x.unflatten(0, (-1, self.page_size)) for x in (own_k, own_v))

        def compute(stage: Stage) -> None:
            found: Any = stage.batch.run(
                own_q[stage.rows], keys, values, scale=scale, return_lse=return_lse, **params
            )
            if own_lse is not None:
                own_out[stage.rows], own_lse[stage.rows] = found
            else:
                own_out[stage.rows] = found

        def compute_all() -> None:
            try:
                if self.early is not None:
                    compute(self.early)
            finally:
                moving.wait()
            if self.late is not None:
                compute(self.late)

        ranks.computed(compute_all)
        return bring_home(ranks, self.queries, q, own_out, own_lse)


def plan_together(
    made: Callable[[Ints], DealtBatch], tiles: NDArray[Any], whole: Whole, requests: Requests,
    shares: Shares, pages: Pages, ranks: Ranks, params: Params, overlap: bool,
) -> Together:  # fmt: skip
    """Plan the own part. made: an object without a plan, for rows of these requests.

    overlap: rows may be computed in two stages.
    """
    rank = ranks.rank
    begin, end = shares.of(rank)
    place = starts_of(end - begin)
    count = int((end - begin).sum())
    early: Spans = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if overlap and ranks.size > 1:
        low, high = rows_without_others(tiles, requests, shares, pages, rank)
        at = begin.searchsorted(low, "right") - 1
        first = place[at] + low - begin[at]
        if (high - low).sum() >= _LEAST_SHARE * count:
            early = _joined(first, first + high - low)
    late = _joined(np.append(0, early[1]), np.append(early[0], count))

    def stage(spans: Spans, held_only: bool) -> Stage | None:
        if not len(spans[0]):
            return None
        _, low, high = cut(*spans, np.append(place, count))
        of = place.searchsorted(low, "right") - 1
        runs = runs_of(requests, low - place[of] + begin[of], high - place[of] + begin[of])
        batch = made(runs[0])
        batch.plan_rows(whole, requests, runs, pages, rank, params, held_only)
        return Stage(batch, rows_at(*spans, ranks.device))

    return Together(
        stage(early, True), stage(late, False),
        Route(query_moves(shares, requests, rank), ranks),
        Route(key_moves(pages, requests, rank), ranks), pages.page_size,
    )  # fmt: skip


def _joined(begin: Ints, end: Ints) -> Spans:
    """Ascending spans: adjacent ones as one, without empty ones."""
    begin, end = begin[end > begin], end[end > begin]
    if not len(begin):
        return begin, end
    apart = begin[1:] != end[:-1]
    return begin[np.append(True, apart)], end[np.append(apart, True)]
