"""Batches for benchmarks: lengths, page tables, and the number of tiles that a window visits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.planner.tiles import Problem, choose
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant


def indptr(lengths: Sequence[int]) -> Tensor:
    """[0, lengths[0], lengths[0] + lengths[1], ...], int64."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def constant_lengths(count: int, mean: int) -> list[int]:
    """`count` times the mean."""
    return [mean] * count


def uniform_lengths(count: int, mean: int) -> list[int]:
    """Evenly spaced from half to 1.5 times the mean, shuffled; they add up to count * mean."""
    lengths = [mean // 2 + mean * i // max(count - 1, 1) for i in range(count)]
    return _adding_up(_shuffled(lengths), count * mean)


def zipf_lengths(count: int, mean: int) -> list[int]:
    """The i-th longest is 1 / i times the longest, shuffled; they add up to count * mean."""
    weights = [1 / i for i in range(1, count + 1)]
    lengths = [max(1, int(count * mean * w / sum(weights))) for w in weights]
    return _adding_up(_shuffled(lengths), count * mean)


def _shuffled(values: list[int]) -> list[int]:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0)).tolist()
    return [values[i] for i in order]


def _adding_up(lengths: list[int], total: int) -> list[int]:
    longest = lengths.index(max(lengths))
    lengths[longest] += total - sum(lengths)
    return lengths


def page_table(
    lengths: Sequence[int], page_size: int, shuffled: bool = False, device: str = "cpu"
) -> fa.Paged:
    """Pages of a cache that holds only these requests, in order or shuffled."""
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts)
    order = torch.arange(total)
    if shuffled:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lengths])
    return fa.Paged(indptr(counts), order.int().to(device), last, page_size)


def visited_tiles(
    q_len: int, kv_len: int, group: int, dtype: torch.dtype, head_dim: int, window: int | None
) -> int:
    """Tiles with a kept pair, of one request and kv head in this CPU's kernel.

    The queries are the last `q_len` positions; each sees the `window` keys up to its own, or all.
    """
    variant = as_variant(None if window is None else fa.SlidingWindow(window))
    name = str(dtype).removeprefix("torch.")
    problem = Problem((q_len,), (kv_len,), group, 1, head_dim, head_dim, name, name, name)
    bound = variant.bind(Dims(1, group, 1, q_len, kv_len, head_dim, head_dim), {})
    spec = choose(bound.ir, problem, default_target(), ("indirect",), variant.name)
    packed = q_len * group
    total = 0
    for begin in range(0, packed, spec.tile_q):
        first = kv_len - q_len + begin // group
        last = kv_len - q_len + (min(begin + spec.tile_q, packed) - 1) // group
        low = 0 if window is None else max(0, first - window + 1)
        high = kv_len if window is None else min(kv_len, last + 1)
        total += -(-high // spec.tile_kv) - low // spec.tile_kv
    return total
