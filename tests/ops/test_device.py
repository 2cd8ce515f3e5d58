"""Calls on devices as far as a machine without one can tell: placement, plans, argument blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.codegen.spec import UtilitySpec
from flashattn_jit.errors import InputError, LaunchError, TargetError
from flashattn_jit.jit.module import default, load_stepping
from flashattn_jit.jit.nvcc import find_toolkit
from flashattn_jit.ops import _check, _device, _device_launch, _driver, _placement
from flashattn_jit.ops._launch import Geometry
from flashattn_jit.planner import named_hardware, slots
from flashattn_jit.planner.tiles import request_of

CUDA0, CPU = torch.device("cuda", 0), torch.device("cpu")
needs_nvcc = pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
needs_no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would launch it")


@dataclass
class OnDevice:
    """As much of a CUDA tensor as placement looks at."""

    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA0
    is_cuda: bool = True


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placement, "device_target", lambda index: "sm_90")


def place(*dtypes: torch.dtype, target: str | None = None) -> str:
    return _placement.place(*map(OnDevice, dtypes), target)  # type: ignore[arg-type]


@pytest.mark.usefixtures("h100")
def test_a_device_takes_its_own_target_and_older_ones_of_its_major_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = (torch.float16,) * 3
    assert place(*half) == "sm_90" == place(*half, target="sm_90")
    monkeypatch.setattr(_placement, "device_target", lambda index: "sm_89")
    assert place(*half, target="sm_86") == "sm_86"
    for target in ("sm_90", "sm_75"):
        with pytest.raises(TargetError, match="does not run on cuda:0, whose target is 'sm_89'"):
            place(*half, target=target)
    for target in ("cpu:avx2", "emulated:sm_89"):
        with pytest.raises(TargetError, match=r"runs on CPU tensors.*\.cpu\(\)"):
            place(*half, target=target)
    with pytest.raises(TargetError, match="unknown target 'sm_42'"):
        place(*half, target="sm_42")


@pytest.mark.usefixtures("h100")
def test_matrix_dtypes_are_what_the_architecture_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    assert place(bf16, bf16, bf16) == "sm_90"
    for dtypes in ((single,) * 3, (bf16, half, half), (bf16, torch.int8, torch.int8)):
        with pytest.raises(InputError, match=r"bfloat16 or torch\.float16; got q .*to\(torch\.bf"):
            place(*dtypes)
    monkeypatch.setattr(_placement, "device_target", lambda index: "sm_75")
    assert place(half, half, half) == "sm_75"
    with pytest.raises(InputError, match=r"sm_75 take .* torch\.float16; got q torch\.bfloat16"):
        place(bf16, bf16, bf16)


def test_an_architecture_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    with pytest.raises(TargetError, match=r"compute capability 7\.0"):
        _placement.device_target.__wrapped__(3)


def test_tensors_of_different_devices_are_named_with_their_devices() -> None:
    there = {"q": OnDevice(), "k": torch.empty(1), "v": OnDevice()}
    with pytest.raises(InputError, match=r"q on cuda:0, k on cpu, v on cuda:0.*k\.to\('cuda:0'\)"):
        _check.check_devices(there)  # type: ignore[arg-type]
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(InputError, match="v is on device meta, but kernels run on cpu and cuda"):
        fa.attention(q, q, q.to("meta"))
    with pytest.raises(InputError, match=r"out must be .* on cpu, got .* on meta"):
        fa.attention(q, q, q, out=torch.empty_like(q, device="meta"))
    with pytest.raises(InputError, match=r"kv_len must be .* on meta; lengths are planned on"):
        fa.attention(q, q, q, kv_len=torch.ones(1, dtype=torch.int32, device="meta"))


GEOMETRY = Geometry(
    handle=0, dtypes=(torch.bfloat16,) * 3, num_q_heads=2, num_kv_heads=2, head_dim=64,
    head_dim_v=64, q_len=8, kv_len=8, q_offset=0, num_requests=1, q_row0=0, kv_row0=0, q_token0=0,
    kv_token0=0, strides=((1024, 512, 64),) * 4 + ((16, 8, 1),), params=(), flags=0, num_threads=0,
    target="sm_80", block_mask=None, scalars=None, device=CPU,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"aligned": False},
        {"head_dim": 60},
        {"head_dim_v": 36},
        {"strides": ((1024, 516, 64), *GEOMETRY.strides[1:])},
        {"strides": (*GEOMETRY.strides[:3], (1024, 512, 65), GEOMETRY.strides[4])},
        {"flags": _C.PARTIAL, "strides": (*GEOMETRY.strides[:3], (9, 4, 2), GEOMETRY.strides[4])},
    ],
)
def test_rows_that_start_between_16_bytes_take_another_kernel(change: dict[str, Any]) -> None:
    assert _device.features_of(GEOMETRY) == ()
    assert _device.features_of(GEOMETRY._replace(**change)) == ("unaligned",)


def test_partial_results_are_aligned_as_fp32_and_lse_not_at_all() -> None:
    strides = (*GEOMETRY.strides[:3], (256, 128, 4), (7, 3, 1))
    assert _device.features_of(GEOMETRY._replace(flags=_C.PARTIAL, strides=strides)) == ()
    assert _device.features_of(GEOMETRY._replace(strides=strides)) == ("unaligned",)


def test_block_masks_are_features() -> None:
    blocks = GEOMETRY._replace(block_mask=((1, 1, 1, 1), (0, 0, 1, 1), 128, 128))
    assert _device.features_of(blocks) == ("block_mask",)


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _device.refuse_capture(CPU)
    with pytest.raises(LaunchError, match="make the same call once before the capture"):
        _device.refuse_capture(CUDA0)


@pytest.mark.parametrize(
    ("supported", "needed", "refused"),
    [(13000, 580, False), (13010, 580, False), (12080, 580, True), (12000, 525, False),
     (10020, 450, True), (14000, 580, False)],
)  # fmt: skip
def test_a_driver_runs_what_its_cuda_or_an_older_one_compiled(
    monkeypatch: pytest.MonkeyPatch, supported: int, needed: int, refused: bool
) -> None:
    monkeypatch.setattr(_driver, "min_driver", lambda module: needed)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: supported, raising=False)
    module: Any = SimpleNamespace(path=f"/kernels/{supported}/{needed}.so")
    if not refused:
        _driver.check(module)
        return
    with pytest.raises(LaunchError, match=rf"needs driver {needed} or newer") as error:
        _driver.check(module)
    assert module.path in str(error.value)


# --- launches of a device that is not there -------------------------------------------------------


class Recorded:
    """Stands in for a native call, the block and the event of a plan."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.events: list[str] = []

    def launch(self, *values: Any, stream: int, device: int) -> None:
        names = ("q", "k", "v", "out", "lse", "scale", "num_threads", "tensors", "scalars",
                 "workspace", "states", "page_indices", "key_blocks", "device_block")  # fmt: skip
        self.launches.append(
            dict(zip(names, values, strict=True)) | {"stream": stream, "device": device}
        )

    def data_ptr(self) -> int:
        return 4096

    def record_stream(self, stream: Any) -> None:
        self.events.append(f"release after {stream}")

    def wait(self, stream: Any) -> None:
        self.events.append(f"{stream} waits")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream {state.stream}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(_device_launch, "_captured", {})
    return state


