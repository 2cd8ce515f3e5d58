"""`Variant.explain` for GPUs that the machine lacks, without a compiler or any files written."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CUDA_TARGETS, architecture, called_target
from flashattn_jit.errors import InputError, TargetError
from flashattn_jit.planner.devices import DEVICES, named_hardware

PREFILL = {"batch": 2, "num_q_heads": 32, "num_kv_heads": 8, "q_len": 4096, "kv_len": 4096,
           "head_dim": 128}  # fmt: skip
DECODE = {**PREFILL, "q_len": 1, "kv_len": 32768}
BF16 = torch.bfloat16


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_every_device_is_explained_without_compiler_or_cache(device, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "/nonexistent/c++")
    monkeypatch.setenv("FLASHATTN_JIT_NVCC", "/nonexistent/nvcc")
    dtype = torch.float16 if device.target == "sm_75" else BF16
    found = fa.ALiBi().explain(dims=PREFILL, dtype=dtype, device=device.name)
    text = str(found)
    assert found.target == called_target(found.plan.spec.target) == device.target
    assert found.roofline.hardware is device and found.roofline.point.bound == "compute"
    for wanted in (
        f"variant ALiBi on {device.target}", "score_mod:", "->", "slots: ", f" on {device.name}",
        "registers a thread", "TFLOP/s", found.plan.key.hex,
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "struct Hooks" in found.source and "fajit/cuda" in found.source
    assert list(tmp_path.iterdir()) == []


def test_splits_come_from_slots():
    """The heads of two requests leave most slots of the device idle unless keys are split."""
    plan = fa.Causal().explain(dims=DECODE, dtype=BF16, q_offset="end", device="H200").plan
    assert plan.spec.tile_kind == "few_row"
    assert plan.slots.total == plan.slots.per_sm * 132
    assert plan.most_splits > 1 and plan.num_work >= plan.slots.total * 0.8
    for batch, cut in ((396, 0.0), (512, 0.1)):  # 8 waves of all slots, and 10.3
        full = fa.Causal().explain(dims={**DECODE, "batch": batch}, dtype=BF16, device="H200").plan
        assert full.slots.total == 396
        assert full.num_work <= (1 + cut) * 8 * batch
        assert cut or full.most_splits == 1


def test_a_target_alone_stands_for_a_typical_device():
    for target in CUDA_TARGETS:
        found = fa.Causal().explain(dims=PREFILL, dtype=torch.float16, target=target)
        assert found.target == target and found.plan.device.target == architecture(target)
    emulated = fa.Causal().explain(dims=PREFILL, dtype=torch.float16, target="emulated:sm_80")
    assert emulated.plan.spec.target == "sm_80" and emulated.plan.device.name == "A100"


def test_the_mask_reaches_tiles_and_roofline():
    window = fa.SlidingWindow(256).explain(dims=PREFILL, dtype=BF16, device="H100")
    full = fa.variant().explain(dims=PREFILL, dtype=BF16, device="H100")
    assert window.tiles.counts.visited_share < 0.2
    assert window.roofline.flops < 0.2 * full.roofline.flops
    assert window.tiles.tile_kv == window.plan.spec.tile_kv


def test_names_and_targets_that_disagree_are_refused():
    with pytest.raises(InputError, match="sm_90"):
        fa.Causal().explain(dims=PREFILL, device="H100", target="sm_80")
    with pytest.raises(InputError, match="RTX 4090"):
        fa.Causal().explain(dims=PREFILL, device="MI300")
    with pytest.raises(TargetError, match="sm_99"):
        fa.Causal().explain(dims=PREFILL, target="sm_99")


def test_sizes_and_dtypes_are_refused_as_those_of_tensors_are():
    for options in ({"device": "H100"}, {"target": "sm_75", "dtype": BF16}):
        with pytest.raises(
            InputError, match=r"CUDA kernels of sm_\d+ take q, k and v of one dtype"
        ):
            fa.Causal().explain(dims=PREFILL, **options)
    for sizes, words in (
        ({"head_dim": 577}, "head_dim=577 is not supported; it must be 1 to 576"),
        ({"batch": 2**16, "q_len": 2**15}, "batch=65536 x length does not fit 32 bits"),
    ):
        with pytest.raises(InputError, match=words):
            fa.Causal().explain(dims=sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_torch_lacks_is_an_error():
    with pytest.raises(InputError, match="no CUDA device"):
        fa.Causal().explain(dims=PREFILL, device="cuda:0")


def test_h200_is_named_as_its_driver_names_it():
    assert named_hardware("NVIDIA H200").target == "sm_90"


def test_a_plot_of_a_device(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    fa.Causal().explain(dims=PREFILL, dtype=BF16, device="L4", plot=path)
    assert path.read_bytes().startswith(b"\x89PNG")
