"""The planner's choices: intensity decides the tile kind, and every choice is reachable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit.codegen.spec import matrix_dtype
from flashattn_jit.codegen.targets import CPU_TARGETS
from flashattn_jit.planner.reachable import reachable
from flashattn_jit.planner.roofline import Hardware, roofline
from flashattn_jit.planner.tiles import (
    Problem,
    candidates,
    choose,
    few_rows,
    item_rows,
    scratch_bytes,
)
from flashattn_jit.variants.ir.ir import VariantIR

PLAIN = VariantIR(())
MACHINE = Hardware("test", "cpu:avx512_bf16", 2, 5e11, 1e12, 4e10)


def problem(q_len, kv_len, q_heads=8, kv_heads=8, head_dim=128, dtype="bfloat16"):
    return Problem((q_len,), (kv_len,), q_heads, kv_heads, head_dim, head_dim, dtype, dtype, dtype)


def test_decode_is_bound_by_memory_and_prefill_by_arithmetic():
    decode, prefill = problem(1, 4096), problem(4096, 4096)
    assert decode.intensity() < 2 < prefill.intensity()
    assert roofline(decode, MACHINE, "bfloat16").bound == "memory"
    assert roofline(prefill, MACHINE, "bfloat16").bound == "compute"
    assert choose(PLAIN, decode, "cpu:avx512_bf16").tile_kind == "few_row"
    assert choose(PLAIN, prefill, "cpu:avx512_bf16").tile_kind == "prefill"


def test_flops_and_bytes_are_those_of_the_textbook():
    p = problem(128, 256, q_heads=4, kv_heads=2, head_dim=64, dtype="float32")
    assert p.flops() == 4 * 128 * 256 * 4 * 64
    assert p.bytes() == 4 * (2 * 128 * 4 * 64 + 2 * 256 * 2 * 64)


def test_grouped_heads_count_as_rows():
    most = few_rows("cpu:avx512_bf16", "bfloat16")
    assert problem(1, 4096, q_heads=most, kv_heads=1).packed_rows == most
    wide = problem(1, 4096, q_heads=most + 1, kv_heads=1)
    assert choose(PLAIN, wide, "cpu:avx512_bf16").tile_kind == "prefill"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(CPU_TARGETS),
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.integers(1, 71),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([(), ("block_mask",)]),
)
def test_the_planner_never_leaves_what_is_reachable(
    target, head_dim, head_dim_v, q_len, kv_len, group, dtype, features
):
    dtypes = (dtype, dtype, dtype)
    p = Problem((q_len,), (kv_len,), 2 * group, 2, head_dim, head_dim_v, *dtypes)
    specs = reachable(PLAIN, (head_dim, head_dim_v), dtypes, target)
    assert len(specs) <= 8
    assert choose(PLAIN, p, target, features).document() in {s.document() for s in specs}


def test_lengths_and_names_do_not_reach_the_key():
    a = choose(PLAIN, problem(100, 200), "cpu:avx2", name="A")
    b = choose(PLAIN, problem(5000, 20), "cpu:avx2", name="B")
    assert a.document() == b.document()


def test_exactly_one_candidate_is_chosen_and_each_has_a_reason():
    for rows in (1, 4096):
        options = candidates(problem(rows, 4096), "cpu:avx512_bf16")
        assert sum(c.chosen for c in options) == 1
        assert all(c.reason for c in options)
        kind = choose(PLAIN, problem(rows, 4096), "cpu:avx512_bf16").tile_kind
        assert next(c for c in options if c.chosen).spec.tile_kind == kind


def test_a_thread_touches_less_than_its_share_of_scratch():
    for target in CPU_TARGETS:
        for dtype in ("float32", "bfloat16"):
            p = problem(4096, 4096, head_dim=256, dtype=dtype)
            assert matrix_dtype(target, dtype) in ("float32", "bfloat16")
            assert all(c.scratch_bytes < 4 << 20 for c in candidates(p, target))


def test_a_small_cache_gets_fewer_rows_of_the_same_kernel():
    spec = choose(PLAIN, problem(4096, 4096, head_dim=256, dtype="float32"), "cpu:avx512")
    rows = item_rows(spec, 256 << 10)
    assert 0 < rows < spec.tile_q and rows % 16 == 0
    used = scratch_bytes("cpu:avx512", (rows, spec.tile_kv), (256, 256), "float32")
    assert used <= 0.75 * (256 << 10) or rows == 16
    assert item_rows(spec, 2 << 20) == item_rows(spec, 0) == spec.tile_q
