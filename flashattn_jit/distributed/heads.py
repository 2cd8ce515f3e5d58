"""Every rank computes all rows of some of the heads: tokens are exchanged for heads, and back.

Source: Jacobs et al. 2023, arXiv 2309.14509 (DeepSpeed Ulysses).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .dealt_batch import DealtBatch
from .group import Ranks
from .shares import ROW_KEYS, Ints, Requests, Shares


class Heads(NamedTuple):
    """The heads of each rank: q heads q[r] to q[r + 1], which see kv heads kv[r] to kv_end[r].

    Where there are fewer kv heads than ranks, several ranks have parts of the q heads of one.
    """

    q: Ints
    kv: Ints
    kv_end: Ints

    def of_q(self, rank: int) -> slice:
        """The q heads of a rank."""
        return slice(int(self.q[rank]), int(self.q[rank + 1]))

    def of_kv(self, rank: int) -> slice:
        """The kv heads of a rank."""
        return slice(int(self.kv[rank]), int(self.kv_end[rank]))


def heads_of(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> Heads:
    """As even shares as there are, for at least as many q heads as ranks."""
    ranks, group = np.arange(num_ranks + 1, dtype=np.int64), num_q_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        bounds = ranks * num_kv_heads // num_ranks
        return Heads(bounds * group, bounds[:-1], bounds[1:])
    # kv head j is seen by the ranks first[j] to first[j + 1].
    first = np.arange(num_kv_heads + 1, dtype=np.int64) * num_ranks // num_kv_heads
    kv = first.searchsorted(ranks[:-1], "right") - 1
    inside, count = ranks[:-1] - first[kv], np.diff(first)[kv]
    q = np.append(kv * group + inside * group // count, num_q_heads)
    return Heads(q, kv, kv + 1)


def all_rows(tiles: NDArray[Any], requests: Requests, heads: Heads) -> Shares:
    """The work of ranks that have all rows and the heads of `heads`."""
    rows = (tiles["row_end"] - tiles["row_begin"]).astype(np.float64)
    work = float((rows * (tiles["visited"] + float(ROW_KEYS))).sum())
    load = work * np.diff(heads.q) / int(heads.q[-1])
    rank = np.arange(requests.num_ranks)
    return Shares(
        rank, 0 * rank, 0 * rank + requests.q_shards[-1], load, load, work / requests.num_ranks
    )


class ByHeads(NamedTuple):
    """A plan of heads."""

    batch: DealtBatch
    heads: Heads
    requests: Requests

    def run(
        self, ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any,
        return_lse: bool, params: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of the rows that the rank holds; lse is None unless requested."""
        q_bounds, kv_bounds = self.requests.q_shards.tolist(), self.requests.kv_shards.tolist()
        of_q, of_kv = self.heads.of_q, self.heads.of_kv
        given = ((q, q_bounds, of_q), (k, kv_bounds, of_kv), (v, kv_bounds, of_kv))
        every = []
        for x, bounds, heads in given:
            own = heads(ranks.rank)
            every.append(x.new_empty((bounds[-1], own.stop - own.start, *x.shape[2:])))
        sent = [[x[:, heads(r)].contiguous() for x, _, heads in given] for r in range(ranks.size)]
        parts = [
            [x[bounds[r] : bounds[r + 1]] for x, (_, bounds, _) in zip(every, given, strict=True)]
            for r in range(ranks.size)
        ]
        exchange = ranks.begin(sent, parts)
        for part, own_part in zip(parts[ranks.rank], sent[ranks.rank], strict=True):
            part.copy_(own_part)
        exchange.wait()
        found: Any = ranks.computed(
            lambda: self.batch.run(*every, scale=scale, return_lse=return_lse, **params)
        )
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        targets = [out] if lse is None else [out, lse]
        sent = [
            [x[begin:end] for x in (found if return_lse else (found,))]
            for begin, end in itertools.pairwise(q_bounds)
        ]
        slices = [of_q(r) for r in range(ranks.size)]
        parts = [[x.new_empty(x[:, part].shape) for x in targets] for part in slices]
        exchange = ranks.begin(sent, parts)
        parts[ranks.rank] = sent[ranks.rank]
        exchange.wait()
        for some, arrived in zip(slices, parts, strict=True):
            for target, part in zip(targets, arrived, strict=True):
                target[:, some] = part
        return out, lse
