"""Mistakes planted in the package's kernels are found, and none in the unchanged kernels.

A mutant is one change of the headers' text. It is compiled to PTX, which runs in a call instead of
the kernel's; the launch is unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.errors import EmulatorFault
from flashattn_jit.jit.emulator import programs
from flashattn_jit.ops.device import emulated
from flashattn_jit.ops.launching import launches
from tests.cuda.kernels import ptx_of
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc

WRONG = 0.05
"""Larger differences from the fp32 result are no rounding errors; kernels stay below a third."""


MARGIN = 1 << 15
"""Elements of nobody before and after a tensor: a kernel that leaves it meets no other tensor."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    memory = torch.empty(values.numel() + 2 * MARGIN, dtype=dtype)
    return memory[MARGIN:-MARGIN].view(shape).copy_(values)


def difference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Any, target: str, **options: Any
) -> float:
    out = fa.attention(q, k, v, variant, target=target, **options)
    expected = fa.attention(q.float(), k.float(), v.float(), variant, **options)
    if options.get("partial"):
        out, expected = out[0], expected[0]
    error = (out.float() - expected).abs()
    return float("inf") if error.isnan().any() else float(error.max())


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


@dataclass(frozen=True)
class Mutant:
    """`new` instead of occurrence `place` of `old` in a file; `call` is a name in CALLS."""

    name: str
    file: str
    old: str
    new: str
    call: str
    place: int = 0
    kinds: tuple[str, ...] = ()  # kinds of faults; (): a wrong result


BARRIER, LANES = "__syncthreads();", "__syncwarp();"
FLIGHT, BOUNDS = ("in flight",), ("out of bounds",)
RACE = ("race", "in flight", "uninitialised")  # which of them depends on timing
PREFILL, FEW_ROW, PRODUCTS = "mma_sync/prefill.h", "mma_sync/few_row.h", "mma_sync/products.h"
KEYS, WALK, SCORES = "common/key_rows.h", "common/kv_walk.h", "common/scores.h"
MERGE, DEPENDENCY = "common/merge.h", ("dependency",)
GRID_WAIT = "if constexpr (Config::kMergeWaits) ptx::wait_for_kernel_before();"
LOADS, LAYOUT, SOFTMAX = "tile/load_rows.h", "tile/row_layout.h", "common/softmax.h"

