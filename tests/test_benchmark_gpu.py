"""Arithmetic, table and exit codes of the GPU benchmark, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.parts import gpu_kernels, gpu_mods, work
from benchmarks.parts.gpu_compute import _against, prefill_shapes
from benchmarks.parts.gpu_measure import Clock
from benchmarks.parts.gpu_memory import _bandwidth_row
from benchmarks.parts.measure import Row, save, table
from flashattn_jit.codegen.targets import CUDA_TARGETS

ROOT = Path(__file__).resolve().parent.parent


def mask_pairs(mod, length: int) -> int:
    """Pairs that a mask keeps, counted one by one."""
    at = torch.arange(length)
    return int(mod(0, 0, at[:, None], at[None, :]).sum())


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_pairs_are_those_that_the_masks_keep(length):
    assert work.pairs_causal(length) == mask_pairs(lambda b, h, q, k: q >= k, length)
    for width in (1, 7, 64, 1000):
        assert work.pairs_window(length, width) == mask_pairs(gpu_mods.window(width), length)
    lengths = work.document_lengths(length, 3)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    assert work.pairs_documents(lengths) == mask_pairs(gpu_mods.document(ids), length)


def test_documents_fill_the_sequence_and_differ():
    lengths = work.document_lengths(16384, 12)
    assert sum(lengths) == 16384 and len(set(lengths)) > 3 and min(lengths) > 0


def test_operations_and_bytes():
    # FlashAttention's own count at batch 1, 16 heads, 16k, D128: 4 * S * S * H * D.
    assert work.attention_flops(16384**2, 1, 16, 128) == 4 * 16384**2 * 16 * 128
    assert work.kv_bytes(4096 * 32, 8, 128) == 2**29  # B32, 4k, 8 heads: 537 MB
    small = work.decode_bytes(2, 100, 8, 4, 64)
    assert small == 2 * 2 * 100 * 4 * 64 * 2 + 2 * 2 * 8 * 64 * 2
    batch = work.batch_for_kv(1 << 30, 8192, 8, 128)
    assert batch == 32
    assert work.copy_bytes(10) == 20


def test_prefill_shapes_are_the_published_ones():
    assert prefill_shapes() == [
        (4, 32, 4096, 64), (1, 32, 16384, 64), (4, 16, 4096, 128), (1, 16, 16384, 128),
    ]  # fmt: skip


def test_a_ratio_is_the_median_within_rounds_with_its_quartiles():
    times = {"ours": [2.0, 1.0, 4.0, 2.0], "flash": [2.0, 2.0, 4.0, 3.0]}
    row = _against("claim", "flash", 0.95, times, 4e12)
    assert row.measured == 1.25 and row.spread == (1.0, 1.875) and row.verdict == "met"
    assert "2 TFLOP/s" in row.detail
    alone = _against("claim", "flash", 0.95, {"ours": [1.0, 1.0]}, 4e12)
    assert alone.goal is None and "no peer" in alone.claim and alone.measured == 4.0


def test_a_share_of_bandwidth_counts_a_copy_twice():
    """A kernel that takes as long as the copy and moves half as many bytes has 50 %."""
    nbytes = 1 << 30
    row = _bandwidth_row("decode", {"ours": [1.0, 1.0], "copy": [1.0, 1.0]}, nbytes)
    assert row.measured == 50.0 and row.verdict == "missed"
    row = _bandwidth_row("decode", {"ours": [0.5, 0.5], "copy": [1.0, 1.0]}, nbytes)
    assert row.measured == 100.0 and row.verdict == "met"


@pytest.mark.parametrize(
    ("last", "code", "failed"),
    [
        ("==== 480 passed, 3 skipped in 171.20s ====", 0, 0.0),
        ("=== 2 failed, 478 passed, 1 error in 171.20s ===", 1, 3.0),
        ("stopped after 300 s", 1, 1.0),
        ("", 0, 0.0),
    ],
)
def test_failures_are_read_off_the_summary(last, code, failed):
    assert gpu.failures(f"\n{last}\n", code) == (failed, last.strip("= "))


def test_what_begins_too_late_is_left_out_and_named(capsys):
    clock = Clock(limit_s=5.0)
    assert clock.allows("short", 1.0)
    assert not clock.allows("long", 60.0)
    assert clock.skipped == ["long"] and "left out" in capsys.readouterr().out


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_kernels_compiled_ahead_exist_for_every_target(target):
    specs = [gpu_kernels.spec_of(want, target) for want in gpu_kernels.WANTS]
    assert len({s.document() for s in specs}) == len(specs)
    assert {s.tile_kind for s in specs} == {"prefill", "few_row"}
    assert all(s.target == target for s in specs)


def test_rows_are_saved_beside_those_of_other_benchmarks(tmp_path):
    rows = [Row("a", 1.0, 2.0, "x"), Row("b", None, 3.0, "us", "lower", (2.0, 4.0))]
    save("cpu", "card", {"commit": "abc"}, rows[:1], tmp_path)
    path = save("gpu", "card", {"commit": "abc"}, rows, tmp_path)
    written = json.loads(path.read_text())
    assert set(written) == {"cpu", "gpu"} and path.name.startswith("card-20")
    assert written["gpu"]["commit"] == "abc"
    assert [r["verdict"] for r in written["gpu"]["rows"]] == ["met", ""]
    assert "2 .. 4" in table(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so():
    command = [sys.executable, "-m", "benchmarks.gpu", "--tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.NO_DEVICE == 2
    assert "no CUDA device" in done.stderr
