"""Keys arrive from one rank after another; the states of each step are merged as they arrive.

In step s a rank computes its rows with the keys of the rank s places before it, while the keys of
step s + 1 are on their way. So it never has the keys of more than two ranks besides its own. Keys
come from the rank that holds them, and only those that rows need.

Source: ring attention, Liu et al. 2023, arXiv 2310.01889, whose ranks pass all keys on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..ops.arguments.checks import check_scale
from ..ops.batch_base import Params
from ..ops.launching.batch_run import Planned
from ..ops.launching.mixed_run import MixedPlanned, States
from ..ops.merge import merge_states
from .dealt_batch import DealtBatch, KeySpans, Runs, Whole, runs_of
from .group import Ranks
from .needs import PAGE_SIZE, Moves, Pages, Spans, clipped, cut, query_moves
from .routes import Route, Rows, begin_moves, bring_home, rows_at
from .shares import Ints, Requests, Shares, starts_of


class Step(NamedTuple):
    """The keys of one rank: their way, the rows that may see them, and a plan of these rows.

    has_gaps: some places of the buffer get no key. batch: None where no row sees a key.
    """

    keys: Route
    has_gaps: bool
    rows: Rows
    batch: DealtBatch | None


class Ring(NamedTuple):
    """A plan of steps. finish: finalises the rows of the rank; None for no rows."""

    steps: list[Step]
    finish: MixedPlanned | None
    queries: Route
    pointwise: bool

    def run(
        self, ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any,
        return_lse: bool, params: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of the rows that the rank holds; lse is None unless requested."""

        def begin(step: Step) -> tuple[Any, list[torch.Tensor]]:
            made = torch.zeros if step.has_gaps else torch.empty
            own = [
                made((step.keys.moves.num_rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
                for x in (k, v)
            ]
            return begin_moves(ranks, [(k, own[0], step.keys), (v, own[1], step.keys)]), own

        own_q = q.new_empty((self.queries.moves.num_rows, *q.shape[1:]))
        rows_moving = begin_moves(ranks, [(q, own_q, self.queries)])
        outs = q.new_zeros((*own_q.shape[:2], v.shape[2]), dtype=torch.float32)
        lses = q.new_full(own_q.shape[:2], float("-inf"), dtype=torch.float32)
        moving, keys = begin(self.steps[0]) if self.steps else (rows_moving, [])
        rows_moving.wait()
        failed: Exception | None = None
        for i, step in enumerate(self.steps):
            moving.wait()
            arrived = keys
            if i + 1 < len(self.steps):
                moving, keys = begin(self.steps[i + 1])
            # A rank that fails goes on with the messages, which others wait for.
            if step.batch is not None and failed is None:
                try:
                    pages = [x.unflatten(0, (-1, PAGE_SIZE)) for x in arrived]
                    found = step.batch.run(
                        own_q[step.rows], *pages, scale=scale, partial=True, **params
                    )
                    self._merge(outs, lses, step.rows, found)
                except Exception as error:  # is raised by `finished`
                    failed = error

        def finished() -> tuple[torch.Tensor, torch.Tensor | None]:
            if failed is not None:
                raise failed
            if self.finish is None:
                empty = q.new_empty((0, q.shape[1], v.shape[2]))
                return empty, lses if return_lse else None
            merged = States(self.finish.parts[-1], 1, own_q)
            merged.outs[0], merged.lses[0] = outs, lses
            none: Any = [(k[:0], v[:0])]
            return self.finish.finish(
                own_q, none, params, check_scale(scale, q.shape[2]), merged, return_lse=return_lse
            )  # fmt: skip

        own_out, own_lse = ranks.computed(finished)
        return bring_home(ranks, self.queries, q, own_out, own_lse)

    def _merge(self, outs: torch.Tensor, lses: torch.Tensor, rows: Rows, found: Any) -> None:
        """Add the states of a step to those of all rows before it."""
        if self.pointwise:
            outs[rows] += found
            return
        out, lse = outs[rows], lses[rows]
        merge_states([out, found[0]], [lse, found[1]], out=out, lse=lse)
        if not isinstance(rows, slice):
            outs[rows], lses[rows] = out, lse


def plan_ring(
    made: Callable[[Ints], DealtBatch], whole: Whole, requests: Requests, shares: Shares,
    pages: Pages, ranks: Ranks, params: Params, pointwise: bool,
) -> Ring:  # fmt: skip
    """Plan the own steps. made: an object without a plan, for rows of these requests."""
    rank, size = ranks.rank, ranks.size
    begin, end = shares.of(rank)
    place = starts_of(end - begin)
    runs = runs_of(requests, begin, end)
    sent = clipped(
        pages.rank, pages.bounds[pages.begin], pages.bounds[pages.end], requests.kv_shards, rank
    )
    # Runs of keys that the rank needs, ascending, each of one request and one home.
    _, low, high = cut(*pages.of(rank), pages.indptr)
    _, low, high = cut(pages.bounds[low], pages.bounds[high], requests.kv_shards)
    home = requests.kv_shards.searchsorted(low, "right") - 1
    homes = home.searchsorted(np.arange(size + 1))
    steps = []
    for step in range(size):
        source, target = (rank - step) % size, (rank + step) % size
        first, last = (x[homes[source] : homes[source + 1]] for x in (low, high))
        to_begin, to_rows = sent.of(target)
        if not len(first) and not len(to_rows):
            continue
        own = _spans(requests, first, last)
        at = own.begin.searchsorted(first, "right") - 1
        keys = Route(
            Moves(
                Spans(np.full(len(to_rows), target), to_begin, to_rows),
                Spans(
                    np.full(len(first), source),
                    own.first_page[at] * PAGE_SIZE + first - own.begin[at], last - first,
                ),
                own.num_pages * PAGE_SIZE,
            ),
            ranks,
        )  # fmt: skip
        has_gaps = len(first) > len(own.begin)
        which = np.flatnonzero(np.isin(runs[0], own.request))
        batch = None
        rows: Rows = slice(0, 0)
        if len(which):
            some: Runs = (runs[0][which], runs[1][which], runs[2][which])
            # Runs lie in the buffer of the rank as their pieces do.
            piece = begin.searchsorted(some[1], "right") - 1
            at = place[piece] + some[1] - begin[piece]
            rows = rows_at(at, at + some[2] - some[1], ranks.device)
            batch = made(some[0])
            batch.plan_step(whole, requests, some, own, params)
        steps.append(Step(keys, has_gaps, rows, batch))
    finish = None
    if len(runs[0]):
        whole_rows = made(runs[0])
        whole_rows.plan_no_keys(whole, requests, runs, params)
        planned = whole_rows.in_force()
        assert isinstance(planned, Planned)
        finish = MixedPlanned([planned], ())
    return Ring(steps, finish, Route(query_moves(shares, requests, rank), ranks), pointwise)


def _spans(requests: Requests, low: Ints, high: Ints) -> KeySpans:
    """From the first to the last of the runs of keys of each request."""
    of = requests.kv_indptr.searchsorted(low, "right") - 1
    request, first, count = np.unique(of, return_index=True, return_counts=True)
    starts, ends = low[first], high[first + count - 1]
    num_pages = -(-(ends - starts) // PAGE_SIZE)
    first_page = starts_of(num_pages)
    return KeySpans(request, starts, ends, first_page, int(num_pages.sum()))
