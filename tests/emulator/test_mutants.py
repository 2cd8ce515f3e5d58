"""Mistakes planted in the package's kernels are found, and none in the unchanged kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.emulator.mutants import (
    BARRIER,
    FEW_ROW,
    LANES,
    PREFILL,
    PRODUCTS,
    RACE,
    SCORES,
    WALK,
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


def prefill(
    head_dim: int, target: str = "emulated:sm_80", variant: Any = None, **options: Any
) -> float:
    """Rows, keys and heads with full and partial tiles."""
    dtype = torch.float16 if target.endswith("75") else torch.bfloat16
    q = random(1, 4, 75, head_dim, dtype=dtype)
    k, v = random(1, 2, 203, head_dim, dtype=dtype), random(1, 2, 203, head_dim, dtype=dtype)
    return difference(q, k, v, variant or fa.Causal(), target, q_offset=128, **options)


def decode(variant: Any = None) -> float:
    """Few rows over keys of two lengths, which are split."""
    q, k, v = random(2, 8, 1, 64), random(2, 2, 1500, 64), random(2, 2, 1500, 64)
    lengths = torch.tensor([1500, 333], dtype=torch.int32)
    return difference(q, k, v, variant, "emulated:sm_80", kv_len=lengths)


def steep() -> float:
    """Scores that grow with the key, so that their running maximum changes a lot."""
    q, k, v = random(1, 1, 64, 64), random(1, 1, 256, 64), random(1, 1, 256, 64)
    q, k = q * 0.1 + 1, k * 0.1 + torch.arange(256)[:, None] / 64
    return difference(q.bfloat16(), k.bfloat16(), v, None, "emulated:sm_80")


def biased() -> float:
    """A bias by distance: a key tile that the rows' positions lie in, and a full one after them."""
    q, k, v = random(1, 4, 40, 64), random(1, 2, 331, 64), random(1, 2, 331, 64)
    return difference(q, k, v, fa.ALiBi(symmetric=True), "emulated:sm_80", q_offset=64)


CALLS: dict[str, Callable[[], float]] = {
    "prefill": lambda: prefill(64),
    "prefill 128": lambda: prefill(128),
    "prefill sm_75": lambda: prefill(64, "emulated:sm_75"),
    "rotated": lambda: prefill(64, variant=fa.RoPE()),
    "prefill steep": steep,
    "biased": biased,
    "prefill negative": lambda: prefill(64, scale=-0.125),
    "prefill states": lambda: prefill(64, partial=True),
    "decode": decode,
    "decode short": lambda: difference(
        random(1, 4, 1, 64), random(1, 1, 3, 64), random(1, 1, 3, 64), None, "emulated:sm_80"
    ),
    "rotated decode": lambda: decode(fa.RoPE()),
    # Split keys; the merge has a warp without a row.
    "decode sm_90": lambda: difference(
        random(1, 3, 1, 64), random(1, 1, 1500, 64), random(1, 1, 1500, 64), None, "emulated:sm_90"
    ),
}


FLIGHT, BOUNDS = ("in flight",), ("out of bounds",)
MERGE, DEPENDENCY = "common/merge.h", ("dependency",)
GRID_WAIT = "if constexpr (Config::kMergeWaits) ptx::wait_for_kernel_before();"
LOADS, LAYOUT, SOFTMAX = "tile/load_rows.h", "tile/row_layout.h", "common/softmax.h"

