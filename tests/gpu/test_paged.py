"""Keys in pages on the device: any page size, hooks see logical positions, poison is never read."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.ops.keys.paged import Paged
from flashattn_jit.variants.reference import varlen_reference
from tests.gpu.harness import PLAIN, Want
from tests.gpu.place import DEVICE, TARGET, needs_gpu
from tests.ops.batches.paged_calls import paged_attention, paged_batch
from tests.ops.cases import assert_close
from tests.registry.case import Shape

BF16 = torch.bfloat16
DECODE = ([1, 1, 1, 1], [2500, 1, 700, 0])
MIXED = ([1, 130, 5, 0], [1900, 130, 333, 12])
PAGE_SIZES = (1, 16, 64)
WANTS = tuple(
    Want(name, Shape(1, 4 * group, 4, rows, 64, 64, 64), BF16, ("paged",))
    for name in PLAIN
    for group, rows in ((1, 1), (4, 1), (4, 8), (4, 130))
)


class Cache:
    """Packed keys and values, and the same in pages in random order; all else is NaN."""

    def __init__(self, kv_len: list[int], page_size: int, heads: int, dim: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(kv_len), heads, dim)
        self.k, self.v = (torch.randn(shape, generator=generator).to(BF16) for _ in range(2))
        self.indptr = torch.tensor([0, *kv_len]).cumsum(0)
        counts = [-(-n // page_size) for n in kv_len]
        used = sum(counts)
        order = torch.randperm(used + 3, generator=generator)[:used].to(torch.int32)
        pages = torch.full((2, used + 3, page_size, heads, dim), torch.nan, dtype=BF16)
        starts = [0, *itertools.accumulate(counts)]
        for b, n in enumerate(kv_len):
            for j in range(n):
                page = order[starts[b] + j // page_size]
                pages[0, page, j % page_size] = self.k[self.indptr[b] + j]
                pages[1, page, j % page_size] = self.v[self.indptr[b] + j]
        last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in kv_len])
        self.k_pages, self.v_pages = pages[0].to(DEVICE), pages[1].to(DEVICE)
        self.paged = Paged(torch.tensor(starts), order.to(DEVICE), last, page_size)


def check(out, q, cache: Cache, q_indptr, variant) -> None:
    args = (q.cpu(), cache.k, cache.v, q_indptr, cache.indptr, variant)
    assert_close(out.cpu(), varlen_reference(*args)[0], varlen_reference(*args, dtype=BF16)[0])


def queries(q_len: list[int], heads: int, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(sum(q_len), heads, dim, generator=torch.Generator().manual_seed(5))
    return q.to(BF16).to(DEVICE), torch.tensor([0, *q_len]).cumsum(0)


@pytest.mark.parametrize("variant", ["plain full", "plain causal", "plain alibi", "plain window"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decoding_over_pages(page_size, variant):
    q_len, kv_len = DECODE
    group = {1: 1, 16: 4, 64: 4}[page_size]
    cache = Cache(kv_len, page_size, 4, 64)
    q, q_indptr = queries(q_len, 4 * group)
    made = PLAIN[variant]()
    out, _ = paged_attention(
        q, cache.k_pages, cache.v_pages, q_indptr, cache.paged, made, target=TARGET
    )
    check(out, q, cache, q_indptr, made)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_of_all_kinds_over_pages(page_size):
    q_len, kv_len = MIXED
    cache = Cache(kv_len, page_size, 4, 64)
    q, q_indptr = queries(q_len, 16)
    out, lse = paged_attention(
        q, cache.k_pages, cache.v_pages, q_indptr, cache.paged, fa.Causal(), return_lse=True,
        target=TARGET,
    )  # fmt: skip
    check(out, q, cache, q_indptr, fa.Causal())
    assert torch.isfinite(lse).all()


def test_appended_tokens_are_found():
    q_len, kv_len = [3, 1], [40, 17]
    cache = Cache(kv_len, 16, 4, 64)
    new_k, new_v = (torch.randn(4, 4, 64).to(BF16) for _ in range(2))
    q, q_indptr = queries(q_len, 16)
    fa.append_paged_kv(
        new_k.to(DEVICE), new_v.to(DEVICE), cache.k_pages, cache.v_pages, q_indptr, cache.paged,
        target=TARGET,
    )  # fmt: skip
    at = [37, 38, 39, 40 + 16]  # the last positions of each request
    cache.k[at], cache.v[at] = new_k, new_v
    out, _ = paged_attention(
        q, cache.k_pages, cache.v_pages, q_indptr, cache.paged, fa.Causal(), target=TARGET
    )
    check(out, q, cache, q_indptr, fa.Causal())


@needs_gpu
def test_a_graph_follows_the_page_table():
    """Pages move between replays; the indices are read when the graph runs."""
    q_len, kv_len = DECODE
    first = Cache(kv_len, 16, 4, 64)
    q, q_indptr = queries(q_len, 16)

    batch = paged_batch(q, first.k_pages, first.v_pages)
    batch.plan(q_indptr, first.paged)

    def call() -> torch.Tensor:
        return batch.run(q, first.k_pages, first.v_pages)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        other = Cache(kv_len, 16, 4, 64, seed)
        first.k_pages.copy_(other.k_pages)
        first.v_pages.copy_(other.v_pages)
        first.paged.page_indices.copy_(other.paged.page_indices)
        graph.replay()
        torch.cuda.synchronize()
        check(out, q, other, q_indptr, None)
