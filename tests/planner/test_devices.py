"""Devices in the table, devices as torch reports them, and the slots of kernels on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashattn_jit.codegen.budget import LIMITS, ctas_per_sm, register_budget, shared_bytes
from flashattn_jit.codegen.targets import CUDA_TARGETS, architecture
from flashattn_jit.errors import InputError, TargetError
from flashattn_jit.planner.devices import (
    DEVICES,
    described,
    device_hardware,
    named_hardware,
    typical_hardware,
)
from flashattn_jit.planner.roofline import roofline
from flashattn_jit.planner.tiles import Problem, choose, least_part, slots
from flashattn_jit.variants.ir.ir import VariantIR

PLAIN = VariantIR(())


def spec_for(rows, device, head_dim=128):
    p = Problem((rows,), (4096,), 1, 1, head_dim, head_dim, *("bfloat16",) * 3)
    return choose(PLAIN, p, device.target)


H200 = SimpleNamespace(  # what torch 2.11 reports, where it reports it
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20,
    total_memory=150754820096, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100"), ("h200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("rtx5090", "RTX 5090"), ("4090", "RTX 4090"),
        ("L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A10", "A10"), ("NVIDIA B200", "B200"),
    ],
)  # fmt: skip
def test_names_are_found_as_people_and_drivers_write_them(name, found):
    assert named_hardware(name).name == found


@pytest.mark.parametrize(
    "name", ["", "RTX", "MI300", "H", "L40", "T400", "A10G", "H100 PCIe", "A100-PCIE-40GB"]
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(InputError, match="RTX 4090"):
        named_hardware(name)


def test_every_target_has_a_device_and_every_device_its_limits():
    assert {typical_hardware(t).target for t in CUDA_TARGETS} == set(
        map(architecture, CUDA_TARGETS)
    )
    for device in DEVICES:
        arch = LIMITS[device.target]
        assert (device.shared_per_block, device.shared_per_sm) == (
            arch.shared_per_block, arch.shared_per_sm,
        )  # fmt: skip
        assert device.threads_per_sm == arch.threads_per_sm


def test_rates_are_of_the_right_order():
    """FLOP a clock and multiprocessor at a plausible clock, to check the data sheets' figures."""
    per_clock = {"sm_75": 1024, "sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096,
                 "sm_100": 8192, "sm_120": 512}  # fmt: skip
    for device in DEVICES:
        half = 0.5 if device.name == "RTX 4090" else 1.0
        clock = device.matrix_flops / device.num_sms / per_clock[device.target] / half
        assert 1.2e9 < clock < 2.7e9, device.name


def test_a_device_is_read_off_torch():
    device = described(H200)
    assert (device.name, device.target, device.num_sms) == ("NVIDIA H200", "sm_90", 132)
    assert device.l2_bytes == 60 << 20 and device.shared_per_sm == 228 << 10
    assert device.read_bytes_per_s == 4800e9 and device.matrix_flops == 989.5e12
    clocked = SimpleNamespace(**vars(H200), memory_clock_rate=3201000, memory_bus_width=6144)
    assert described(clocked).read_bytes_per_s == pytest.approx(4.917e12, rel=1e-3)


def test_a_device_that_is_not_listed_has_its_rates_from_its_clocks():
    unknown = SimpleNamespace(
        **{**vars(H200), "name": "NVIDIA A40", "major": 8, "minor": 6, "multi_processor_count": 84,
           "shared_memory_per_multiprocessor": 102400, "shared_memory_per_block_optin": 101376,
           "max_threads_per_multi_processor": 1536, "clock_rate": 1740000,
           "memory_clock_rate": 7251000, "memory_bus_width": 384},
    )  # fmt: skip
    device = described(unknown)
    assert device.target == "sm_86"
    assert device.matrix_flops == pytest.approx(149.7e12, rel=1e-2)
    assert device.read_bytes_per_s == pytest.approx(696e9, rel=1e-2)


def test_a_smaller_part_of_a_listed_device_has_its_share_of_the_rate():
    pcie = SimpleNamespace(
        **{**vars(H200), "name": "NVIDIA H100 PCIe", "multi_processor_count": 114}
    )
    assert described(pcie).matrix_flops == pytest.approx(989.5e12 * 114 / 132)


def test_devices_without_kernels_are_refused():
    with pytest.raises(TargetError):
        described(SimpleNamespace(**{**vars(H200), "major": 6, "minor": 1}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_error_says_what_to_do():
    with pytest.raises(InputError, match="device='H100'"):
        device_hardware()


def test_slots_come_from_what_runs_out_first():
    h100 = named_hardware("H100")
    prefill, few = spec_for(4096, h100), spec_for(1, h100)
    assert prefill.tile_kind == "prefill_wgmma"
    assert slots(prefill, h100).per_sm == 1 and slots(prefill, h100).total == 132
    two = choose(PLAIN, Problem((50,), (4096,), 1, 1, 128, 128, *("bfloat16",) * 3), "sm_90")
    assert two.tile_q == 64 and slots(two, h100).per_sm == 2
    assert slots(few, h100).per_sm == 3 and slots(few, h100).limit == "shared memory"
    # 255 registers are handed out as 256, two warps to each quarter of the file.
    assert slots(few, h100, registers=255).per_sm == 2
    assert slots(few, h100, registers=255).limit == "registers"
    assert slots(few, h100, registers=32).per_sm == 3


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 50, 5000])
def test_a_kernel_within_its_budget_gets_the_blocks_that_its_tile_declares(device, head_dim, rows):
    spec = spec_for(rows, device, head_dim)
    found = slots(spec, device)
    assert found.per_sm >= ctas_per_sm(spec) >= 1
    assert found.total == found.per_sm * device.num_sms
    assert slots(spec, device, register_budget(spec)) == found
    assert shared_bytes(spec) * found.per_sm <= device.shared_per_sm


def test_the_least_chunk_holds_whole_tiles():
    for device in DEVICES:
        for rows in (1, 50, 5000):
            spec = spec_for(rows, device)
            least = spec.tile_kv if spec.tile_kind == "few_row" else 256
            assert least_part(spec) >= least and least_part(spec) % spec.tile_kv == 0


def test_the_roofline_knows_decode_from_prefill_on_every_device():
    for device in DEVICES:
        decode = Problem((1,), (4096,), 8, 8, 128, 128, *("bfloat16",) * 3)
        prefill = Problem((4096,), (4096,), 8, 8, 128, 128, *("bfloat16",) * 3)
        assert roofline(decode, device, "bfloat16").bound == "memory"
        assert roofline(prefill, device, "bfloat16").bound == "compute"