def test_launches_go_to_the_current_stream_of_the_tensors_device(device: SimpleNamespace) -> None:
    fake: Any = Recorded()
    block = _device_launch.DeviceMemory(fake, fake, {7})
    plan = _device.DevicePlan(None, fake, torch.device("cuda", 1), block)
    q = torch.zeros(4)
    call = _device_launch.LaunchTensors(q, q, q, q, None, addresses=(1, 2), scalars=(0.5,))
    _device.launch(plan, call, 0.25)
    assert fake.events == []
    only = fake.launches[0]
    assert (only["stream"], only["device"], only["device_block"]) == (7, 1, 4096)
    assert (only["scale"], only["tensors"], only["scalars"]) == (0.25, (1, 2), (0.5,))
    # Another stream is ordered after the plan's copy, once.
    device.stream = 8
    for _ in range(2):
        _device.launch(plan, call, 0.25)
    assert fake.events == ["stream 8 waits", "release after stream 8"]
    assert [launch["stream"] for launch in fake.launches] == [7, 8, 8]


def test_a_captured_plan_is_kept_and_records_nothing_on_streams(device: SimpleNamespace) -> None:
    fake: Any = Recorded()
    plan = _device.DevicePlan(None, fake, CUDA0, _device_launch.DeviceMemory(fake, fake, {7}))
    device.stream, device.capturing = 9, True
    q, param, table = torch.zeros(3, 4).unbind()
    tensors = _device_launch.LaunchTensors(q, q, q, q, None, (param, table), num_params=1)
    _device.launch(plan, tensors, 1.0)
    assert fake.events == [] and fake.launches[0]["stream"] == 9
    assert list(_device_launch._captured.values()) == [plan, param] and plan.block.streams == {7}


