"""Targets that share their PTX: emulating one of them tests the others."""

from __future__ import annotations

import re

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import TileKind
from flashattn_jit.codegen.targets import CUDA_TARGETS, sm_version
from flashattn_jit.planner.tiles import kernels_by_rows
from flashattn_jit.variants.ir.ir import VariantIR
from flashattn_jit.variants.params import Dims
from tests.cuda.kernels import (
    EMULATED,
    KINDS,
    PLAIN,
    SAME_PTX,
    by_mma_sync,
    compiled,
    on_target,
    ptx_of,
    spec_of,
    specs,
    without_columns,
    without_target,
)

VARIANTS = ("causal", "mix_gemma2", "rope", "document_unsorted", "sigmoid", "gated_output")


def test_every_target_is_emulated_or_has_the_ptx_of_one_that_is() -> None:
    for target in CUDA_TARGETS:
        assert target in EMULATED or SAME_PTX[target] in EMULATED


@pytest.mark.parametrize("target", SAME_PTX)
@pytest.mark.parametrize("turn", range(2))
def test_targets_that_are_not_emulated_have_the_ptx_of_one_that_is(target: str, turn: int) -> None:
    # Each target takes two of the variants; .ci/full takes them all.
    number = CUDA_TARGETS.index(target) + 3 * turn
    spec = spec_of(VARIANTS[number % len(VARIANTS)], target, KINDS[turn])
    other = ptx_of(on_target(spec, SAME_PTX[target]))
    assert without_target(ptx_of(spec)) == without_target(other)


def test_the_ptx_of_an_entry_is_what_is_compared() -> None:
    spec = spec_of("causal", "sm_80", "few_row")
    kernel = compiled(spec)
    key = re.search(r'FAJIT_KEY "(\w+)"', kernel.folder.joinpath("kernel.cu").read_text())
    assert key is not None
    assert without_columns(kernel.ptx) == without_columns(ptx_of(kernel.spec, key[1]))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_100"])
@pytest.mark.parametrize(
    ("kind", "features"),
    [("few_row", ()), ("few_row", ("paged", "mixed_rows")), ("few_row", ("sparse",)),
     ("few_row", ("block_mask",)), ("prefill", ("paged",))],
)  # fmt: skip
def test_the_l2_evicts_first_what_only_one_block_reads(
    target: str, kind: TileKind, features: tuple[str, ...]
) -> None:
    """K and V of few rows, but not Q, and not keys that other rows of a request read too."""
    spec = next(s for s in specs("causal", target, features=features) if s.tile_kind == kind)
    text = ptx_of(spec)
    copies = re.findall(r"cp\.async\.cg\.shared\.global(\S*) ", text)
    hinted = copies.count(".L2::cache_hint")
    if target == "sm_75" or kind == "prefill" or {"sparse", "block_mask"} & set(features):
        assert hinted == 0 and "createpolicy" not in text
    else:
        assert text.count("createpolicy.fractional.L2::evict_first.b64") == 1
        queries = 16 * spec.head_dim * 2 // (32 * 16)  # copies of a lane
        assert hinted == len(copies) - queries > 0


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", CUDA_TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_merge_waits_by_itself_from_sm_90_on(target: str, kind: TileKind) -> None:
    """Before it reads a state; few rows tell it when it may start."""
    text = ptx_of(spec_of("causal", target, kind))
    attention, merge = (
        re.findall(r"griddepcontrol\.\w+|ld\.global\.f32", body)
        for body in text[text.index(".entry fajit_attention_kernel") :].split(".entry fajit_merge")
    )
    waits = sm_version(target) >= 90
    hint = ["griddepcontrol.launch_dependents"] if waits and kind == "few_row" else []
    assert [name for name in attention if "grid" in name] == hint
    wait = ["griddepcontrol.wait"] * waits
    assert [name for name in merge if "grid" in name] == wait
    assert merge[: len(wait) + 1] == [*wait, "ld.global.f32"]


def test_positions_are_divided_by_multiplication() -> None:
    """By page sizes and blocks of key lists, also in hooks: a GPU has no integer division."""
    gain = torch.ones(64)
    slots = fa.variant(
        score_mod=lambda s, b, h, i, j: s * gain[fa.kv_slot(b, j)],
        key_mod=lambda row, b, h, j: row * gain[fa.kv_slot(b, j)],
    )
    hooks = slots.bind(Dims(1, 1, 1, 1, 64, 64, 64), {}).ir

    def divisions(ir: VariantIR, *features: str) -> int:
        """In kernels for many rows and for few."""
        tiles = kernels_by_rows(ir, (64, 64), ("bfloat16",) * 3, "sm_80", (features,))
        ends = tiles[0], tiles[-1]
        return sum(len(re.findall(r"\b(?:div|rem)\.[su]", ptx_of(spec))) for spec in ends)

    plain = divisions(PLAIN)
    assert divisions(PLAIN, "paged") == divisions(PLAIN, "sparse") == plain
    assert divisions(hooks, "paged") == plain


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", EMULATED)
def test_ptx_names_sources_by_logical_names(target: str) -> None:
    text = ptx_of(by_mma_sync(spec_of("mix_gemma2", target, "prefill")))
    names = set(re.findall(r'\.file\s+\d+\s+"([^"]*)"', text))
    assert "fajit/cuda/mma_sync/prefill.h" in names
    assert "kernel.cu" in names
    assert not [name for name in names if name.startswith("/")]
    assert f".target {target}\n" in text
