"""Kernels compile for every target within the budgets that their tiles declare.

A run takes some tiles, features and variants for each target by turns
(`tests/harness/rotation.py`), and `.ci/full` all of them.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.codegen.spec import AnySpec, UtilitySpec, append_kernel
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.jit.compilation.ptxas_report import load_report
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.planner.tiles import build_request, fallbacks
from flashattn_jit.variants.params import Dims
from tests.cuda.kernels import (
    FEATURE_SETS,
    HEAD_DIMS,
    IN_TURN,
    KINDS,
    assert_clean,
    compiled,
    dtype_of,
    ir_of,
    rotating,
    spec_of,
    specs,
)
from tests.harness import rotation
from tests.registry.case import Case
from tests.registry.cases import CASES

TILES = [(t, d) for i, t in enumerate(CUDA_TARGETS) for d in rotation.turn(i, HEAD_DIMS)]
FEATURES = [
    (target, features)
    for i, target in enumerate(CUDA_TARGETS)
    for features in rotation.chosen(FEATURE_SETS[i:] + FEATURE_SETS[:i], 4)
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("target", "head_dims"), TILES, ids=str)
def test_every_tile_on_every_target(target: str, head_dims: tuple[int, int]) -> None:
    tiles = specs("plain", target, head_dims)
    wgmma = {"few_row", "prefill_wgmma"}
    assert {spec.tile_kind for spec in tiles} == (wgmma if target == "sm_90" else set(KINDS))
    for spec in tiles:
        kernel = compiled(spec)
        assert kernel.tile == 0, f"the planner's tile spills: {spec.tile_q} x {spec.tile_kv}"
        assert_clean(kernel)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("target", "features"), FEATURES, ids=str)
def test_every_feature_on_every_target(target: str, features: tuple[str, ...]) -> None:
    number = CUDA_TARGETS.index(target) * len(FEATURE_SETS) + FEATURE_SETS.index(features)
    for head_dims, kind in rotation.turn(number, list(itertools.product(HEAD_DIMS, KINDS))):
        if "unaligned" in features:
            head_dims = (40, 24)
        tiles = specs("causal", target, head_dims, features)
        few = kind == "few_row"
        chosen = next(spec for spec in tiles if (spec.tile_kind == "few_row") == few)
        kernel = compiled(chosen)
        if chosen.tile_kind == "prefill_wgmma":  # tiles are tried from the largest on
            assert kernel.spec.tile_kind == "prefill_wgmma", "every wgmma tile spills"
        else:
            assert kernel.tile == 0, "the planner's tile spills"
        assert_clean(kernel)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_kernels_that_are_no_attention_on_every_target(target: str) -> None:
    utilities: list[AnySpec] = [UtilitySpec("merge_states", target)]
    utilities += [UtilitySpec("append_paged_kv", target, unit_bytes=n) for n in (1, 16)]
    transform = (fa.QKNorm() & fa.RoPE()).only("key_mod").bind(Dims(head_dim=40, head_dim_v=24))
    utilities.append(append_kernel(transform.ir, (40, 24), (dtype_of(target),) * 2, target))
    for codes in (("int8", dtype_of(target)), ("bits4x2", "float8_e4m3fn"), ("float8_e5m2",) * 2):
        append = append_kernel(transform.ir, (40, 24), codes, target, new_dtype=dtype_of(target))
        utilities.append(append)
    for spec in utilities:
        module = load_stepping([build_request(spec)])[1]
        report = load_report(Path(module.path).with_name("resources.json"))
        assert report.kernels
        assert report.complaints() == []


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", IN_TURN, ids=lambda case: case.name)
def test_variants_on_one_rotating_target(case: Case) -> None:
    target, kind = rotating(case.name)
    assert_clean(compiled(spec_of(case.name, target, kind)))


def test_targets_and_kinds_take_turns() -> None:
    turns = {rotating(case.name) for case in CASES}
    assert turns == {(target, kind) for target in CUDA_TARGETS for kind in KINDS}


@pytest.mark.parametrize("target", rotation.turn(0, ["sm_75", "sm_80", "sm_86"]))
def test_smaller_tiles_that_a_kernel_may_step_down_to_compile_as_well(target: str) -> None:
    spec = next(s for s in specs("plain", target, (128, 128)) if s.tile_q >= 64)
    steps = fallbacks(spec)
    assert steps
    for tile in steps:
        assert_clean(compiled(tile))


def test_cases_without_hooks_share_kernels() -> None:
    assert ir_of("plain") == ir_of("full")
