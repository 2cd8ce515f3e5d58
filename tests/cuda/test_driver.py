"""Kernels are loaded and launched through the driver, here a stand-in that records the calls."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import UtilitySpec
from flashattn_jit.codegen.targets import CUDA_TARGETS, sm_version
from flashattn_jit.errors import LaunchError
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.compilation.toolchain import find_compiler
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.device import plan_memory
from flashattn_jit.ops.device.cuda import DeviceBlock, LaunchTensors, launch_values
from flashattn_jit.ops.device.emulated import Recording
from flashattn_jit.planner.tiles import build_request
from tests.cuda.kernels import compiled, spec_of
from tests.harness.stand_in_driver import StandIn, compile_stand_in
from tests.planner.batch_plans import Paged, lengths

MERGE = "fajit_merge_states_kernel"
LOADED = [
    "cuThreadExchangeStreamCaptureMode 2",
    "cuDeviceGet 1",
    "cuDevicePrimaryCtxRetain 1",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2 1",
    "cuModuleLoadData on 1",
    f"cuModuleGetFunction {MERGE}",
    f"cuOccupancyMaxActiveBlocksPerMultiprocessor {MERGE} 128 0",
    "cuCtxPopCurrent_v2 on 1",
    "cuThreadExchangeStreamCaptureMode 0",
]
"""The calls of a first load on device 1, in a thread without a context."""


@pytest.fixture(scope="module")
def artifact() -> str:
    """The path of a real artifact, of the utility that merges states."""
    return load_stepping([build_request(UtilitySpec("merge_states", "sm_80"))])[1].path


@pytest.fixture
def module(artifact: str, driver: StandIn) -> _C.Module:
    """The artifact, loaded on no device."""
    return _C.Module(artifact)


VALUES = {"q": 1, "k": 1, "v": 1, "out": 64, "lse": 128, "scale": 1.0, "num_threads": 1,
          "tensors": (256, 512, 0), "scalars": (0,), "page_indices": 8,
          "device_block": 1024}  # fmt: skip


def call_of(module: _C.Module) -> _C.BatchCall:
    """A call that launches the kernel once: merges two states of 5 rows."""
    work = struct.pack("8i", 0, 0, 1, 0, 3, 0, 5, -1)
    core = _C.BatchCall(
        _C.BatchPlan.of_work(work), lengths((3,), Paged((5,), 7), (-1,)), (module, None),
        num_q_heads=1, num_kv_heads=1, head_dim=2, head_dim_v=2,
    )  # fmt: skip
    none = (0, 0, 0)
    return core.bind(
        strides=(none, none, none, (0, 0, 2), (0, 0, 1)), num_pages=9, flags=_C.WRITE_LSE,
        layouts=(((1, 1, 5, 2), (10, 10, 2, 1)), ((1, 1, 5), (5, 5, 1)), (none, (0, 0, 1))),
        scalar_kinds="i",
    )  # fmt: skip


def launch(module: _C.Module, stream: int = 9, device: int = 1) -> None:
    call_of(module).launch(**VALUES, stream=stream, device=device)


def test_a_kernel_is_loaded_once_into_the_primary_context_of_its_device(
    module: _C.Module, driver: StandIn
) -> None:
    module.load(1)
    assert driver.calls() == ["cuInit 0", "cuDriverGetVersion", *LOADED]
    module.load(1)
    assert driver.calls() == []
    module.load(3)
    again = [call.replace("1", "3") for call in LOADED if not call.startswith("cuOcc")]
    assert [call for call in driver.calls() if not call.startswith("cuOcc")] == again
    assert driver.state() == (-1, 0, 0)


def test_every_module_of_a_device_has_the_one_context(artifact: str, driver: StandIn) -> None:
    for module in (_C.Module(artifact), _C.Module(artifact)):
        module.load(2)
        launch(module, device=2)
    assert driver.calls("cuInit", "cuDevicePrimaryCtxRetain") == [
        "cuInit 0",
        "cuDevicePrimaryCtxRetain 2",
    ]


def test_a_launch_passes_the_planned_grid_and_parameters(
    module: _C.Module, driver: StandIn
) -> None:
    ((_, (kernel, grid, block, shared_bytes, params, _)),) = call_of(module).plan_launches(**VALUES)
    driver.records_params(len(params))
    module.load(1)
    driver.calls()
    launch(module)
    numbers = " ".join(map(str, (*grid, *block, shared_bytes, 9)))
    assert driver.calls() == [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2 1",
        f"cuLaunchKernelEx {kernel} on 1 {numbers} {params.hex()}",
        "cuCtxPopCurrent_v2 on 1",
    ]
    driver.records_params(0)


@pytest.mark.parametrize("current", [-1, 0, 1])
def test_a_thread_keeps_the_context_that_it_had_or_its_lack_of_one(
    module: _C.Module, driver: StandIn, current: int
) -> None:
    if current >= 0:
        driver.set_device(current)
    before = driver.state()
    module.load(1)
    launch(module)
    driver.fail("cuLaunchKernelEx", 1)
    with pytest.raises(LaunchError):
        launch(module)
    assert driver.state() == before
    calls = driver.calls("cuCtxPushCurrent_v2", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    assert not any(call.endswith(" 0") for call in calls), "device 0 has nothing to do with it"
    assert len(calls) == (2 if current == 1 else 5), "the current context is not pushed again"


def test_shared_memory_beyond_48_kib_is_asked_for(driver: StandIn) -> None:
    kernel = compiled(spec_of("plain", "sm_80", "prefill"))
    module = _C.Module(str(kernel.folder / "artifact.so"))
    shown = json.loads(module.description)["kernels"]
    shared = {name: values["shared_bytes"] for name, values in shown.items()}
    assert shared["fajit_attention_kernel"] > 48 * 1024 > shared["fajit_merge_kernel"]
    driver.holds(2)
    module.load(0)
    assert driver.calls("cuFuncSetAttribute") == [
        f"cuFuncSetAttribute fajit_attention_kernel 8 {shared['fajit_attention_kernel']}"
    ]
    assert module.residency(0) == [
        (name, values["min_blocks"], 2) for name, values in shown.items()
    ]
    assert module.residency(1) == []


def test_a_probe_leaves_nothing_loaded(module: _C.Module, driver: StandIn) -> None:
    driver.holds(3)
    for failing in ("", "cuModuleGetFunction"):
        driver.fail("cuModuleGetFunction", 500 if failing else 0)
        if failing:
            with pytest.raises(LaunchError, match=f"{failing} of {MERGE}"):
                module.probe(1)
        else:
            assert module.probe(1) == [(MERGE, 1, 3)]
        calls = driver.calls("cuModuleLoadData", "cuModuleUnload")
        assert calls == ["cuModuleLoadData on 1", "cuModuleUnload on 1"]
        assert module.residency(1) == [] and driver.state() == (-1, 0, 0)
    driver.fail("cuModuleGetFunction", 0)
    launch(module)  # loads the kernels itself
    driver.calls()
    assert module.probe(1) == module.residency(1) == [(MERGE, 1, 3)]
    assert driver.calls() == [], "of loaded kernels no question is asked"


def test_an_artifact_of_attention_needs_libc_alone() -> None:
    for kind in ("prefill", "few_row"):
        artifact = compiled(spec_of("plain", "sm_80", kind)).folder / "artifact.so"
        shown = subprocess.run(
            ["readelf", "-ld", "--wide", str(artifact)], check=True, capture_output=True, text=True
        ).stdout
        assert re.findall(r"\(NEEDED\).*\[(.*)\]", shown) == ["libc.so.6"]
        assert " TLS " not in shown


FAILURES = {
    "cuDeviceGet": "cuDeviceGet of device 1",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRetain of device 1",
    "cuCtxGetCurrent": f"cuCtxGetCurrent of {MERGE}",
    "cuCtxPushCurrent_v2": f"cuCtxPushCurrent of {MERGE}",
    "cuModuleLoadData": f"cuModuleLoadData of {MERGE}",
    "cuModuleGetFunction": f"cuModuleGetFunction of {MERGE}",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor":
        f"cuOccupancyMaxActiveBlocksPerMultiprocessor of {MERGE}",
    "cuThreadExchangeStreamCaptureMode": "cuThreadExchangeStreamCaptureMode of this thread",
    "cuInit": "cuInit of ",
    "cuDriverGetVersion": "cuDriverGetVersion of ",
}  # fmt: skip


@pytest.mark.parametrize("function", FAILURES)
def test_a_failed_load_names_the_call_and_can_be_repeated(
    module: _C.Module, driver: StandIn, function: str
) -> None:
    driver.fail(function, 209)
    with pytest.raises(LaunchError, match=r"cannot be loaded on device 1: ") as error:
        module.load(1)
    for part in (module.path, FAILURES[function], "the words of an error",
                 "(CUDA_ERROR_NO_BINARY_FOR_GPU)"):  # fmt: skip
        assert part in str(error.value)
    assert driver.state() == (-1, 0, 0)
    assert module.residency(1) == []
    calls = driver.calls("cuModuleLoadData", "cuModuleUnload")
    late = function in ("cuModuleGetFunction", "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    loaded = ["cuModuleLoadData on 1"] if function == "cuModuleLoadData" or late else []
    assert calls == loaded + (["cuModuleUnload on 1"] if late else [])
    driver.fail(function, 0)
    module.load(1)
    launch(module)
    assert module.residency(1) == [(MERGE, 1, 1)]


def test_a_failed_launch_names_the_call_kernel_grid_and_artifact(
    module: _C.Module, driver: StandIn
) -> None:
    driver.fail("cuLaunchKernelEx", 4242)
    with pytest.raises(LaunchError, match=rf"^{MERGE} with grid \(2, 1, 1\)") as error:
        launch(module)
    words = f"device 1: cuLaunchKernelEx of {MERGE}: unknown error (error 4242)"
    assert words in str(error.value) and module.path in str(error.value)


def test_an_unknown_device_is_named(module: _C.Module) -> None:
    with pytest.raises(LaunchError, match=r"cuDeviceGet of device 7: .*INVALID_DEVICE"):
        module.load(7)


def test_threads_that_load_one_kernel_load_it_once(module: _C.Module, driver: StandIn) -> None:
    together = threading.Barrier(8)
    states: list[tuple[int, int, int]] = []

    def work() -> None:
        together.wait()
        module.load(1)
        launch(module)
        states.append(driver.state())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [(-1, 0, 0)] * 8
    calls = driver.calls("cuModuleLoadData", "cuLaunchKernelEx", "cuDevicePrimaryCtxRetain")
    assert sorted(call.split()[0] for call in calls) == [
        "cuDevicePrimaryCtxRetain", *["cuLaunchKernelEx"] * 8, "cuModuleLoadData",
    ]  # fmt: skip


def test_nothing_is_loaded_under_a_capture(module: _C.Module, driver: StandIn) -> None:
    driver.captures(stream=9)
    with pytest.raises(LaunchError, match="while a CUDA graph is captured; make the same call"):
        launch(module)
    assert driver.calls("cuModuleLoadData", "cuLaunchKernelEx") == []
    launch(module, stream=0)  # the default stream is never captured
    assert driver.calls("cuStreamIsCapturing") == []
    launch(module)  # loaded before: it is captured
    assert len(driver.calls("cuLaunchKernelEx")) == 1


def attention_launches(
    target: str, driver: StandIn, monkeypatch: pytest.MonkeyPatch, device: int = 1
) -> list[tuple[str, bool]]:
    """Each kernel of a call, and whether its launch may overlap the one before it.

    The call has rows for both kinds of tiles and split keys; its stream is being captured.
    """
    dtype = torch.float16 if target == "sm_75" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 64, generator=generator).to(dtype)
        for n, heads in ((21, 4), (1520, 1), (1520, 1))
    )
    rows, keys = torch.tensor([0, 1, 21]), torch.tensor([0, 1500, 1520])

    def enqueued(block: DeviceBlock, call: _C.BatchCall, t: LaunchTensors, scale: float) -> Any:
        values = launch_values(block.memory, t, scale)
        for module, _ in call.plan_launches(*values):
            module.load(device)
        driver.captures(stream=9)
        driver.calls()
        call.launch(*values, stream=9, device=device)
        return Recording((), ())

    monkeypatch.setattr(plan_memory, "record", enqueued)
    fa.varlen_attention(q, k, v, rows, keys, fa.Causal(), target=f"emulated:{target}")
    found = []
    for line in driver.calls("cuLaunchKernelEx", "cuStreamIsCapturing"):
        function, name, *words = line.split()
        attributes = words[words.index("attribute") :] if "attribute" in words else []
        assert function == "cuLaunchKernelEx" and attributes in ([], ["attribute", "6", "1"])
        found.append((name, attributes != []))
    return found


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_the_merge_alone_may_overlap_attention_where_it_can_wait(
    target: str, driver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention_launches(target, driver, monkeypatch) == [
        ("fajit_attention_kernel", False),
        ("fajit_attention_kernel", False),
        ("fajit_merge_kernel", sm_version(target) >= 90),
    ]


# A device each, since loaded kernels stay with the driver that loaded them.
@pytest.mark.parametrize(("version", "device"), [(12000, 0), (12020, 2), (12030, 3)])
def test_drivers_whose_graphs_have_no_programmatic_edges_launch_in_order(
    version: int, device: int, driver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.supports(version)
    launches = attention_launches("sm_90", driver, monkeypatch, device)
    assert launches[-1] == ("fajit_merge_kernel", version >= 12030)


def test_a_load_spares_the_captures_of_other_threads(module: _C.Module, driver: StandIn) -> None:
    driver.captures(elsewhere=True)
    module.load(1)
    assert driver.state() == (-1, 0, 0), "the thread's own mode is as before"


def test_the_capture_mode_is_exchanged(driver: StandIn) -> None:
    assert _C.exchange_capture_mode(_C.RELAXED_CAPTURES) == 0
    assert driver.state() == (-1, 0, 2)
    assert _C.exchange_capture_mode(0) == _C.RELAXED_CAPTURES


def test_without_a_driver_launches_are_data_and_loading_says_why(
    artifact: str, driver: StandIn, tmp_path: Path
) -> None:
    module = _C.Module(artifact)
    absent = str(tmp_path / "libcuda.so.1")
    assert _C.use_driver(absent) == str(driver.path)
    assert len(call_of(module).plan_launches(**VALUES)) == 1
    for attempt in (lambda: module.load(0), lambda: launch(module)):
        with pytest.raises(LaunchError, match=f"there is no CUDA driver: {absent}: cannot open"):
            attempt()
    assert _C.use_driver(str(driver.path)) == absent
    module.load(0)


def test_the_version_is_asked_without_initialising_the_driver(
    driver: StandIn, tmp_path: Path
) -> None:
    driver.supports(12040)
    assert _C.driver_version() == 12040
    assert driver.calls() == ["cuDriverGetVersion"]
    driver.fail("cuDriverGetVersion", 34)  # a library of stubs
    assert _C.driver_version() == 0
    _C.use_driver(str(tmp_path / "libcuda.so.1"))
    assert _C.driver_version() == 0


def test_a_driver_without_a_function_is_too_old(artifact: str, tmp_path: Path) -> None:
    library = compile_stand_in(tmp_path, "-DWITHOUT_ERROR_STRINGS")
    previous = _C.use_driver(str(library))
    try:
        with pytest.raises(LaunchError, match="has no cuGetErrorString: update the driver"):
            _C.Module(artifact).load(0)
    finally:
        _C.use_driver(previous)


COMPARISON = """
#include <cuda.h>
#include "device/driver.h"