MUTANTS = (
    # Waits
    Mutant("no wait", "ptx/copy.h", '"cp.async.wait_group %0;"', '"// %0"', "prefill",
           kinds=FLIGHT),
    Mutant("one wait too few", FEW_ROW, "wait_copies<kAhead - 1>", "wait_copies<kAhead>", "decode",
           kinds=FLIGHT),
    Mutant("queries not waited for", FEW_ROW, "wait_copies<kYounger>", "wait_copies<kYounger + 1>",
           "decode", kinds=RACE),
    Mutant("copies in no group", "ptx/copy.h", '"cp.async.commit_group;"', '"//"', "prefill",
           kinds=RACE),
    # Barriers of the block
    Mutant("keys read before the barrier", PREFILL, BARRIER, "", "prefill sm_75", 2, RACE),
    Mutant("values read before the barrier", PREFILL, BARRIER, "", "prefill sm_75", 4, RACE),
    Mutant("tiles read before the barrier", PREFILL, BARRIER, "", "prefill", 2, RACE),
    Mutant("tiles overwritten by states", PREFILL, BARRIER, "", "prefill states", -1, RACE),
    Mutant("rotated keys read before the barrier", PREFILL, BARRIER, "", "rotated", 0, RACE),
    Mutant("queries read before the barrier", FEW_ROW, BARRIER, "", "decode", 0, RACE),
    Mutant("rings overwritten by states", FEW_ROW, BARRIER, "", "decode", 1, RACE),
    Mutant("states read before the barrier", FEW_ROW, BARRIER, "", "decode", 2,
           RACE),
    # Barriers of the warp; those that a later barrier makes redundant are not in the list
    Mutant("a walk stored while it is read", WALK, LANES, "", "decode", 1, RACE),
    Mutant("a walk read while it is stored", WALK, LANES, "", "decode", 2, RACE),
    Mutant("a run read while it is stored", WALK, LANES, "", "prefill", 0, RACE),
    Mutant("rows read while they are stored", PREFILL, LANES, "", "prefill states", -3, RACE),
    Mutant("rows stored while they are read", PREFILL, LANES, "", "prefill states", -2, RACE),
    Mutant("packed rows read while they are stored", PREFILL, LANES, "", "prefill", -1, RACE),
    Mutant("merged rows read while they are stored", FEW_ROW, LANES, "", "decode short", -1, RACE),
    Mutant("split rows read while they are stored", MERGE, LANES, "", "decode", 0, RACE),
    # The merge waits for attention by itself
    Mutant("attention not waited for", "ptx/dependents.h", '"griddepcontrol.wait;"', '"//"',
           "decode sm_90", kinds=DEPENDENCY),
    Mutant("attention waited for after the first state is read", MERGE,
           f"{GRID_WAIT}\n    if (!has_row) return;\n\n    float top = -FAJIT_INF;",
           "float top = has_row ? a.partial_lse[state_row(a, item, 0) + at] : -FAJIT_INF;\n"
           f"    {GRID_WAIT}\n    if (!has_row) return;", "decode sm_90", kinds=DEPENDENCY),
    Mutant("attention waited for by warps with a row", MERGE,
           f"{GRID_WAIT}\n    if (!has_row) return;", f"if (!has_row) return;\n    {GRID_WAIT}",
           "decode sm_90", kinds=DEPENDENCY),
    # Stages
    Mutant("copies into the stage in use", FEW_ROW,
           "location, stage == 0 ? kStages - 1 : stage - 1", "location, stage", "decode",
           kinds=RACE),
    Mutant("the stage does not move", FEW_ROW, "stage == kStages - 1 ? 0 : stage + 1", "stage",
           "decode"),
    Mutant("runs are as long as the tiles of a group", WALK, "const int count = ~same == 0 ? 32 :",
           "const int count = true ? 32 :", "prefill"),
    Mutant("the run after this one is not loaded", WALK, ": found_begin();", ": -1;",
           "prefill", kinds=RACE),
    # Addresses
    Mutant("the tail is loaded as a whole tile", PREFILL, "if (left >= Config::kTileKv)",
           "if (true)", "prefill", kinds=BOUNDS),
    Mutant("rows past the end are read", LOADS, "from, inside ? 16 : 0, policy);\n    from",
           "from, 16, policy);\n    from", "prefill", kinds=BOUNDS),
    Mutant("keys past the end are read", LOADS, "r >= kRows || r >= count", "r >= kRows",
           "prefill sm_75", kinds=BOUNDS),
    Mutant("states past the end are written", "common/state.h",
           "d < Config::kHeadDimV; d += 32) to[d] = values[d]",
           "d < Config::kHeadDimV + 32; d += 32) to[d] = values[d]", "decode"),
    Mutant("swizzled when stored, not when read", LAYOUT, "(address ^ ((chunk & kMask) << 4)) +",
           "(address + ((chunk & kMask) << 4)) +", "prefill"),
    Mutant("swizzled for the first rows alone", LAYOUT,
           "(address ^ ((rows >> kShift & kMask) << 4)) +", "address +", "prefill"),
    # Fragments
    Mutant("rows of A", PRODUCTS, "return lane & 15;", "return lane & 7;", "prefill"),
    Mutant("columns of B", PRODUCTS, "return lane >> 3 & 1;", "return lane >> 4;", "prefill"),
    Mutant("halves of P", PRODUCTS, "a[m][1] = Element::pack(s[m][n][2], s[m][n][3]);",
           "a[m][1] = Element::pack(s[m][n][3], s[m][n][2]);", "prefill"),
    Mutant("V not transposed", PRODUCTS, "load_matrices_transposed(b", "load_matrices(b",
           "prefill"),
    Mutant("the maximum of other rows", "ptx/warp.h",
           "return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2))",
           "return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 8))", "decode"),
    # Masks and sums
    Mutant("the sign of the scale", PREFILL, "if (units_.query != 1.0f)", "if (false)",
           "prefill negative"),
    Mutant("no mask on the last tile", WALK, " && s.end - first >= keys", "", "decode short"),
    Mutant("one key too many", SCORES, "position < static_cast<uint32_t>(tile.end)",
           "position <= static_cast<uint32_t>(tile.end)", "decode short"),
    Mutant("the mask of the tile before", SCORES,
           "int32_t kv_idx = inside ? static_cast<int32_t>(position)",
           "int32_t kv_idx = inside ? static_cast<int32_t>(position) - kN * 8", "prefill"),
    Mutant("a line across the diagonal", WALK, "state == FAJIT_TILE_FULL && line",
           "state == FAJIT_TILE_FULL", "biased"),
    Mutant("the column of the key before", SCORES, "static_cast<float>(n * 8 + j)",
           "static_cast<float>(n * 8)", "biased"),
    Mutant("the line of the tile's first key", SCORES,
           "tile.begin + ptx::lane_index() % 4 * 2)", "tile.begin)", "biased"),
    Mutant("the values of other rows", SCORES, "make(ptx::thread_here() % (2 * kM))", "make(0)",
           "biased"),
    Mutant("the shift of another lane", SOFTMAX,
           "if constexpr (kShifted) best[i] += shift[i];\n      best[i] = ptx::quad_max(best[i]);",
           "best[i] = ptx::quad_max(best[i]);\n      if constexpr (kShifted) best[i] += shift[i];",
           "biased"),
    Mutant("the sum is not rescaled", SOFTMAX, "sum[i] *= factor[i];", "", "prefill steep"),
    Mutant("heads of a group mixed up", "common/packed_rows.h",
           "item.head_begin + p - token * item.head_count", "item.head_begin", "prefill"),
)  # fmt: skip


