"""Mistakes planted in the kernel of head dims above 256 are found, and none in the kernel itself.

See tests/emulator/mutants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.emulator.mutants import (
    BARRIER,
    PRODUCTS,
    RACE,
    SCORES,
    WRONG,
    WRONG_RESULT,
    Mutant,
    assert_found,
    check_texts,
    difference,
    plant,
    random,
    run_mutated,
)
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc


def dense(head_dim: int, head_dim_v: int, target: str, variant: Any = None) -> float:
    q = random(1, 4, 35, head_dim)
    k, v = random(1, 1, 75, head_dim), random(1, 1, 75, head_dim_v)
    return difference(q, k, v, variant or fa.Causal(), f"emulated:{target}", q_offset=40)


def batch(target: str, kv_format: fa.kv.Format | None = None, v_in_k: bool = True) -> float:
    """Two requests over rows of 576, whose first 512 are values."""
    q, rows = random(40, 4, 576), random(140, 1, 576)
    results = []
    for where, dtype in ((f"emulated:{target}", torch.bfloat16), (None, torch.float32)):
        made = fa.BatchAttention(
            fa.Causal(), num_q_heads=4, num_kv_heads=1, head_dim=576, head_dim_v=512,
            v_in_k=v_in_k, q_dtype=dtype, kv_format=kv_format, target=where,
        )  # fmt: skip
        indptr = torch.tensor([0, 3, 40], dtype=torch.int32)
        made.plan(indptr, fa.Ragged(torch.tensor([0, 60, 140], dtype=torch.int32)))
        keys = kv_format.quantize(rows) if kv_format else rows.to(dtype)
        results.append(made.run(q.to(dtype), keys, scale=0.05).float())
    return float((results[0] - results[1]).abs().max())


CALLS: dict[str, Callable[[], float]] = {
    "two stages": lambda: dense(576, 512, "sm_90"),
    "one stage": lambda: dense(512, 512, "sm_86"),
    "one stage, narrow": lambda: dense(528, 512, "sm_86"),
    "odd halves": lambda: dense(320, 304, "sm_80"),
    "in keys": lambda: batch("sm_90"),
    "in keys, one stage": lambda: batch("sm_86"),
    "codes": lambda: batch("sm_90", fa.kv.Format("int8")),
}

WIDE, PARTNER = "mma_sync/prefill_wide.h", "wait_for_partner();"

MUTANTS = (
    plant("tiles read before the barrier", "two stages", RACE, WIDE, BARRIER, "", 2),
    plant("keys overwritten too early", "one stage", RACE, WIDE, BARRIER, "", 4),
    plant("rows overwritten too early", "in keys, one stage", RACE, WIDE, BARRIER, "", 5),
    plant("codes read before they are widened", "codes", RACE, WIDE, BARRIER, "", 3),
    plant("tiles overwritten by states", "two stages", RACE, WIDE, BARRIER, "", -1),
    plant("maxima read early", "two stages", RACE, WIDE, PARTNER, "", 1),
    plant("maxima overwritten by weights", "two stages", RACE, WIDE,
          "__syncwarp();  // all lanes have read before one stores weights there", ""),
    plant("weights read early", "two stages", RACE, WIDE, PARTNER, ""),
    plant("weights overwritten by sums", "two stages", RACE, WIDE, PARTNER, "", 2),
    plant("sums read early", "two stages", RACE, WIDE, PARTNER, "", 3),
    plant("rows written early", "two stages", RACE, WIDE, PARTNER, "", -2),
    plant("rows overwritten while written", "two stages", RACE, WIDE, PARTNER, "", -1),
    plant("maxima of a half", "two stages", WRONG_RESULT, WIDE,
          "best[i] = fmaxf(best[i], *word_of(i, half_));", ""),
    plant("sums of a half", "two stages", WRONG_RESULT, WIDE,
          "softmax.sum[i] += *word_of(i, half_);", "softmax.sum[i] += 0.0f;"),
    plant("positions of the first half", "two stages", WRONG_RESULT, WIDE,
          "tile.begin + half_ * kHalfKeys, tile.end", "tile.begin, tile.end"),
    plant("rows of another group", "two stages", WRONG_RESULT, SCORES, "thread / 32 % kGroups",
          "thread / 64"),
    plant("no last columns", "one stage, narrow", WRONG_RESULT, PRODUCTS,
          "if constexpr (kWhole < kChunks) {", "if constexpr (false) {"),
    plant("the half before", "two stages", WRONG_RESULT, WIDE, "block_chunk(lane_) + half_ * 2",
          "block_chunk(lane_)"),
    plant("more dims than there are", "odd halves", RACE, WIDE,
          "if (d * 16 + 16 == Config::kDimV && half_ == 1) continue;", ""),
)  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_found_in_the_kernels(call: str) -> None:
    assert CALLS[call]() < WRONG / 3


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mutant", rotation.chosen(MUTANTS, 4), ids=lambda m: m.name)
def test_the_mutant_is_found(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_mutated(mutant, tmp_path, monkeypatch)
    assert_found(mutant, CALLS[mutant.call], WRONG)
