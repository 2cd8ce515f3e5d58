"""Tensor maps of launches: encoded by the driver, here a stand-in, or left to the emulator."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flashattn_jit import _C, env
from flashattn_jit.errors import LaunchError
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.compilation.toolchain import find_compiler
from tests.harness.stand_in_driver import StandIn, compile_stand_in
from tests.planner.batch_plans import Ragged, lengths

SOURCE = Path(__file__).parents[1] / "harness" / "mapped_artifact.cpp"
KERNEL = "mapped_kernel"
HEAD_DIM, KV_ROWS, KV_REQUESTS, ROW = 64, 70, 3, 96
VALUES = {"q": 4096, "k": 8192, "v": 12288, "out": 64, "lse": 0, "scale": 1.0, "num_threads": 1,
          "device_block": 1024}  # fmt: skip
BASES = (4096, 8192, 12288)
OFFSETS = (64, 256, 384)
"""Of the maps in the parameter."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Compiles the artifact with a change of its launch; returns its path."""
    compiler = find_compiler()
    assert compiler is not None

    def compile_with(change: str) -> str:
        library = tmp_path_factory.mktemp("mapped") / "artifact.so"
        subprocess.run(
            [*compiler.command, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror",
             f"-DCHANGE={change}", f"-I{env.include_dir()}", "-o", str(library), str(SOURCE)],
            check=True,
        )  # fmt: skip
        return str(library)

    return compile_with


@pytest.fixture(scope="module")
def artifact(build: Callable[[str], str]) -> str:
    return build("")


def call_of(module: _C.Module) -> _C.BatchCall:
    """A call that launches the kernel once."""
    work = struct.pack("8i", 0, 0, 1, 0, 3, 0, 5, -1)
    core = _C.BatchCall(
        _C.BatchPlan.of_work(work), lengths((3,), Ragged([5]), (-1,)), (module, None),
        num_q_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, head_dim_v=HEAD_DIM,
    )  # fmt: skip
    rows = (0, 0, ROW)
    return core.bind(strides=(rows,) * 5, kv_requests=KV_REQUESTS, kv_rows=KV_ROWS)


def described(path: str) -> bytes:
    """The parameter of the launch as the emulator gets it."""
    ((_, (_, _, _, _, params, _)),) = call_of(_C.Module(path)).plan_launches(**VALUES)
    return params


def launch(path: str) -> None:
    call_of(_C.Module(path)).launch(**VALUES, stream=9, device=1)


def test_the_emulator_gets_descriptions(artifact: str) -> None:
    params = described(artifact)
    for base, offset in zip(BASES, OFFSETS, strict=True):
        found = struct.unpack_from("=8sQ4Q5I5H4B46s", params, offset)
        assert found == (
            b"fajitmap", base, 2 * ROW, 2 * ROW * KV_ROWS, 0, 0, HEAD_DIM, KV_ROWS, KV_REQUESTS,
            0, 0, 64, 128, 1, 0, 0, 3, 9, 3, 2, bytes(46),
        )  # fmt: skip


def test_a_device_gets_encoded_maps_and_all_other_bytes(artifact: str, driver: StandIn) -> None:
    expected = bytearray(described(artifact))
    driver.records_params(len(expected))
    try:
        launch(artifact)
    finally:
        driver.records_params(0)
    for base, offset in zip(BASES, OFFSETS, strict=True):
        expected[offset : offset + 128] = struct.pack("=8sQ", b"encoded!", base) + b"\xee" * 112
    *encoded, launched = driver.calls("cuTensorMapEncodeTiled", "cuLaunchKernelEx")
    assert launched.split()[-1] == expected.hex()
    assert encoded == [
        f"cuTensorMapEncodeTiled 9 {base} 64,70,3 192,13440 64,128,1 1,1,1 0 3 2 0"
        for base in BASES
    ]


def test_every_launch_encodes_its_own_tensors(artifact: str, driver: StandIn) -> None:
    call = call_of(_C.Module(artifact))
    for base in (16, 32):
        call.launch(**(VALUES | {"k": base}), stream=9, device=1)
    bases = [int(line.split()[2]) for line in driver.calls("cuTensorMapEncodeTiled")]
    assert bases == [4096, 16, 12288, 4096, 32, 12288]


def test_a_launch_may_have_fewer_maps(build: Callable[[str], str], driver: StandIn) -> None:
    none, one = build("l.num_tensor_maps = 0"), build("l.num_tensor_maps = 1, m.q.rank = 1")
    launch(none)
    assert driver.calls("cuTensorMapEncodeTiled") == []
    launch(one)
    assert driver.calls("cuTensorMapEncodeTiled") == [
        "cuTensorMapEncodeTiled 9 4096 64 - 64 1 0 3 2 0"
    ]


