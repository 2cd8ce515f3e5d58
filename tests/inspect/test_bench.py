"""`bench`: the candidates that it compares, their inputs, and the report."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.inspect import bench as bench_module
from flashattn_jit.inspect.bench import bench
from flashattn_jit.variants.params import Dims

DIMS = {"batch": 1, "num_q_heads": 4, "num_kv_heads": 2, "q_len": 64, "kv_len": 96,
        "head_dim": 32, "head_dim_v": 32}  # fmt: skip


def test_three_candidates_run_in_turn_on_the_same_problem() -> None:
    report = bench(fa.Causal(), dims=DIMS, seconds=0.0)
    names = [t.name for t in report.timings]
    assert names == ["compiled", "torch SDPA", "eager reference"]
    compiled, sdpa, reference = report.timings
    assert len(compiled.times_s) == len(sdpa.times_s) >= 5
    assert 1 <= len(reference.times_s) <= 3
    assert all(min(t.times_s) > 0 for t in report.timings)
    assert (report.dims.q_len, report.dims.kv_len, report.dims.num_kv_heads) == (64, 96, 2)
    assert report.skipped == ()


def test_medians_spreads_and_roofline_shares_follow_from_the_times() -> None:
    timing = bench_module.Timing("x", "", (1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median_s == 3.0
    low, high = timing.spread_s
    assert 1.0 <= low <= 3.0 <= high < 100.0
    assert bench_module.Timing("x", "", (2.0,)).spread_s == (2.0, 2.0)
    report = bench(fa.Full(), dims=DIMS, seconds=0.0)
    compiled = report.timings[0]
    assert report.roofline_share(compiled) == report.attainable_s / compiled.median_s
    assert report.visited_share == 1.0


@pytest.mark.parametrize(
    ("variant", "note"),
    [(fa.Full(), "the same"), (fa.Causal(), "the same"), (fa.SoftCap(20.0), "without")],
    ids=["full", "causal", "softcap"],
)
def test_it_says_where_torch_computes_something_else(variant: fa.Variant, note: str) -> None:
    report = bench(variant, dims=DIMS, seconds=0.0)
    assert note in report.timings[1].note
    assert note in str(report)


def test_candidates_that_are_the_same_give_the_same() -> None:
    q, k, v = bench_module._inputs(Dims(**DIMS), torch.float32, "cpu")
    found, _ = bench_module._candidates(fa.Causal(), q, k, v, {})
    compiled, sdpa, reference = (run() for _, run in found.values())
    torch.testing.assert_close(compiled, sdpa)
    torch.testing.assert_close(compiled, reference)


def test_a_reference_that_would_not_fit_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_module, "_REFERENCE_BYTES", 1000)
    report = bench(fa.Causal(), dims=DIMS, seconds=0.0)
    assert [name for name, _ in report.skipped] == ["eager reference"]
    assert "did not run" in str(report)


def test_tensors_beyond_memory_are_refused_before_they_are_made() -> None:
    with pytest.raises(InputError, match="of memory"):
        bench(fa.Causal(), dims={**DIMS, "batch": 10**6, "kv_len": 4096})


@pytest.mark.parametrize("device", ["cuda:77", "H100", "xyz"])
def test_a_device_that_is_not_there_is_an_input_error(device: str) -> None:
    with pytest.raises(InputError):
        bench(fa.Causal(), dims=DIMS, device=device)


def test_progress_is_told_between_measurements() -> None:
    said: list[str] = []
    report = bench(fa.Causal(), dims=DIMS, seconds=0.0, progress=said.append)
    rounds = len(report.timings[0].times_s)
    assert said == [
        *(f"first call: {t.name}" for t in report.timings),
        *(f"round {i} of {rounds}" for i in range(1, rounds + 1)),
    ]
