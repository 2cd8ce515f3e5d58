"""CUDA tiles: every choice is reachable, fits its target, and steps down to smaller ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.codegen.budget import (
    MAX_REGISTERS,
    ctas_per_sm,
    limits,
    padded,
    register_budget,
    resident_by_shared,
    shared_bytes,
    warpgroup_registers,
)
from flashattn_jit.codegen.targets import (
    CUDA_TARGETS,
    EMULATED_TARGETS,
    architecture,
    called_target,
    compiled_target,
)
from flashattn_jit.planner.cuda_tiles import ROW_CLASSES, against_wgmma, spare_registers
from flashattn_jit.planner.tiles import (
    Problem,
    candidates,
    choose,
    choose_rows,
    fallbacks,
    kernels_by_rows,
    tile_kind,
)
from flashattn_jit.variants.ir.ir import VariantIR

PLAIN = VariantIR(())
SCORED = VariantIR((), cpp=(("score_mod", "return score;"),))
KIB = 1024
SHARED_PER_BLOCK = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
}  # fmt: skip

targets = st.sampled_from(CUDA_TARGETS + EMULATED_TARGETS)
head_dims = st.integers(1, 256)
variants = st.sampled_from([PLAIN, SCORED])


def problem(rows, head_dim, head_dim_v, kv_len=4096, group=1, dtype="bfloat16"):
    return Problem((rows,), (kv_len,), 2 * group, 2, head_dim, head_dim_v, dtype, dtype, dtype)


@settings(max_examples=400, deadline=None)
@given(targets, head_dims, head_dims, st.integers(0, 5000), st.integers(1, 71), variants)
def test_a_choice_is_reachable_and_fits(target, head_dim, head_dim_v, q_len, group, variant):
    p = problem(q_len, head_dim, head_dim_v, group=group)
    chosen = choose(variant, p, target)
    specs = kernels_by_rows(variant, (head_dim, head_dim_v), ("bfloat16",) * 3, target)
    assert len(specs) <= 8
    assert chosen.document() in {s.document() for s in specs}
    assert called_target(chosen.target) == compiled_target(target)
    kind = tile_kind(p.packed_rows, target, p.q_dtype)
    assert chosen.tile_kind == kind or (chosen.tile_kind, kind) == ("prefill_wgmma", "prefill")
    for spec in (*specs, *fallbacks(chosen)):
        assert shared_bytes(spec) <= SHARED_PER_BLOCK[architecture(spec.target)] * KIB


@settings(max_examples=200, deadline=None)
@given(targets, head_dims, head_dims, variants)
def test_a_tile_is_one_that_the_kernels_can_run(target, head_dim, head_dim_v, variant):
    for chosen in kernels_by_rows(variant, (head_dim, head_dim_v), ("float16",) * 3, target):
        for spec in (chosen, *fallbacks(chosen)):
            assert spec.tile_kv % 16 == 0
            if spec.tile_kind == "prefill_wgmma":
                assert spec.target == "sm_90a" and spec.tile_kv <= 256 and spec.num_stages == 2
                assert (spec.tile_q, spec.num_warps) in ((64, 8), (128, 12))
                continue
            assert spec.num_warps in (1, 2, 4, 8)
            if spec.tile_kind == "few_row":
                assert spec.tile_q == 16 and spec.tile_kv == 16 * spec.num_warps
                assert 2 <= spec.num_stages <= 4
            else:
                assert spec.tile_q in (64, 128) and spec.tile_q % (16 * spec.num_warps) == 0
                assert spec.num_stages in (1, 2)
                assert spec.tile_kv % spec.num_warps == 0 and spec.tile_kv <= 32 * spec.num_warps
            if spec.target == "sm_75":
                assert spec.tile_q <= 64


@settings(max_examples=200, deadline=None)
@given(targets, head_dims, head_dims, variants)
def test_accumulators_fit_the_registers_that_the_tile_declares(
    target, head_dim, head_dim_v, variant
):
    for chosen in kernels_by_rows(variant, (head_dim, head_dim_v), ("float16",) * 3, target):
        assert spare_registers(chosen) >= (30 if chosen.tile_kind == "prefill_wgmma" else 56)
        assert register_budget(chosen) <= MAX_REGISTERS
        ctas = ctas_per_sm(chosen)
        assert ctas <= resident_by_shared(chosen.target, shared_bytes(chosen))
        threads = 32 * chosen.num_warps * ctas
        assert threads <= limits(target).threads_per_sm
        assert threads * register_budget(chosen) <= limits(target).registers_per_sm


@settings(max_examples=200, deadline=None)
@given(targets, head_dims, head_dims, st.sampled_from(ROW_CLASSES), variants)
def test_each_step_down_leaves_hooks_more_registers(target, head_dim, head_dim_v, rows, variant):
    chosen = choose(variant, problem(rows, head_dim, head_dim_v), target)
    steps = fallbacks(chosen)
    kinds = [s.tile_kind for s in (chosen, *steps)]
    assert kinds == sorted(kinds, reverse=True)  # from wgmma to mma.sync, if it changes
    assert all(s.tile_q <= chosen.tile_q for s in steps)
    for kind in dict.fromkeys(kinds):  # registers of consumers are not those of other kernels
        spare = [spare_registers(s) for s in (chosen, *steps) if s.tile_kind == kind]
        assert spare == sorted(set(spare))
    assert all(fallbacks(step) == steps[i + 1 :] for i, step in enumerate(steps))


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("bfloat16", "int8", "int8")])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [60, 500])
def test_wgmma_steps_down_to_the_tile_that_calls_without_tma_take(dtypes, head_dim, rows):
    chosen, other = (
        choose_rows(PLAIN, (head_dim,) * 2, dtypes, "sm_90", rows, tma=tma) for tma in (True, False)
    )
    if chosen.tile_kind == "prefill":  # wgmma has no tile of 64 rows where rows are changed
        assert chosen == other
        return
    of_wgmma = [s for s in fallbacks(chosen) if s.tile_kind == "prefill_wgmma"]
    assert fallbacks(chosen) == (*of_wgmma, other, *fallbacks(other))


def test_lengths_heads_and_names_do_not_reach_the_key():
    a = choose(PLAIN, problem(100, 128, 128, 200), "sm_90", name="A")
    b = choose(PLAIN, problem(25, 128, 128, 20, group=8), "sm_90", name="B")
    assert a.document() == b.document()


def test_an_emulated_target_gets_the_kernel_that_the_device_gets():
    p = problem(300, 64, 64)
    assert choose(PLAIN, p, "emulated:sm_80") == choose(PLAIN, p, "sm_80")


@pytest.mark.parametrize("target", CUDA_TARGETS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 4096])
def test_exactly_one_candidate_is_the_choice_and_each_has_a_reason(target, rows):
    p = problem(rows, 128, 128)
    options = candidates(p, target, PLAIN)
    assert [c.spec for c in options if c.chosen] == [choose(PLAIN, p, target)]
    assert all(c.reason and c.scratch_bytes for c in options)
    assert len({c.spec for c in options}) == len(options)


def test_rows_of_a_group_share_a_tile():
    """Heads of a group are rows: 8 heads and 2 positions fill what 16 positions of one head do."""
    assert choose(PLAIN, problem(2, 128, 128, group=8), "sm_90").tile_kind == "few_row"
    assert choose(PLAIN, problem(3, 128, 128, group=8), "sm_90").tile_q == 64
    assert choose(PLAIN, problem(9, 128, 128, group=8), "sm_90").tile_q == 128


def test_head_dims_are_padded_to_what_matrix_instructions_take():
    assert [padded(d) for d in (1, 16, 17, 80, 121, 256)] == [16, 16, 32, 80, 128, 256]


@pytest.mark.parametrize(
    ("score_mod", "keys"),
    [
        (lambda s, b, h, i, j: s - torch.log1p(abs(i - j)), 64),
        (lambda s, b, h, i, j: torch.erf(s), 64),
        (lambda s, b, h, i, j: s * torch.log1p(abs(i)) + torch.log1p(j), 128),
        (lambda s, b, h, i, j: torch.tanh(s), 128),
    ],
)
def test_long_functions_of_pairs_have_tiles_of_fewer_keys(score_mod, keys):
    ir = fa.variant(score_mod=score_mod).explain(dims={"num_q_heads": 2}).ir
    assert choose(ir, problem(300, 64, 64), "sm_90", tma=False).tile_kv == keys
    assert choose(ir, problem(300, 128, 128), "sm_90", tma=False).tile_kv == 64
    for head_dim, most in ((64, 192), (128, 128)):
        wgmma = choose(ir, problem(300, head_dim, head_dim), "sm_90")
        assert wgmma.tile_kv == (64 if keys == 64 else most)


CHANGED = VariantIR((), cpp=(("key_mod", "return;"),))


@pytest.mark.parametrize(
    ("variant", "head_dims", "features", "tma", "reason"),
    [
        (PLAIN, (128, 128), (), True, ""),
        (PLAIN, (64, 256), ("paged", "block_mask"), True, ""),
        (PLAIN, (128, 128), ("paged",), False, "not a multiple of 8"),
        (PLAIN, (128, 128), ("unaligned",), True, "unaligned"),
        (PLAIN, (128, 128), ("sparse",), True, "sparse"),
        (PLAIN, (128, 128), ("paged", "mixed_rows"), True, "mixed_rows"),
        (PLAIN, (56, 128), (), True, "below 64"),
        (PLAIN, (128, 100), (), True, "not a multiple of 8"),
        (CHANGED, (128, 128), (), True, ""),
        (CHANGED, (128, 256), (), True, ""),
        (CHANGED, (128, 128), ("sparse",), True, "sparse"),
    ],
)
def test_what_is_not_computed_by_wgmma_says_why(variant, head_dims, features, tma, reason):
    spec = choose_rows(variant, head_dims, ("float16",) * 3, "sm_90", 500, features, tma=tma)
    assert spec.tile_kind == ("prefill" if reason else "prefill_wgmma")
    assert reason in against_wgmma(spec, tma) and bool(against_wgmma(spec, tma)) == bool(reason)
    few = choose_rows(variant, head_dims, ("float16",) * 3, "sm_90", 16, features)
    assert few.tile_kind == "few_row"


@pytest.mark.parametrize("dtypes", [("float16",) * 3, ("float16", "int8", "bits4x2")])
@pytest.mark.parametrize("rows", [40, 500])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_tiles_whose_rows_are_changed_have_a_warpgroup_for_it(dtypes, rows, head_dim):
    dims = (head_dim,) * 2
    changed = CHANGED if dtypes[1] == "float16" else PLAIN  # a hook, or codes
    spec = choose_rows(changed, dims, dtypes, "sm_90", rows)
    groups = 1 if head_dim == 256 else 2
    if rows == 40 and groups == 2:
        assert spec.tile_kind == "prefill"
        options = candidates(problem(rows, *dims, dtype="float16"), "sm_90", CHANGED)
        (why,) = (c.reason for c in options if c.chosen)
        assert "not wgmma: with codes, key_mod or value_mod it has no tiles of 64 rows" in why
        other = choose_rows(CHANGED, dims, ("float16",) * 3, "sm_90", 500)
        assert other.tile_kind == "prefill_wgmma"
        assert other in [c.spec for c in options], "the tile of more rows is the one they would get"
        return
    assert (spec.tile_kind, spec.tile_q) == ("prefill_wgmma", 64 * groups)
    assert spec.num_warps == 4 * (groups + 2) and spec.tile_kv == (128 if head_dim == 64 else 64)
    producer, consumers, changers = warpgroup_registers(spec)
    launched = register_budget(spec)
    assert producer + groups * consumers + (changers or launched) <= (groups + 2) * launched
    assert spare_registers(spec) >= 30