MUTANTS = (
    # Waits
    plant("no wait", "prefill", FLIGHT, "ptx/copy.h", '"cp.async.wait_group %0;"', '"// %0"'),
    plant("one wait too few", "decode", FLIGHT, FEW_ROW, "wait_copies<kAhead - 1>",
          "wait_copies<kAhead>"),
    plant("queries not waited for", "decode", RACE, FEW_ROW, "wait_copies<kYounger>",
          "wait_copies<kYounger + 1>"),
    plant("copies in no group", "prefill", RACE, "ptx/copy.h", '"cp.async.commit_group;"', '"//"'),
    # Barriers of the block
    plant("keys read before the barrier", "prefill sm_75", RACE, PREFILL, BARRIER, "", 2),
    plant("values read before the barrier", "prefill sm_75", RACE, PREFILL, BARRIER, "", 4),
    plant("tiles read before the barrier", "prefill", RACE, PREFILL, BARRIER, "", 2),
    plant("tiles overwritten by states", "prefill states", RACE, PREFILL, BARRIER, "", -1),
    plant("rotated keys read before the barrier", "rotated", RACE, PREFILL, BARRIER, ""),
    plant("queries read before the barrier", "decode", RACE, FEW_ROW, BARRIER, ""),
    plant("rings overwritten by states", "decode", RACE, FEW_ROW, BARRIER, "", 1),
    plant("states read before the barrier", "decode", RACE, FEW_ROW, BARRIER, "", 2),
    # Barriers of the warp; those that a later barrier makes redundant are not in the list
    plant("a walk stored while it is read", "decode", RACE, WALK, LANES, "", 1),
    plant("a walk read while it is stored", "decode", RACE, WALK, LANES, "", 2),
    plant("a run read while it is stored", "prefill", RACE, WALK, LANES, ""),
    plant("rows read while they are stored", "prefill states", RACE, PREFILL, LANES, "", -3),
    plant("rows stored while they are read", "prefill states", RACE, PREFILL, LANES, "", -2),
    plant("packed rows read while they are stored", "prefill", RACE, PREFILL, LANES, "", -1),
    plant("merged rows read while they are stored", "decode short", RACE, FEW_ROW, LANES, "", -1),
    plant("split rows read while they are stored", "decode", RACE, MERGE, LANES, ""),
    # The merge waits for attention by itself
    plant("attention not waited for", "decode sm_90", DEPENDENCY, "ptx/dependents.h",
          '"griddepcontrol.wait;"', '"//"'),
    plant("attention waited for after the first state is read", "decode sm_90", DEPENDENCY, MERGE,
          f"{GRID_WAIT}\n    if (!has_row) return;\n\n    float top = -FAJIT_INF;",
          "float top = has_row ? a.partial_lse[state_row(a, item, 0) + at] : -FAJIT_INF;\n"
          f"    {GRID_WAIT}\n    if (!has_row) return;"),
    plant("attention waited for by warps with a row", "decode sm_90", DEPENDENCY, MERGE,
          f"{GRID_WAIT}\n    if (!has_row) return;", f"if (!has_row) return;\n    {GRID_WAIT}"),
    # Stages
    plant("copies into the stage in use", "decode", RACE, FEW_ROW,
          "location, stage == 0 ? kStages - 1 : stage - 1", "location, stage"),
    plant("the stage does not move", "decode", WRONG_RESULT, FEW_ROW,
          "stage == kStages - 1 ? 0 : stage + 1", "stage"),
    plant("runs are as long as the tiles of a group", "prefill", WRONG_RESULT, WALK,
          "const int count = ~same == 0 ? 32 :", "const int count = true ? 32 :"),
    plant("the run after this one is not loaded", "prefill", RACE, WALK, ": found_begin();",
          ": -1;"),
    # Addresses
    plant("the tail is loaded as a whole tile", "prefill", BOUNDS, PREFILL,
          "if (left >= Config::kTileKv)", "if (true)"),
    plant("rows past the end are read", "prefill", BOUNDS, LOADS,
          "from, inside ? 16 : 0, policy);\n    from", "from, 16, policy);\n    from"),
    plant("keys past the end are read", "prefill sm_75", BOUNDS, LOADS, "r >= kRows || r >= count",
          "r >= kRows"),
    plant("states past the end are written", "decode", WRONG_RESULT, "common/state.h",
          "d < Config::kHeadDimV; d += 32) to[d] = values[d]",
          "d < Config::kHeadDimV + 32; d += 32) to[d] = values[d]"),
    plant("swizzled when stored, not when read", "prefill", WRONG_RESULT, LAYOUT,
          "(address ^ ((chunk & kMask) << 4)) +", "(address + ((chunk & kMask) << 4)) +"),
    plant("swizzled for the first rows alone", "prefill", WRONG_RESULT, LAYOUT,
          "(address ^ ((rows >> kShift & kMask) << 4)) +", "address +"),
    # Fragments
    plant("rows of A", "prefill", WRONG_RESULT, PRODUCTS, "return lane & 15;", "return lane & 7;"),
    plant("columns of B", "prefill", WRONG_RESULT, PRODUCTS, "return lane >> 3 & 1;",
          "return lane >> 4;"),
    plant("halves of P", "prefill", WRONG_RESULT, PRODUCTS,
          "a[m][1] = Element::pack(s[m][n][2], s[m][n][3]);",
          "a[m][1] = Element::pack(s[m][n][3], s[m][n][2]);"),
    plant("V not transposed", "prefill", WRONG_RESULT, PRODUCTS, "load_matrices_transposed(b",
          "load_matrices(b"),
    plant("the maximum of other rows", "decode", WRONG_RESULT, "ptx/warp.h",
          "return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2))",
          "return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 8))"),
    # Masks and sums
    plant("the sign of the scale", "prefill negative", WRONG_RESULT, PREFILL,
          "if (units_.query != 1.0f)", "if (false)"),
    plant("no mask on the last tile", "decode short", WRONG_RESULT, WALK,
          " && s.end - first >= keys", ""),
    plant("one key too many", "decode short", WRONG_RESULT, SCORES,
          "position < static_cast<uint32_t>(tile.end)",
          "position <= static_cast<uint32_t>(tile.end)"),
    plant("the mask of the tile before", "prefill", WRONG_RESULT, SCORES,
          "int32_t kv_idx = inside ? static_cast<int32_t>(position)",
          "int32_t kv_idx = inside ? static_cast<int32_t>(position) - kN * 8"),
    plant("a line across the diagonal", "biased", WRONG_RESULT, WALK,
          "state == FAJIT_TILE_FULL && line", "state == FAJIT_TILE_FULL"),
    plant("the column of the key before", "biased", WRONG_RESULT, SCORES,
          "static_cast<float>(n * 8 + j)", "static_cast<float>(n * 8)"),
    plant("the line of the tile's first key", "biased", WRONG_RESULT, SCORES,
          "tile.begin + ptx::lane_index() % 4 * 2)", "tile.begin)"),
    plant("the values of other rows", "biased", WRONG_RESULT, SCORES,
          "make(ptx::thread_here() % (2 * kM))", "make(0)"),
    plant("the shift of another lane", "biased", WRONG_RESULT, SOFTMAX,
          "if constexpr (kShifted) best[i] += shift[i];\n      best[i] = ptx::quad_max(best[i]);",
          "best[i] = ptx::quad_max(best[i]);\n      if constexpr (kShifted) best[i] += shift[i];"),
    plant("the sum is not rescaled", "prefill steep", WRONG_RESULT, SOFTMAX,
          "sum[i] *= factor[i];", ""),
    plant("heads of a group mixed up", "prefill", WRONG_RESULT, "common/packed_rows.h",
          "item.head_begin + p - token * item.head_count", "item.head_begin"),
)  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["late", "early", "random:5"])
def test_nothing_is_found_in_the_kernels(
    call: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", moment)
    assert CALLS[call]() < WRONG / 3


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mutant", rotation.chosen(MUTANTS, 2), ids=lambda m: m.name)
def test_the_mutant_is_found(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_mutated(mutant, tmp_path, monkeypatch)
    assert_found(mutant, CALLS[mutant.call], WRONG)