def changed(text: str, mutant: Mutant) -> str:
    parts = text.split(mutant.old)
    count = len(parts) - 1
    assert -count <= mutant.place < count, f"{mutant.file} has {count} times {mutant.old!r}"
    at = mutant.place % count + 1
    return mutant.old.join(parts[:at]) + mutant.new + mutant.old.join(parts[at:])


def mutated_headers(mutant: Mutant, tmp_path: Path) -> Path:
    """A copy of the include folder with the mutant's change."""
    include = tmp_path / "include"
    shutil.copytree(env.include_dir(), include)
    header = include / "fajit/cuda" / mutant.file
    header.write_text(changed(header.read_text(), mutant))
    return include


def assert_found(mutant: Mutant, call: Callable[[], float], wrong: float) -> None:
    """The call raises a fault of the mutant's kinds; without kinds, any fault or an error larger
    than `wrong`."""
    if mutant.kinds:
        with pytest.raises(EmulatorFault) as caught:
            call()
        assert caught.value.kind in mutant.kinds
        # A thread ends on a line of the kernel itself.
        assert caught.value.source.startswith(("fajit/cuda/", "kernel.cu:"))
        return
    try:
        found = call()
    except EmulatorFault:
        return
    assert found > wrong


def run_mutated(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    spec_of: Callable[[_C.Module], KernelSpec],
) -> None:  # fmt: skip
    """From now on the emulator runs kernels with the mutant's change. spec_of: of a module."""
    include = mutated_headers(mutant, tmp_path)
    built: dict[KernelSpec, Any] = {}

    def mutated(module: _C.Module) -> Any:
        spec = spec_of(module)
        if spec not in built:
            with monkeypatch.context() as patch:
                patch.setattr(env, "include_dir", lambda: include)
                built[spec] = programs.Program(ptx_of(spec))
        return built[spec]

    monkeypatch.setattr(emulated, "program", mutated)


def spec_of(module: _C.Module) -> KernelSpec:
    """The spec of a module of a planned call."""
    kernels = (kernel for plan, _ in launches._launches.values() for kernel in plan.kernels)
    return next(k.spec for k in kernels if k is not None and k.module is module)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["late", "early", "random:5"])
def test_nothing_is_found_in_the_kernels(
    call: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", moment)
    assert CALLS[call]() < WRONG / 3


def check_texts(mutants: Iterable[Mutant]) -> None:
    """That the headers have the texts that the mutants change: runs of the tests take some of
    them by turns."""
    folder = env.include_dir() / "fajit/cuda"
    for mutant in mutants:
        changed((folder / mutant.file).read_text(), mutant)


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.parametrize("mutant", rotation.chosen(MUTANTS, 2), ids=lambda m: m.name)
def test_the_mutant_is_found(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_mutated(mutant, tmp_path, monkeypatch, spec_of)
    assert_found(mutant, CALLS[mutant.call], WRONG)
