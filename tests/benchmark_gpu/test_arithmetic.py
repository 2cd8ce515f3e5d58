"""What the GPU benchmark counts and computes from times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import mods
from benchmarks.gpu.compute import against, prefill_shapes
from benchmarks.gpu.kernels import predicted_tflops
from benchmarks.gpu.memory import bandwidth_row, failures
from benchmarks.parts import work

ROOT = Path(__file__).resolve().parents[2]


def mask_pairs(mod, length: int) -> int:
    """Pairs that a mask keeps, counted one by one."""
    at = torch.arange(length)
    return int(mod(0, 0, at[:, None], at[None, :]).sum())


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_pairs_are_those_that_the_masks_keep(length):
    assert work.pairs_causal(length) == mask_pairs(lambda b, h, q, k: q >= k, length)
    for width in (1, 7, 64, 1000):
        assert work.pairs_window(length, width) == mask_pairs(mods.window(width), length)
    lengths = work.document_lengths(length, 3)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    assert work.pairs_documents(lengths) == mask_pairs(mods.document(ids), length)


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


def test_prefill_shapes_are_the_published_ones_and_have_predictions():
    assert prefill_shapes() == [
        (1, 16, 16384, 128), (1, 32, 16384, 64), (4, 16, 4096, 128), (4, 32, 4096, 64),
        (1, 8, 16384, 256),
    ]  # fmt: skip
    for _, _, length, head_dim in prefill_shapes():
        for model in ("plain", "causal"):
            rate = predicted_tflops(model, head_dim, length)
            assert rate is not None and 200 < rate < 800
    assert predicted_tflops("window 4096", 128, 4096) is None


def test_a_ratio_is_the_median_within_rounds_with_its_quartiles():
    times = {"ours": [2.0, 1.0, 4.0, 2.0], "flash": [2.0, 2.0, 4.0, 3.0]}
    row = against("claim", "flash", 0.95, times, 4e12, "128 x 64 s2", 1.1)
    assert row.measured == 1.25 and row.spread == (1.0, 1.875) and row.verdict == "met"
    assert "2 TFLOP/s" in row.detail and "128 x 64 s2" in row.detail and row.predicted == 1.1
    alone = against("claim", "flash", 0.95, {"ours": [1.0, 1.0]}, 4e12, "")
    assert alone.goal is None and "no peer" in alone.claim and alone.measured == 4.0


def test_a_share_of_bandwidth_counts_a_copy_twice():
    """A kernel that takes as long as the copy and moves half as many bytes has 50 %."""
    nbytes = 1 << 30
    copied = work.copy_bytes(nbytes)
    row = bandwidth_row("decode", {"ours": [1.0, 1.0], "copy": [1.0, 1.0]}, nbytes, copied, "")
    assert row.measured == 50.0 and row.verdict == "missed"
    row = bandwidth_row("decode", {"ours": [0.5, 0.5], "copy": [1.0, 1.0]}, nbytes, copied, "")
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
    assert failures(f"\n{last}\n", code) == (failed, last.strip("= "))
