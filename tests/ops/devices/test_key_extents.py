"""Launches know the extents of k and v: no kernel needs to read beyond them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.ops.device import plan_memory
from flashattn_jit.ops.device.emulated import Recording, record
from tests.batch.batches import Batch, share_prefix
from tests.harness.abi import Args
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc

BF16, TARGET = torch.bfloat16, "emulated:sm_80"
LIMITS = fa.Limits(max_requests=4, max_q_tokens=16, max_kv_len=128, max_pages=32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16)


def dense() -> object:
    k, lengths = randn(2, 1, 70, 64), torch.tensor([5, 60])
    return fa.attention(randn(2, 2, 3, 64), k, randn(2, 1, 70, 64), kv_len=lengths, target=TARGET)


def broadcast() -> object:
    k = randn(1, 1, 70, 64).expand(2, -1, -1, -1)
    return fa.attention(randn(2, 2, 3, 64), k, k, target=TARGET)


def without_keys() -> object:
    k = randn(2, 1, 0, 64)
    return fa.attention(randn(2, 2, 3, 64), k, k, target=TARGET)


def packed() -> object:
    k, rows, keys = randn(90, 1, 64), torch.tensor([0, 3, 4]), torch.tensor([0, 20, 90])
    return fa.varlen_attention(randn(4, 2, 64), k, k, rows, keys, target=TARGET)


def ragged(spare_rows: int = 0, **options: object) -> object:
    b = Batch((3, 1), (20, 70), (2, 1), 64, BF16)
    batch = fa.BatchAttention(**b.options(), target=TARGET, **options)
    batch.plan(b.q_indptr, b.storage)
    k, v = (torch.cat([t, randn(spare_rows, 1, 64)]) for t in (b.k, b.v))
    return batch.run(b.q, k, v)


def captured() -> object:
    return ragged(10, limits=LIMITS, cuda_graph=True)


def paged() -> Batch:
    b = Batch((3, 1), (40, 70), (2, 1), 64, BF16, 16)
    b.k, b.v = (torch.cat([t, randn(50 - len(t), 16, 1, 64)]) for t in (b.k, b.v))
    return b


def pages() -> object:
    b = paged()
    batch = fa.BatchAttention(**b.options(), target=TARGET)
    batch.plan(b.q_indptr, b.storage)
    return batch.run(b.q, b.k, b.v)


def cascade() -> object:
    b = paged()
    share_prefix(b, 32)
    batch = fa.CascadeAttention(**b.options(), target=TARGET)
    batch.plan(fa.cascade_levels(b.q_indptr, b.storage))
    return batch.run(b.q, b.k, b.v)


def levels_of_two_page_sizes() -> object:
    """Pages of 32 for both requests, and of 16, the cache's, for each."""
    b = paged()
    shared = fa.Paged(torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([32]), 32)
    own = fa.Paged(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), torch.tensor([8, 16]), 16)
    batch = fa.CascadeAttention(**b.options(), target=TARGET)
    batch.plan([
        fa.CascadeLevel(torch.tensor([0, 4]), shared), fa.CascadeLevel(b.q_indptr, own),
    ])  # fmt: skip
    return batch.run(b.q, b.k, b.v)


@pytest.mark.parametrize(
    ("call", "requests", "rows"),
    [
        (dense, 2, 70),
        (broadcast, 2, 70),
        (without_keys, 2, 0),
        (packed, 1, 90),
        (ragged, 1, 90),
        (captured, 1, 100),
        (pages, 50, 16),
        (cascade, 50, 16),
        (levels_of_two_page_sizes, 50, 16),
    ],
)
def test_kernels_know_the_extents_of_keys(
    call: Callable[[], object], requests: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Args] = []

    def kept(*arguments: object) -> Recording:
        for _, (kernel, _, _, _, params, _) in record(*arguments).launches:  # type: ignore[arg-type]
            assert "attention" in kernel or "merge" in kernel
            found.append(Args.from_buffer_copy(params))
        return Recording((), ())

    monkeypatch.setattr(plan_memory, "record", kept)
    call()
    assert found
    assert {(a.kv_requests, a.kv_rows) for a in found} == {(requests, rows)}
    assert {a.num_pages for a in found} == {requests if found[0].page_size else 0}