def test_a_failed_encoding_names_the_kernel_and_the_map(artifact: str, driver: StandIn) -> None:
    driver.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(LaunchError, match=rf"^{KERNEL} with grid \(1, 1, 1\)") as error:
        launch(artifact)
    words = (
        "cuTensorMapEncodeTiled of tensor map 0 of mapped_kernel (sizes 64 x 70 x 3, strides in "
        "bytes 192 x 13440, box 64 x 128 x 1): the words of an error (CUDA_ERROR_INVALID_VALUE)"
    )
    assert words in str(error.value) and artifact in str(error.value)
    assert driver.calls("cuLaunchKernelEx") == [] and driver.state() == (-1, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("m.v.rank = 7", r"tensor map 2 .*\(sizes 64 x 70 x 3 x 0 x 0, strides in"),
        ("m.k.strides[1] = 24", r"tensor map 1 of mapped_kernel .*strides in bytes 192 x 24, box"),
        ("m.k.magic = 0", "tensor map 1 of mapped_kernel is not described at byte 256 of its pa"),
        ("l.tensor_maps[2] += 8", "tensor map 2 of mapped_kernel is not described at byte 392 of"),
        ("l.tensor_maps[0] = 4096", "tensor map 0 .* is not described at byte 4096 of its param"),
        ("l.num_tensor_maps = 5", "launch of mapped_kernel: 5 tensor maps, at most 4"),
    ],
)
def test_wrong_maps_are_no_launch(
    build: Callable[[str], str], driver: StandIn, change: str, says: str
) -> None:
    with pytest.raises(LaunchError, match=says):
        launch(build(change))
    assert driver.calls("cuLaunchKernelEx") == []


def test_a_driver_that_cannot_encode_launches_kernels_without_maps(
    artifact: str, build: Callable[[str], str], tmp_path: Path
) -> None:
    old = StandIn(compile_stand_in(tmp_path, "-DWITHOUT_TENSOR_MAPS"))
    previous = _C.use_driver(str(old.path))
    try:
        old.supports(11080)
        with pytest.raises(
            LaunchError, match=r"supports CUDA 11\.8 and .* for CUDA 12\.0 or newer \(driver 525\)"
        ):
            launch(artifact)
        assert old.calls("cuLaunchKernelEx") == []
        launch(build("l.num_tensor_maps = 0"))
        assert len(old.calls("cuLaunchKernelEx")) == 1
        assert not _C.driver_encodes_tensor_maps()
    finally:
        _C.use_driver(previous)


def test_whether_the_driver_encodes_is_known_without_a_launch(
    driver: StandIn, tmp_path: Path
) -> None:
    assert _C.driver_encodes_tensor_maps()
    _C.use_driver(str(driver.path))  # opened anew
    driver.fail("cuInit", 999)
    assert not _C.driver_encodes_tensor_maps()
    _C.use_driver(str(tmp_path / "libcuda.so.1"))
    assert not _C.driver_encodes_tensor_maps()


VALUES_OF_THE_TOOLKIT = """
#include <cuda.h>
#include <fajit/tensor_map.h>

// The numbers that fajit/tensor_map.h gives.
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT16 == 6 && CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 == 9);
static_assert(CU_TENSOR_MAP_SWIZZLE_NONE == 0 && CU_TENSOR_MAP_SWIZZLE_32B == 1);
static_assert(CU_TENSOR_MAP_SWIZZLE_64B == 2 && CU_TENSOR_MAP_SWIZZLE_128B == 3);
static_assert(CU_TENSOR_MAP_L2_PROMOTION_NONE == 0 && CU_TENSOR_MAP_L2_PROMOTION_L2_128B == 2);
static_assert(CU_TENSOR_MAP_L2_PROMOTION_L2_256B == 3);
static_assert(sizeof(fajit_tensor_map) == sizeof(CUtensorMap));
"""


def test_the_numbers_of_a_description_are_those_of_the_toolkits_header(tmp_path: Path) -> None:
    toolkit, compiler = find_toolkit(), find_compiler()
    assert toolkit is not None and compiler is not None
    if not (toolkit.home / "include" / "cuda.h").is_file():
        pytest.skip("needs the toolkit's cuda.h")
    text = (env.include_dir() / "fajit" / "tensor_map.h").read_text()
    for words in ("6 fp16, 9 bf16", "0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes",
                  "0 none, 2 128 bytes, 3 256 bytes"):  # fmt: skip
        assert re.search(words, text), "the comparison above is of other numbers"
    source = tmp_path / "compare.cpp"
    source.write_text(VALUES_OF_THE_TOOLKIT)
    run = subprocess.run(
        [*compiler.command, "-std=c++17", "-fsyntax-only", f"-I{toolkit.home}/include",
         f"-I{env.include_dir()}", str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
