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


def kv_heads_of(num_kv_heads: int, num_ranks: int) -> Ints:
    """The kv heads of each rank, as bounds: no rank has two more than another."""
    return np.arange(num_ranks + 1, dtype=np.int64) * num_kv_heads // num_ranks


def all_rows(tiles: NDArray[Any], requests: Requests, heads: Ints) -> Shares:
    """The work of ranks that have all rows and the heads of `heads`."""
    rows = (tiles["row_end"] - tiles["row_begin"]).astype(np.float64)
    work = float((rows * (tiles["visited"] + float(ROW_KEYS))).sum())
    load = work * np.diff(heads) / max(1, int(heads[-1]))
    rank = np.arange(requests.num_ranks)
    return Shares(
        rank, 0 * rank, 0 * rank + requests.q_shards[-1], load, load, work / requests.num_ranks
    )


class ByHeads(NamedTuple):
    """A plan of heads. heads: bounds of the kv heads of each rank. group: query heads a kv head."""

    batch: DealtBatch
    heads: Ints
    group: int
    requests: Requests

    def run(
        self, ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any,
        return_lse: bool, params: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of the rows that the rank holds; lse is None unless requested."""
        q_bounds, kv_bounds = self.requests.q_shards.tolist(), self.requests.kv_shards.tolist()
        given = ((q, q_bounds, self.group), (k, kv_bounds, 1), (v, kv_bounds, 1))
        every = []
        for x, bounds, group in given:
            own = self._slice(ranks.rank, group)
            every.append(x.new_empty((bounds[-1], own.stop - own.start, *x.shape[2:])))
        sent = [
            [x[:, self._slice(r, group)].contiguous() for x, _, group in given]
            for r in range(ranks.size)
        ]
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
        slices = [self._slice(r, self.group) for r in range(ranks.size)]
        parts = [[x.new_empty(x[:, heads].shape) for x in targets] for heads in slices]
        exchange = ranks.begin(sent, parts)
        parts[ranks.rank] = sent[ranks.rank]
        exchange.wait()
        for heads, arrived in zip(slices, parts, strict=True):
            for target, part in zip(targets, arrived, strict=True):
                target[:, heads] = part
        return out, lse

    def _slice(self, rank: int, group: int) -> slice:
        return slice(int(self.heads[rank]) * group, int(self.heads[rank + 1]) * group)