# --- argument blocks of a real CUDA artifact ------------------------------------------------------


@pytest.fixture(scope="module")
def merge_module() -> _C.Module:
    spec = UtilitySpec("merge_states", "sm_80")
    return load_stepping([request_of(spec)])[1]


def call_of(module: _C.Module, lengths: tuple[int, ...] = (3, 0, 2)) -> _C.Call:
    problem = _C.Problem(
        num_requests=len(lengths), num_q_heads=1, num_kv_heads=1, head_dim=2, head_dim_v=2,
        q_len=lengths, kv_len=[5, 6, 7], q_row0=(0, 3, 3), kv_row0=10, q_offset=(-1, 0, 4),
        q_token0=20, kv_token0=30, out_stride=(0, 0, 2), lse_stride=(0, 0, 1),
        tensors=(((1, 1, 5, 2), (10, 10, 2, 1)), ((1, 1, 5), (5, 5, 1))),
        page_indptr=(0, 2, 3, 4), page_size=7, num_pages=9,
    )  # fmt: skip
    work = struct.pack("8i", 0, 0, 1, 0, 3, 0, 5, -1) + struct.pack("8i", 2, 0, 1, 0, 2, 0, 7, -1)
    return _C.Call(module, problem, work, flags=_C.WRITE_LSE)


@needs_nvcc
def test_the_device_block_holds_lengths_pages_and_work_at_multiples_of_16(
    merge_module: _C.Module,
) -> None:
    assert merge_module.is_cuda
    block = call_of(merge_module).device_block()
    arrays = [(3, 0, 2), (5, 6, 7), (0, 3, 3), (10,) * 3, (-1, 0, 4), (20,) * 3, (30,) * 3]
    for i, array in enumerate(arrays):
        assert struct.unpack_from("3i", block, 16 * i) == array
    assert struct.unpack_from("4i", block, 16 * 7) == (0, 2, 3, 4)
    assert struct.unpack_from("8i", block, 16 * 8) == (0, 0, 1, 0, 3, 0, 5, -1)
    assert struct.unpack_from("8i", block, 16 * 10) == (2, 0, 1, 0, 2, 0, 7, -1)
    assert len(block) == 16 * 12


