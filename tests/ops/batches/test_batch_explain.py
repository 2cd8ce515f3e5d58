"""`plan.explain()` and `plan.plot()` agree with the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.planner.tiles import few_rows, merge_cost
from tests.batch.batches import Batch, share_prefix
from tests.batch.sparse import blocks
from tests.harness import processes
from tests.harness.toolkit import needs_nvcc
from tests.ops.batches.mixed_batches import made_for, mixed


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_up_to_the_planners_few_rows_are_few_row_work(dtype: str) -> None:
    most = few_rows(default_target(), dtype)
    batch = fa.BatchAttention(
        num_q_heads=most, num_kv_heads=1, head_dim=64, q_dtype=getattr(torch, dtype)
    )
    lengths = torch.tensor([0, 1, 3], dtype=torch.int32)  # `most` packed rows, and twice as many
    text = batch.plan(lengths, fa.Ragged(lengths * 40)).explain()
    assert re.search(rf"few_row +{most} x \d+ +- +1 ", text), text
    assert re.search(r"prefill +\d+ x \d+ +- +1 ", text), text


def test_tile_kinds_workers_loads_and_workspace() -> None:
    b = Batch((1, 200, 1), (30000, 200, 50), (4, 2), 64, page_size=16)
    batch = made_for(b, fa.Causal())
    plan = batch.plan(b.q_indptr, b.storage)
    text = plan.explain()
    assert "plan of Causal on cpu:" in text and "3 requests, 202 query tokens" in text
    assert "30250 keys (up to 30000), pages of 16" in text
    assert re.search(r"prefill +\d+ x \d+ +indirect +1 ", text), text
    assert re.search(
        rf"few_row +{few_rows(default_target(), 'float32')} x 64 +indirect +2 ", text
    ), text
    native = batch._planned.first.native
    assert f"in at most {native.most_splits} parts, {native.num_merges} merges" in text
    assert f"({plan.workspace_bytes} bytes)" in text
    ratio = float(re.search(r"critical path .*, ([\d.]+) of the mean", text)[1])
    assert 1.0 <= ratio < 1.2
    threads = torch.get_num_threads()
    for i, kind in enumerate(("prefill", "few_row")):  # workers, busy ones, their loads
        loads = native.load_ns(i)
        busy = sum(load > 0 for load in loads)
        row = re.search(rf"{kind} +{threads} +{busy} +(\S+ \S+) +(\S+ \S+) +[\d.]+", text)
        assert row and seconds(row[1]) == pytest.approx(sum(loads) / threads * 1e-9, rel=0.01)
        assert seconds(row[2]) == pytest.approx(max(loads) * 1e-9, rel=0.01)
    merge_ns = merge_cost("cpu:generic") if native.num_merges else 0.0
    predicted = seconds(re.search(r"predicted time: (\S+ [a-z]+)", text)[1])
    assert predicted == pytest.approx((native.critical_ns + merge_ns) * 1e-9, rel=0.01)
    assert "why prefill" in text and "why few_row" in text and "-> few_row" in text
    assert "bounds of each row's keys are costed" in text
    assert "workspace" in repr(plan)


def test_lists_levels_and_empty_batches() -> None:
    b = mixed(page_size=16)
    batch = made_for(b, None)
    sparse = batch.plan(b.q_indptr, b.storage, sparsity=blocks(b, (16, 8), 0.5).sparsity)
    assert "5 key lists of 16 x 8 blocks" in sparse.explain()
    shared = Batch((1, 1, 1), (100, 90, 80), (4, 2), 64, page_size=16)
    share_prefix(shared, 64)
    cascade = fa.CascadeAttention(None, **shared.options())
    plan = cascade.plan(fa.cascade_levels(shared.q_indptr, shared.storage))
    assert "1 groups in 1 levels of shared keys" in plan.explain()
    empty = Batch((), (), (4, 2), 64, page_size=16)
    text = batch.plan(empty.q_indptr, empty.storage).explain()
    assert "no work" in text and "0 requests" in text


def test_plans_that_do_not_depend_on_the_batch_say_so() -> None:
    b = mixed(page_size=16)
    text = made_for(b, None, batch_invariant=True).plan(b.q_indptr, b.storage).explain()
    assert "cuts at fixed positions" in text
    limits = fa.Limits(max_requests=8, max_q_tokens=64, max_kv_len=100, max_pages=64)
    text = made_for(b, None, limits=limits).plan(b.q_indptr, b.storage).explain()
    assert "max_requests=8" in text


def test_a_mask_in_cpp_skips_nothing_and_the_plan_says_so() -> None:
    b = mixed(page_size=16)
    mask = fa.variant(mask_mod=fa.cpp("return kv_idx <= q_idx;"))
    text = made_for(b, mask).plan(b.q_indptr, b.storage).explain()
    assert "is not analysed: its code runs on every tile" in text
    assert "skip" not in text and "cost nothing" not in text


@needs_nvcc
def test_a_cuda_target() -> None:
    b = mixed("emulated:sm_80", 16)
    text = made_for(b, fa.Causal(), "emulated:sm_80").plan(b.q_indptr, b.storage).explain()
    assert "on emulated:sm_80" in text and "paged" in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_timeline(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    b = Batch((1, 200, 1), (3000, 200, 50), (4, 2), 64, page_size=16)
    path = tmp_path / f"plan.{suffix}"
    made_for(b, fa.Causal()).plan(b.q_indptr, b.storage).plot(path)
    assert path.stat().st_size > 1000
    if suffix == "svg":
        text = path.read_text()
        assert "predicted time, us" in text and "worker" in text


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    b = mixed()
    plan = made_for(b, None).plan(b.q_indptr, b.storage)
    with pytest.raises(fa.InputError, match="cannot be written"):
        plan.plot(tmp_path / "plan.nothing")


def test_planning_imports_no_plots() -> None:
    code = (
        "import sys, torch, flashattn_jit as fa\n"
        "b = fa.BatchAttention(None, num_q_heads=1, num_kv_heads=1, head_dim=16,"
        " q_dtype=torch.float32)\n"
        "b.plan(torch.tensor([0, 1]), fa.Ragged(torch.tensor([0, 4])))\n"
        "b.run(torch.ones(1, 1, 16), torch.ones(4, 1, 16), torch.ones(4, 1, 16))\n"
        "slow = {'matplotlib', 'sympy', 'torch._dynamo', 'jinja2'} & set(sys.modules)\n"
        "assert not slow - {'jinja2'}, slow\n"
    )
    processes.run(["-c", code], check=True, timeout=300)
    assert torch.get_num_threads() >= 1
