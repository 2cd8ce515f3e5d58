"""Which way a batch moves: predicted from bytes over the measured bandwidth and from arithmetic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.planning.batch_plan import Options
from .group import Ranks
from .heads import Heads
from .needs import Pages, moved_tokens
from .shares import Requests, Shares

_PROBE_BYTES = 1 << 20

MERGE_KEYS = 32
"""What merging the fp32 state of a row of a step takes, in keys: an estimate."""

STEP_S = 3e-4
"""What a step takes besides its keys and rows, for messages and launches: an estimate."""

_PROBES = 3


class Way(NamedTuple):
    """One way to move a batch. For each rank the bytes that it receives, and its work.

    name: "keys": rows and the keys that they need come together at one rank. "ring": likewise, but
    the keys of one rank after another. "states": rows go to the keys, states come back. "heads":
    every rank gets all tokens of some of the heads.
    """

    name: str
    moved_bytes: NDArray[np.int64]
    load: NDArray[np.float64]
    seconds: float


class Rates(NamedTuple):
    """What the slowest rank needs: seconds a byte received, and a row and key of all heads."""

    byte_s: float
    pair_s: float


def measured_rates(ranks: Ranks, pair_s: float) -> Rates:
    """The rates that all ranks plan with: those of the slowest one. Every rank calls it.

    The bandwidth is measured, by messages of a megabyte between neighbours.
    """
    byte_s = 0.0
    if ranks.size > 1:
        sent, received = (
            torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=ranks.device) for _ in range(2)
        )
        after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        to = [[sent] if r == after else [] for r in range(ranks.size)]
        source = [[received] if r == before else [] for r in range(ranks.size)]
        times = []
        for _ in range(_PROBES):
            start = time.perf_counter()
            ranks.begin(to, source).wait()
            if ranks.device_type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        byte_s = min(times) / _PROBE_BYTES
    every = ranks.gathered([byte_s, pair_s])
    return Rates(max(x[0] for x in every), max(x[1] for x in every))


def way_of_keys(
    requests: Requests, shares: Shares, pages: Pages, options: Options, rates: Rates
) -> Way:
    """Rows and the keys that they need come together."""
    moved = moved_tokens(pages, requests) * key_bytes(options)
    moved = moved + foreign_rows(requests, shares) * query_bytes(options)
    return _way("keys", moved, shares, rates)


def way_of_ring(
    requests: Requests, shares: Shares, pages: Pages, keys: Way, options: Options, rates: Rates
) -> Way:
    """Keys come from one rank after another, while the rows are computed. keys: `way_of_keys`.

    On CPUs messages take the time of the cores that compute: two ranks of a causal prefill of 8k
    tokens were 1.4x faster than one process, by "keys" 1.7x (a Xeon with AMX).
    """
    count = requests.num_ranks
    rows = np.bincount(shares.rank, shares.end - shares.begin, count)
    home = [
        requests.kv_shards.searchsorted(pages.bounds[x] - last, "right") - 1
        for x, last in ((pages.begin, 0), (pages.end, 1))
    ]
    steps = np.minimum(np.bincount(pages.rank, home[1] - home[0] + 1, count), count)
    load = shares.load + rows * np.maximum(steps - 1, 0) * MERGE_KEYS
    first = foreign_rows(requests, shares) * query_bytes(options)
    moving, computing = (keys.moved_bytes - first) * rates.byte_s, load * rates.pair_s
    seconds = moving + computing if options.cpu else np.maximum(moving, computing)
    seconds = seconds + first * rates.byte_s + steps * STEP_S
    return Way("ring", keys.moved_bytes, load, float(seconds.max(initial=0.0)))


def way_of_states(requests: Requests, at_keys: Shares, options: Options, rates: Rates) -> Way:
    """Rows go to the keys, states come back."""
    row = options.num_q_heads * options.head_dim * options.q_dtype.itemsize
    state = options.num_q_heads * (options.head_dim_v + 1) * 4
    moved = foreign_rows(requests, at_keys) * (row + state)
    return _way("states", moved, at_keys, rates)


def way_of_heads(
    requests: Requests, shares: Shares, heads: Heads, options: Options, rates: Rates
) -> Way:
    """Every rank gets all tokens of its heads."""
    share = np.diff(heads.q) / options.num_q_heads
    kv_share = (heads.kv_end - heads.kv) / options.num_kv_heads
    q_rows, kv_rows = (np.diff(x) for x in (requests.q_shards, requests.kv_shards))
    query = options.num_q_heads * options.head_dim * options.q_dtype.itemsize
    result = options.num_q_heads * options.head_dim_v * options.q_dtype.itemsize
    moved = (q_rows.sum() - q_rows) * share * query + (kv_rows.sum() - kv_rows) * (
        kv_share * key_bytes(options)
    )
    moved = moved + q_rows * (1 - share) * result
    return _way("heads", moved.round().astype(np.int64), shares, rates)


def _way(name: str, moved: NDArray[np.int64], shares: Shares, rates: Rates) -> Way:
    seconds = moved * rates.byte_s + shares.load * rates.pair_s
    return Way(name, moved, shares.load, float(seconds.max(initial=0.0)))


def cheapest(ways: Sequence[Way]) -> Way:
    """The way of the least predicted time."""
    return min(ways, key=lambda way: way.seconds)


def key_bytes(options: Options) -> int:
    """Of a token's keys and values, of all heads."""
    k, v = options.k_dtype.itemsize, options.v_dtype.itemsize
    return options.num_kv_heads * (options.head_dim * k + options.head_dim_v * v)


def query_bytes(options: Options) -> int:
    """Of a query row and its result, of all heads."""
    return options.num_q_heads * (options.head_dim + options.head_dim_v) * options.q_dtype.itemsize


def foreign_rows(requests: Requests, shares: Shares) -> NDArray[np.int64]:
    """Of each rank, the rows that it computes and another rank holds."""
    low, high = requests.q_shards[shares.rank], requests.q_shards[shares.rank + 1]
    own = np.maximum(np.minimum(shares.end, high) - np.maximum(shares.begin, low), 0)
    found = np.bincount(shares.rank, shares.end - shares.begin - own, requests.num_ranks)
    return found.astype(np.int64)