@needs_nvcc
def test_launches_are_data_without_a_driver(merge_module: _C.Module) -> None:
    call = call_of(merge_module)
    values = {"q": 1, "k": 1, "v": 1, "out": 64, "lse": 128, "scale": 1.0, "num_threads": 1,
              "tensors": (256, 512), "page_indices": 8, "device_block": 1024}  # fmt: skip
    ((module, (kernel, grid, block, shared_bytes, params)),) = call.plan_launches(**values)
    assert module is merge_module
    assert (kernel, grid, block, shared_bytes) == (
        "fajit_merge_states_kernel", (2, 1, 1), (128, 1, 1), 0,
    )  # fmt: skip
    assert struct.unpack_from("2q", params) == (64, 128)
    for wrong, message in (
        ({"device_block": 0}, "device_block has address 0"),
        ({"device_block": 1032}, "device_block must be aligned to 16"),
        ({"page_indices": 0}, "page_indices has address 0"),
        ({"tensors": (256, 0)}, "param tensor 1 has address 0"),
        ({"out": 0}, "out has address 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call.plan_launches(**(values | wrong))


@needs_nvcc
@needs_no_driver
def test_a_failed_launch_names_kernel_grid_and_artifact(merge_module: _C.Module) -> None:
    call = call_of(merge_module)
    with pytest.raises(LaunchError, match=r"fajit_merge_states_kernel with grid \(2, 1, 1\)") as e:
        call.launch(1, 1, 1, 64, 128, 1.0, 1, (256, 512), page_indices=8, device_block=1024)
    assert merge_module.path in str(e.value) and "cuda" in str(e.value)
    with pytest.raises(LaunchError, match="cannot be loaded on device 0"):
        merge_module.load(0)


def test_cpu_artifacts_have_no_launches_to_plan() -> None:
    q = torch.randn(1, 1, 2, 16)
    fa.attention(q, q, q)
    module = next(m for m in default._modules.values() if not m.is_cuda)
    with pytest.raises(ValueError, match="of no CUDA target"):
        call_of(module).plan_launches(1, 1, 1, 64, 128, 1.0, 1, (256, 512), page_indices=8)


def test_pages_are_checked_when_a_problem_is_made() -> None:
    def problem(**change: Any) -> _C.Problem:
        options: dict[str, Any] = {
            "num_requests": 2, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "head_dim_v": 8,
            "q_len": 1, "kv_len": (16, 0), "page_indptr": (0, 2, 2), "page_size": 8, "num_pages": 4,
        }  # fmt: skip
        return _C.Problem(**(options | change))

    problem()
    for change, message in (
        ({"kv_len": (17, 0)}, r"kv_len\[0\]=17 is longer than its 2 pages of 8 slots"),
        ({"kv_len": (16, 1)}, r"kv_len\[1\]=1 is longer than its 0 pages"),
        ({"page_indptr": (0, 2, 1)}, "page_indptr must not descend; request 1"),
        ({"page_indptr": (-1, 2, 2)}, "page_indptr"),
        ({"page_indptr": (0, 2)}, r"num_requests \+ 1=3 entries, got 2"),
        ({"page_size": 0}, "page_size=0 must be positive"),
        ({"q_row0": (0, 1), "row_request": (0, 2)}, "request 2 of num_requests=2"),
    ):
        with pytest.raises(ValueError, match=message):
            problem(**change)


def test_replacing_a_spec_keeps_utilities_apart() -> None:
    spec = UtilitySpec("append_paged_kv", "sm_80", 16)
    assert spec.document() != replace(spec, unit_bytes=8).document()
    assert spec.document() != replace(spec, target="sm_90").document()


@needs_nvcc
def test_work_is_planned_for_the_blocks_that_a_device_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(1, 2, 1, 64).bfloat16()
    fa.attention(q, q, q, target="emulated:sm_90")
    plan = list(_device._plans.values())[-1]
    assert plan.spec is not None
    module = default.find(plan.spec.document())
    assert module is not None
    registers = _device._registers(module)
    assert registers is not None and 32 <= registers <= 255
    assert _device.workers(plan.spec, CPU, module) == _device.EMULATED_SLOTS
    h200 = named_hardware("H200")
    monkeypatch.setattr(_device, "_hardware", lambda index: h200)
    expected = slots(plan.spec, h200, registers).total
    assert _device.workers(plan.spec, CUDA0, module) == expected >= 132
    gone: Any = SimpleNamespace(path="/nowhere/artifact.so")
    assert _device._registers(gone) is None
    assert _device.workers(plan.spec, CUDA0, gone) == slots(plan.spec, h200).total
