"""The wgmma kernels in the emulator against the fp64 reference: every variant, in turns.

Asynchronous operations complete as late as they may, at once, or at moments drawn from a seed:
modes, head dims, lengths and dtypes take turns.
"""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.planner.tiles import choose_rows
from tests.cuda.kernels import ir_of
from tests.harness import rotation
from tests.ops.cases import fitting, run
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES

TARGET = "emulated:sm_90"
HEAD_DIMS = ((64, 64), (128, 128), (72, 72), (96, 64), (64, 128), (192, 128), (256, 256))
LENGTHS = ((70, 130), (40, 520), (200, 333), (130, 64), (16, 700))
"""Query rows and keys; two query heads share a key."""

MODES = ("late", "early", "random")
IN_TURN = rotation.chosen(CASES, 8, lambda case: "library" in case.tags and case.tags)


def shape_of(case: Case, number: int) -> Shape:
    q_len, kv_len = LENGTHS[number % len(LENGTHS)]
    head_dim, head_dim_v = HEAD_DIMS[number // 2 % len(HEAD_DIMS)]
    return fitting(case, Shape(2, 4, 2, q_len, kv_len, head_dim, head_dim_v))


@pytest.mark.parametrize("case", IN_TURN, ids=lambda c: c.name)
def test_every_variant(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    number = CASES.index(case) + rotation.seed()
    mode = MODES[number % len(MODES)]
    monkeypatch.setenv(
        "FLASHATTN_JIT_EMULATOR_COPIES", f"{mode}:{number}" if number % 3 == 2 else mode
    )
    shape = shape_of(case, number)
    dtype = (torch.bfloat16, torch.float16)[number % 5 == 4]
    run(case, shape, dtype, TARGET)


def test_variants_run_on_wgmma_unless_they_change_keys_or_values() -> None:
    kinds = {}
    for case in CASES:
        spec = choose_rows(ir_of(case.name), (64, 64), ("bfloat16",) * 3, TARGET, 1000)
        changes = any(spec.variant.has(hook) for hook in ("key_mod", "value_mod"))
        kinds.setdefault(spec.tile_kind, set()).add(changes)
    assert kinds == {"prefill_wgmma": {False}, "prefill": {True}}
