"""`ParallelPlan`: which rank computes what, and what moves, for inspection."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..errors import InputError
from ..ops.planning.batch_plan import Options
from .costs import Way, foreign_rows, key_bytes
from .needs import Pages, moved_tokens
from .shares import Ints, Requests, Shares, ranges


class ParallelPlan:
    """How a batch is shared out over ranks; `ContextParallel.plan` returns it.

    Example:
        >>> print(parallel.plan(q_indptr).explain())
    """

    def __init__(
        self, requests: Requests, shares: Shares, pages: Pages, options: Options, way: Way,
        ways: tuple[Way, ...], overlap: float,
    ) -> None:  # fmt: skip
        self._overlap = overlap
        self._requests, self._shares = requests, shares
        self._pages, self._options = pages, options
        self._way, self._ways = way, ways

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a ParallelPlan is part of the ContextParallel that made it and cannot be copied or "
            "pickled; keep the text of explain()"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self._requests.num_ranks

    @property
    def balance(self) -> float:
        """The predicted work of the busiest rank over the mean; 1 is even."""
        return self._shares.balance

    @property
    def balance_bound(self) -> float:
        """The least `balance` of any plan: above 1 where a few rows are more than a rank's share.

        Rows are dealt out 16 at a time.
        """
        mean = float(self._shares.load.mean())
        return self._shares.least / mean if mean else 1.0

    @property
    def home_balance(self) -> float:
        """What `balance` would be if every rank computed the rows that it holds."""
        mean = float(self._shares.home_load.mean())
        return float(self._shares.home_load.max()) / mean if mean else 1.0

    @property
    def way(self) -> str:
        """What moves: "keys", "ring", "states" or "heads", see `ContextParallel`."""
        return self._way.name

    @property
    def overlap(self) -> float:
        """The part of this rank's rows that are computed while messages are on their way."""
        return self._overlap

    @property
    def moved_bytes(self) -> list[int]:
        """Bytes that each rank receives from others in a run, and of results that it sends back."""
        return self._way.moved_bytes.tolist()  # type: ignore[no-any-return]

    @property
    def key_bytes(self) -> list[int]:
        """Bytes of keys and values that each rank receives from others in a run."""
        if self.way == "states":
            return [0] * self.num_ranks
        moved = moved_tokens(self._pages, self._requests) * key_bytes(self._options)
        return moved.tolist()  # type: ignore[no-any-return]

    @property
    def gathered_key_bytes(self) -> list[int]:
        """What `key_bytes` would be for an all-gather of all keys."""
        shards = self._requests.kv_shards
        return ((shards[-1] - np.diff(shards)) * key_bytes(self._options)).tolist()  # type: ignore[no-any-return]

    def rows(self, rank: int) -> Ints:
        """The packed query tokens that a rank computes, ascending: int64 [num_rows]."""
        return ranges(*self._shares.of(rank))

    def explain(self) -> str:
        """Tables, as text, of the ways considered, and of each rank's rows, work and messages."""
        shards = self._requests.q_shards
        mean = float(self._shares.load.mean()) or 1.0
        lines = [
            f"{self.num_ranks} ranks, {len(self._requests.q_indptr) - 1} requests, "
            f"{int(shards[-1])} query tokens, {int(self._requests.kv_indptr[-1])} key tokens",
            f"largest load over the mean: {self.balance:.3f} (at least {self.balance_bound:.3f}; "
            f"{self.home_balance:.3f} if no row moved)",
            f"keys and values, in pages of {self._pages.page_size} keys: "
            f"{_mb(sum(self.key_bytes))}, by an all-gather {_mb(sum(self.gathered_key_bytes))}",
            "way       predicted  received by a rank  busiest rank",
        ]
        for way in self._ways:
            share = way.load.max() / (way.load.mean() or 1.0)
            chosen = "  chosen" if way is self._way else ""
            lines.append(
                f"{way.name:8} {way.seconds * 1e3:8.3f} ms  {_mb(way.moved_bytes.max()):>18}  "
                f"{share:12.3f}{chosen}"
            )
        lines.append(
            f"{self.overlap:.0%} of the rows of this rank are computed while messages are on "
            "their way"
        )
        lines.append("rank  rows held  computed  from others     load      received")
        foreign = foreign_rows(self._requests, self._shares)
        for rank, received in enumerate(self.moved_bytes):
            begin, end = self._shares.of(rank)
            lines.append(
                f"{rank:4}  {int(shards[rank + 1] - shards[rank]):9}  "
                f"{int((end - begin).sum()):8}  {foreign[rank]:11}  "
                f"{self._shares.load[rank] / mean:7.3f}  {_mb(received):>12}"
            )
        return "\n".join(lines)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