constexpr bool equal(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

// Whether arguments of type A and B are passed alike: pointers, or integers of one size.
template <class A, class B> constexpr bool alike =
    std::is_pointer_v<A> == std::is_pointer_v<B> && sizeof(A) == sizeof(B) &&
    (std::is_pointer_v<A> || ((std::is_integral_v<A> || std::is_enum_v<A>) &&
                              (std::is_integral_v<B> || std::is_enum_v<B>)));
template <class A, class B> struct Alike : std::false_type {};
template <class R, class S, class... A, class... B>
struct Alike<R(A...), S(B...)>
    : std::bool_constant<alike<R, S> && sizeof...(A) == sizeof...(B) && (alike<A, B> && ...)> {};

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define CHECK(member, symbol, parameters)                                              \\
  static_assert(equal(#symbol, TEXT(symbol)), #symbol " has a later version");         \\
  static_assert(Alike<decltype(::symbol), fajit::runtime::cu::symbol##_type>::value, #symbol);
FAJIT_DRIVER_FUNCTIONS(CHECK)
FAJIT_NEWER_DRIVER_FUNCTIONS(CHECK)
namespace cu = fajit::runtime::cu;
static_assert(cu::kSuccess == CUDA_SUCCESS);
static_assert(cu::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(cu::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cu::kCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cu::kProgrammaticSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(cu::kNoInterleave == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(cu::kFillZeros == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(sizeof(cu::TensorMap) == sizeof(CUtensorMap), "TensorMap");
static_assert(alignof(cu::TensorMap) >= alignof(CUtensorMap), "TensorMap");

#define SAME_PLACE(ours, member, theirs, other)                                        \\
  static_assert(offsetof(ours, member) == offsetof(theirs, other) &&                   \\
                sizeof(ours::member) == sizeof(decltype(theirs::other)), #ours "::" #member)
using cu::LaunchAttribute, cu::LaunchConfig;
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute), "LaunchAttribute");
static_assert(alignof(LaunchAttribute) == alignof(CUlaunchAttribute), "LaunchAttribute");
SAME_PLACE(LaunchAttribute, id, CUlaunchAttribute, id);
SAME_PLACE(LaunchAttribute, value, CUlaunchAttribute,
           value.programmaticStreamSerializationAllowed);
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig), "LaunchConfig");
static_assert(offsetof(LaunchConfig, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
SAME_PLACE(LaunchConfig, dynamic_shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_PLACE(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_PLACE(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
"""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text, ""),
        (lambda text: text.replace("cuCtxPushCurrent_v2", "cuCtxPushCurrent"), "a later version"),
        (lambda text: text.replace("int attribute, int value", "int value"), "cuFuncSetAttribute"),
        (lambda text: text.replace("unsigned flags", "size_t flags"), "cuInit"),
        (lambda text: text.replace("unsigned grid[3]", "size_t grid[3]"), "LaunchConfig"),
        (lambda text: text.replace("char rest[60]", "char rest[64]"), "LaunchAttribute"),
        (lambda text: text.replace("int promotion, int fill", "int promotion"), "cuTensorMapEnc"),
        (lambda text: text.replace("words[16]", "words[17]"), "TensorMap"),
    ],
    ids=[
        "as it is",
        "an old version",
        "a parameter less",
        "a wider parameter",
        "a wider field",
        "a larger structure",
        "a parameter less of a newer function",
        "a larger map",
    ],
)
def test_the_declarations_are_those_of_the_toolkits_header(
    tmp_path: Path, change: Callable[[str], str], fault: str
) -> None:
    toolkit, compiler = find_toolkit(), find_compiler()
    assert toolkit is not None and compiler is not None
    if not (toolkit.home / "include" / "cuda.h").is_file():
        pytest.skip("needs the toolkit's cuda.h")
    header = env.include_dir().parent / "runtime" / "device" / "driver.h"
    changed = tmp_path / "device" / "driver.h"
    changed.parent.mkdir()
    changed.write_text(change(header.read_text()))
    source = tmp_path / "compare.cpp"
    source.write_text(COMPARISON)
    run = subprocess.run(
        [*compiler.command, "-std=c++17", "-fsyntax-only", f"-I{tmp_path}",
         f"-I{toolkit.home}/include", str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not fault:
        assert run.returncode == 0, run.stderr
        return
    assert run.returncode != 0 and fault in run.stderr
