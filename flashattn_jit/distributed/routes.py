"""Rows of tensors on their way between ranks: `Moves` carried out, adjacent rows without copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .group import Exchange, Ranks
from .needs import Moves, Spans
from .shares import Ints, ranges

Rows = slice | torch.Tensor
"""A slice where the rows are adjacent, else their indices."""

_NONE = slice(0, 0)


class Route:
    """`Moves` as rows of tensors, for each rank of the group."""

    def __init__(self, moves: Moves, ranks: Ranks) -> None:
        self.moves = moves
        self.sent = _rows(moves.sent, ranks)
        self.received = _rows(moves.received, ranks)

    def reversed(self) -> Route:
        """The way back."""
        made = Route.__new__(Route)
        made.moves, made.sent, made.received = self.moves, self.received, self.sent
        return made


def _rows(spans: Spans, ranks: Ranks) -> list[Rows]:
    found: list[Rows] = [_NONE] * ranks.size
    for peer in sorted({*spans.peer.tolist()}):
        begin, count = spans.of(peer)
        found[peer] = rows_at(begin, begin + count, ranks.device)
    return found


def rows_at(begin: Ints, end: Ints, device: torch.device) -> Rows:
    """Ranges of rows, at least one."""
    if (begin[1:] == end[:-1]).all():
        return slice(int(begin[0]), int(end[-1]))
    return torch.from_numpy(ranges(begin, end)).to(device)


class Moving:
    """Rows under way."""

    def __init__(
        self, exchange: Exchange, arrivals: Sequence[tuple[torch.Tensor, Rows, torch.Tensor]]
    ) -> None:
        self._exchange, self._arrivals = exchange, arrivals

    def wait(self) -> None:
        """Until all rows are at their places. Raises DistributedError."""
        self._exchange.wait()
        for target, rows, arrived in self._arrivals:
            target[rows] = arrived


def begin_moves(ranks: Ranks, moves: Sequence[tuple[torch.Tensor, torch.Tensor, Route]]) -> Moving:
    """Start moving rows of each first tensor, a shard, to the second ones of all ranks.

    Rows of the own rank are moved at once.
    """
    me, sent, received, arrivals = ranks.rank, [], [], []
    for rank in range(ranks.size):
        to, from_ = [], []
        for source, target, route in moves if rank != me else ():
            to.append(source[route.sent[rank]].contiguous())
            rows = route.received[rank]
            if isinstance(rows, slice):
                from_.append(target[rows])
            else:
                from_.append(target.new_empty((len(rows), *target.shape[1:])))
                arrivals.append((target, rows, from_[-1]))
        sent.append(to)
        received.append(from_)
    exchange = ranks.begin(sent, received)
    for source, target, route in moves:
        target[route.received[me]] = source[route.sent[me]]
    return Moving(exchange, arrivals)


def bring_home(
    ranks: Ranks, queries: Route, q: torch.Tensor, own_out: torch.Tensor,
    own_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse) of the rows q that a rank holds, of results where `queries` brought them."""
    home = queries.reversed()
    out = q.new_empty((len(q), *own_out.shape[1:]))
    back, lse = [(own_out, out, home)], None
    if own_lse is not None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        back.append((own_lse, lse, home))
    begin_moves(ranks, back).wait()
    return out, lse
