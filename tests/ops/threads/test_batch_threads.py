"""Plans and threads: runs with another number of threads than the plan, and concurrent runs."""

from __future__ import annotations

import threading

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import indptr

pytestmark = pytest.mark.usefixtures("restored_threads")

Q_LEN, KV_LEN = (1, 70, 3, 1, 0, 33), (30000, 400, 50, 1, 7, 33)  # both kinds, keys that are cut


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(sum(Q_LEN), 6, 32)
    k, v = torch.randn(2, sum(KV_LEN), 2, 32)
    return q, k, v


def planned() -> fa.BatchAttention:
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=6, num_kv_heads=2, head_dim=32, q_dtype=torch.float32
    )
    plan = batch.plan(indptr(Q_LEN), fa.Ragged(indptr(KV_LEN)))
    assert plan.workspace_bytes > 0
    return batch


@pytest.mark.parametrize("workers", [4, 5])
def test_the_threads_of_a_run_change_no_bit(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], workers: int
) -> None:
    torch.set_num_threads(workers)
    batch = planned()
    first = batch.run(*tensors)
    for threads in (1, 2, workers + 3):
        torch.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(batch.run(*tensors), first)


def test_many_runs_of_one_plan_at_once(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    torch.set_num_threads(5)
    batch = planned()
    first = batch.run(*tensors)
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(10):
            if not torch.equal(batch.run(*tensors), first):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
