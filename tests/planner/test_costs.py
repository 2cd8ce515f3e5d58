"""Costs of work on each target: the coefficients with which the scheduler balances."""

from __future__ import annotations

import pytest

from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.codegen.targets import CPU_TARGETS, CUDA_TARGETS
from flashattn_jit.planner.devices import named_hardware
from flashattn_jit.planner.tiles import coefficients, kernels_by_rows
from flashattn_jit.variants.ir.ir import VariantIR


def specs(target: str, head_dim: int = 128, kv_dtype: str | None = None) -> dict[str, KernelSpec]:
    """By tile kind, the kernel of most rows and that of fewest."""
    own = "float32" if target in CPU_TARGETS else "float16"
    dtypes = own, kv_dtype or own, kv_dtype or own
    kernels = kernels_by_rows(VariantIR(()), (head_dim, head_dim), dtypes, target)
    return {"prefill": kernels[0], "few_row": kernels[-1]}


@pytest.mark.parametrize("target", [*CPU_TARGETS, *CUDA_TARGETS])
def test_one_row_is_bound_by_memory_and_a_full_cpu_tile_by_arithmetic(target: str) -> None:
    found = specs(target)
    one, many = (coefficients(found[kind], target) for kind in ("few_row", "prefill"))
    assert 0 < one.pair_ns < one.load_ns
    if target in CPU_TARGETS:
        assert many.pair_ns * found["prefill"].tile_q > many.load_ns > 0
    assert many.pair_ns <= one.pair_ns
    assert one.item_ns > 0 and one.state_ns > 0


@pytest.mark.parametrize("target", ["cpu:avx2", "sm_80"])
def test_costs_follow_bytes_and_products(target: str) -> None:
    narrow, wide = (coefficients(specs(target, dim)["few_row"], target) for dim in (64, 128))
    workers = 1.0  # of a device, fewer where each takes more shared memory
    if target == "sm_80":
        workers = narrow.pair_ns / wide.pair_ns * 2
    assert wide.load_ns * workers == pytest.approx(2 * narrow.load_ns)
    assert wide.pair_ns * workers == pytest.approx(2 * narrow.pair_ns)


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_few_blocks_saturate_the_memory_of_a_device(target: str) -> None:
    """On an H100 87 of 396 blocks: 32 KiB each, of the 2.8 MB that arrive in 1 us."""
    found = specs(target)
    few, many = (coefficients(found[kind], target) for kind in ("few_row", "prefill"))
    if target == "sm_75":  # loads through registers, with 2 KiB in flight to a block
        assert few.alone_ns == few.load_ns
    else:
        assert 0.1 < few.alone_ns / few.load_ns < 0.5
    assert many.alone_ns == many.load_ns
    if target == "sm_90":
        assert 396 * few.alone_ns / few.load_ns == pytest.approx(3350 * 0.85 / 32.768)


def test_work_is_loaded_at_the_rate_of_the_device_that_runs_it() -> None:
    """An H200 is an H100 with 1.43 times the bandwidth, which more blocks saturate."""
    few, h200 = specs("sm_90")["few_row"], named_hardware("H200")
    typical, faster = coefficients(few, "sm_90"), coefficients(few, "sm_90", h200)
    assert coefficients(few, "sm_90", named_hardware("H100")) == typical
    assert faster.load_ns == pytest.approx(typical.load_ns * 3350 / 4800)
    assert faster.state_ns == pytest.approx(typical.state_ns * 3350 / 4800)
    assert (faster.alone_ns, faster.pair_ns) == (typical.alone_ns, typical.pair_ns)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_threads_do_not_share_a_bandwidth(target: str) -> None:
    for spec in specs(target).values():
        costs = coefficients(spec, target)
        assert costs.alone_ns == costs.load_ns


def test_keys_of_one_byte_arrive_four_times_as_fast() -> None:
    whole, small = (
        coefficients(specs("cpu:avx2", kv_dtype=dtype)["few_row"], "cpu:avx2")
        for dtype in ("float32", "int8")
    )
    assert small.load_ns == pytest.approx(whole.load_ns / 4)
    assert small.pair_ns == whole.pair_ns


def test_an_emulated_target_costs_what_its_device_does() -> None:
    spec = specs("sm_90")["few_row"]
    assert coefficients(spec, "emulated:sm_90") == coefficients(spec, "sm_90")
    assert coefficients(spec, "sm_90") != coefficients(specs("sm_75")["few_row"], "sm_75")
