"""Each check of the emulator: a kernel that violates it, and the fault's message."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import EmulatorError, EmulatorFault
from flashattn_jit.jit.emulator import programs
from tests.emulator.harness import compile_cuda, kernel, launch
from tests.harness.toolkit import needs_nvcc

PREAMBLE = """
mov.u32 %r1, %tid.x; mov.u32 %r2, buffer; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
mul.wide.u32 %w1, %r1, 4; add.u64 %w2, %a0, %w1;
shl.b32 %r5, %r1, 4; add.u32 %r6, %r2, %r5; mul.wide.u32 %w3, %r1, 16; add.u64 %w4, %a0, %w3;
setp.eq.u32 %p0, %r1, 0; setp.lt.u32 %p1, %r1, 32;
"""
COPY = "cp.async.cg.shared.global [%r6], [%w4], 16; cp.async.commit_group;"


def fault(
    lines: str, *, threads: int = 64, words: int = 512, shared: int = 2048, **options: Any
) -> EmulatorFault:
    data = np.zeros(words, np.uint32)
    with pytest.raises(EmulatorFault) as caught:
        launch(kernel(PREAMBLE + lines, 1, shared=shared), [data], block=(threads, 1, 1), **options)
    return caught.value


def clean(lines: str, *, threads: int = 64, words: int = 512, **options: Any) -> np.ndarray:
    data = np.zeros(words, np.uint32)
    launch(kernel(PREAMBLE + lines, 1, shared=2048), [data], block=(threads, 1, 1), **options)
    return data


# Addresses


def test_global_bounds() -> None:
    error = fault("st.global.u32 [%w2], %r1;", words=40)
    assert (error.kind, error.thread, error.kernel) == ("out of bounds", 40, "k")
    assert "a write of 4 bytes in no allocation" in str(error)
    assert "array0 (160 bytes) + 160 bytes" in str(error)
    error = fault("ld.global.u32 %r9, [%w2+-4];", words=64)
    assert (error.kind, error.thread) == ("out of bounds", 0)
    assert "array0 (256 bytes) -4 bytes" in str(error)


def test_an_access_may_not_straddle_the_end() -> None:
    assert fault("ld.global.v4.u32 {%r9,%r10,%r11,%r12}, [%w4];", words=62).thread == 15


def test_alignment() -> None:
    error = fault("ld.global.u64 %w9, [%w2];")
    assert (error.kind, error.thread) == ("misaligned", 1)
    assert fault("st.shared.v2.u32 [%r4], {%r1, %r1};").kind == "misaligned"


def test_read_only_memory() -> None:
    assert fault("st.global.u32 [%w2], %r1;", read_only=[0]).kind == "read-only"


def test_unwritten_global_memory() -> None:
    error = fault("ld.global.u32 %r9, [%w2];", unwritten=[0])
    assert error.kind == "uninitialised"
    clean("st.global.u32 [%w2], %r1; ld.global.u32 %r9, [%w2];", unwritten=[0])


def test_shared_bounds() -> None:
    error = fault("st.shared.u32 [%r4], %r1;", shared=128)
    assert (error.kind, error.thread) == ("out of bounds", 32)
    assert "shared buffer + 128 bytes" in str(error)
    error = fault("mov.u32 %r9, 0; st.shared.u32 [%r9], %r1;")
    assert error.kind == "out of bounds"


def test_parameters_and_local_memory() -> None:
    assert fault("ld.param.u64 %w9, [p0+8];").kind == "out of bounds"
    local = ".local .align 4 .b8 own[8]; mov.u64 %w9, own; st.local.u32 [%w9+8], %r1;"
    assert fault(local).kind == "out of bounds"


# Shared memory


def test_unwritten_shared_memory() -> None:
    assert fault("ld.shared.u32 %r9, [%r4];").kind == "uninitialised"
    clean("ld.shared.u32 %r9, [%r4];", uninitialised=False)
    # Shared memory is unwritten at the start of each block.
    once = "mov.u32 %r9, %ctaid.x; setp.eq.u32 %p2, %r9, 0; @%p2 st.shared.u32 [%r4], %r1;"
    error = fault(once + "ld.shared.u32 %r9, [%r4];", grid=(2, 1, 1), num_threads=1)
    assert (error.kind, error.block) == ("uninitialised", (1, 0, 0))


WRITE = "st.shared.u32 [%r4], %r1;"
READ_OTHER_WARP = "xor.b32 %r9, %r4, 128; ld.shared.u32 %r10, [%r9];"
READ_OTHER_LANE = "xor.b32 %r9, %r4, 4; ld.shared.u32 %r10, [%r9];"


def test_races_between_warps() -> None:
    error = fault("@%p1 " + WRITE + "@!%p1 ld.shared.u32 %r10, [%r4+-128];")
    assert error.kind == "race"
    assert "a read with no barrier since the write by thread" in str(error)
    clean(WRITE + "bar.sync 0;" + READ_OTHER_WARP)
    # A barrier between the two, but none before the next write.
    error = fault(WRITE + "bar.sync 0;" + READ_OTHER_WARP + WRITE)
    assert error.kind == "race" and "with no barrier since the" in str(error)
    error = fault("st.shared.u32 [%r2], %r1;", threads=33)
    assert error.kind == "race" and "since the write" in str(error)
    # A barrier of the reader's warp does not order other warps.
    error = fault(WRITE + "bar.warp.sync -1;" + READ_OTHER_WARP, uninitialised=False)
    assert error.kind == "race"


def test_races_between_lanes() -> None:
    error = fault(WRITE + READ_OTHER_LANE)
    assert "no __syncwarp since the write by thread" in str(error)
    clean(WRITE + "bar.warp.sync -1;" + READ_OTHER_LANE)
    clean(WRITE + "bar.sync 0;" + READ_OTHER_LANE + "bar.warp.sync -1;" + WRITE)
    assert fault(WRITE + "bar.sync 0;" + READ_OTHER_LANE + WRITE).kind == "race"
    # Shuffles and votes order nothing; a part of the warp orders its own lanes.
    assert fault(WRITE + "vote.sync.ballot.b32 %r11, %p0, -1;" + READ_OTHER_LANE).kind == "race"
    pairs = "and.b32 %r11, %r1, 30; and.b32 %r11, %r11, 31; mov.u32 %r12, 3; "
    pairs += "shl.b32 %r12, %r12, %r11; bar.warp.sync %r12;"
    clean(WRITE + pairs + READ_OTHER_LANE)
    other_pair = READ_OTHER_LANE.replace("%r4, 4", "%r4, 8")
    assert fault(WRITE + pairs + other_pair).kind == "race"


def test_neighbouring_bytes_are_no_race() -> None:
    halves = "mov.u32 %r9, %r1; shl.b32 %r9, %r9, 1; add.u32 %r9, %r9, %r2; mov.u16 %h1, 3;"
    clean(halves + "st.shared.u16 [%r9], %h1; ld.shared.u16 %h2, [%r9]; st.shared.u16 [%r9], %h2;")


def test_ldmatrix_reads_for_the_whole_warp() -> None:
    fill = "mov.u32 %r9, 0; st.shared.v4.u32 [%r6], {%r9, %r9, %r9, %r9};"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];"
    assert fault(fill + load).kind == "race"
    clean(fill + "bar.warp.sync -1;" + load)


def test_atomics_do_not_race_with_each_other() -> None:
    zero = "@%p0 st.shared.u32 [%r2], %r1; bar.sync 0;"
    add = "atom.shared.add.u32 %r9, [%r2], 1;"
    clean(zero + add + add)
    assert fault(zero + add + "ld.shared.u32 %r9, [%r2];").kind == "race"


def test_named_barriers_order_those_who_come() -> None:
    """Warp 0 writes and arrives; warp 1 waits and reads; warp 2 takes no part in the barrier."""
    lines = """
    @%p1 st.shared.u32 [%r4], %r1;
    @%p1 bar.arrive 1, 64;
    @%p1 bra DONE;
    setp.ge.u32 %p2, %r1, 64; @%p2 bra THIRD;
    bar.sync 1, 64; ld.shared.u32 %r9, [%r4+-128]; bra DONE;
    THIRD: {third}
    DONE:
    """
    clean(lines.format(third=""), threads=96)
    error = fault(lines.format(third="ld.shared.u32 %r9, [%r4+-256];"), threads=96)
    assert (error.kind, error.thread) == ("race", 64)


# Asynchronous copies


@pytest.mark.parametrize("moment", ["late", "early", 1, 2])
def test_copies_are_in_flight_until_waited_for(moment: Any) -> None:
    read = "ld.shared.u32 %r9, [%r6];"
    error = fault(COPY + read, async_copies=moment)
    assert error.kind == "in flight" and "a wait is missing" in str(error)
    clean(COPY + "cp.async.wait_group 0;" + read, async_copies=moment)
    assert fault(COPY + "cp.async.wait_group 1;" + read, async_copies=moment).kind == "in flight"
    # A copy that was never committed belongs to no group that wait_group sees.
    open_copy = COPY.replace("cp.async.commit_group;", "") + "cp.async.wait_group 0;"
    assert fault(open_copy + read, async_copies=moment).kind == "in flight"
    assert fault(COPY + "st.shared.u32 [%r6], %r1;", async_copies=moment).kind == "in flight"


def test_waiting_is_for_the_own_copies() -> None:
    wait = "cp.async.wait_group 0;"
    assert fault(COPY + wait + "xor.b32 %r9, %r6, 16; ld.shared.u32 %r9, [%r9];").kind == "race"
    clean(COPY + wait + "bar.sync 0; xor.b32 %r9, %r6, 512; ld.shared.u32 %r9, [%r9];")
    # A barrier before the wait does not order the copy.
    lines = COPY + "bar.sync 0;" + wait + "xor.b32 %r9, %r6, 512; ld.shared.u32 %r9, [%r9];"
    assert fault(lines).kind in ("race", "in flight")


def test_a_buffer_in_use_may_not_be_copied_into() -> None:
    used = WRITE + "bar.sync 0;" + READ_OTHER_WARP
    assert fault(used + COPY).kind == "race"
    clean(used + "bar.sync 0;" + COPY + "cp.async.wait_all;")


def test_late_and_early_copies_show_in_values() -> None:
    """Without checks, a read before the wait sees old bytes if copies are late."""
    lines = (
        "mov.u32 %r9, 7; st.shared.v4.u32 [%r6], {%r9, %r9, %r9, %r9};" + COPY
        + "ld.shared.u32 %r10, [%r6]; cp.async.wait_all; st.global.u32 [%w2], %r10;"
    )  # fmt: skip
    assert (clean(lines, check_races=False)[:32] == 7).all()
    assert (clean(lines, check_races=False, async_copies="early")[:32] == 0).all()


def test_a_cache_policy_comes_from_createpolicy() -> None:
    make = "createpolicy.fractional.L2::evict_first.b64 %w9, 1.0;"
    hinted = COPY.replace("global", "global.L2::cache_hint").replace("16;", "16, %w9;")
    clean(make + hinted)
    for other in ("", "mov.u64 %w9, 0;", make + "add.u64 %w9, %w9, 1;"):
        error = fault(other + hinted)
        assert error.kind == "cache policy" and "not one of createpolicy" in str(error)
    with pytest.raises(EmulatorError, match="operands"):
        clean(make + hinted.replace(", %w9", ""))
    with pytest.raises(EmulatorError, match="operands"):
        clean(make + COPY.replace("16;", "16, %r9, %w9;"))


def test_copies_are_checked_where_they_are_issued() -> None:
    assert fault(COPY, words=100).kind == "out of bounds"
    assert fault(COPY.replace("[%r6]", "[%r6+4]")).kind == "misaligned"
    none = "mov.u32 %r9, 0;" + COPY.replace("16;", "16, %r9;")
    clean(none, words=4)  # no bytes of the source are touched
    part = "mov.u32 %r9, 20;" + COPY.replace("16;", "16, %r9;")
    assert "the source size 20 exceeds" in str(fault(part))


# Lanes


def test_members_must_come() -> None:
    error = fault("@%p0 bar.warp.sync 3; @!%p0 bar.sync 0;", threads=32)
    assert error.kind == "deadlock"
    error = fault("bar.warp.sync 3;", threads=32)
    assert "not in its own member mask" in str(error)
    different = "selp.u32 %r9, -1, 1, %p0; bar.warp.sync %r9;"
    assert fault(different, threads=32).kind == "member mask"


def test_shuffles_from_lanes_that_do_not_take_part() -> None:
    lines = "setp.lt.u32 %p2, %r1, 4; @%p2 shfl.sync.idx.b32 %r9, %r1, 9, 31, 15;"
    error = fault(lines, threads=32)
    assert error.kind == "shuffle" and "lane 0 reads from lane 9" in str(error)


def test_matrix_instructions_need_all_lanes() -> None:
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r2];"
    error = fault("@%p0 exit;" + load, threads=32)
    assert error.kind == "member mask" and "some have exited" in str(error)
    assert fault(load, threads=16).kind == "member mask"
    assert fault("@%p0 " + load + "bar.sync 0;", threads=32).kind == "deadlock"


# Barriers


def test_divergent_barrier() -> None:
    lines = "@%p0 bra A; bar.sync 0; bra DONE; A: bar.sync 0; DONE:"
    assert fault(lines).kind == "divergent barrier"
    clean(lines.replace("bar.sync", "barrier.sync"))  # without .aligned lanes may come apart


def test_barrier_counts() -> None:
    assert "a count of 40 threads" in str(fault("bar.sync 1, 40;"))
    assert "there is no barrier 16" in str(fault("bar.sync 16;"))
    assert fault("@%p1 bar.sync 1, 32; @!%p1 bar.sync 1, 64;").kind in ("barrier", "deadlock")


def test_deadlock_says_who_waits_where() -> None:
    error = fault("@%p1 bar.sync 0;")
    text = str(error)
    assert error.kind == "deadlock"
    assert "warp 0 lanes 0xffffffff at PTX line" in text
    assert "bar.sync, barrier 0, 32 of 64 threads" in text
    assert "warp 1 lanes 0xffffffff have exited" in text


def test_no_progress() -> None:
    """A loop that waits for memory that no thread writes ends with a fault."""
    spin = "SPIN: ld.volatile.global.u32 %r9, [%a0]; setp.eq.u32 %p2, %r9, 0; @%p2 bra SPIN;"
    error = fault(spin, threads=32, step_limit=1 << 20)
    assert error.kind == "no progress"


# Launches


def test_the_lowest_block_is_reported() -> None:
    lines = "mov.u32 %r9, %ctaid.x; setp.ge.u32 %p2, %r9, 5; @%p2 st.global.u32 [%a0+-4], %r1;"
    for workers in (1, 2, 4):
        assert fault(lines, grid=(40, 1, 1), num_threads=workers).block == (5, 0, 0)


def overlapping(lines: str, overlaps: tuple[str, ...] | None, **options: Any) -> np.ndarray:
    """A launch that may overlap a kernel that writes these arrays: array0 is %a0, array1 %a1."""
    data = [np.full(64, 5, np.uint32), np.full(64, 7, np.uint32)]
    text = kernel(PREAMBLE + "add.u64 %w5, %a1, %w1;" + lines, 2, "sm_90", shared=2048)
    launch(text, data, block=(64, 1, 1), overlaps=overlaps, **options)
    return data[1]


READ, OTHER = "ld.global.u32 %r9, [%w2];", "ld.global.u32 %r10, [%w5];"
STORE, GRID_WAIT = "st.global.u32 [%w5], %r9;", "griddepcontrol.wait;"


def test_overlapping_launches_are_checked_until_they_wait() -> None:
    """Of a kernel before this one that writes array0, and reads anything."""
    before = ("array0",)
    for lines in (GRID_WAIT + READ + STORE, OTHER + GRID_WAIT + READ + STORE):
        assert (overlapping(lines, before) == 5).all()
    for lines, words in (
        (READ + GRID_WAIT + STORE, "the kernel before may still write"),
        (OTHER + "st.global.u32 [%w5], %r10;" + GRID_WAIT, "a write while the kernel before may"),
        ("red.global.add.u32 [%w5], 1;" + GRID_WAIT, "a write while the kernel before may"),
        (COPY + "cp.async.wait_all;" + GRID_WAIT, "the kernel before may still write"),
        (OTHER, "ends without waiting for the kernel before"),
        ("@%p0 exit;" + GRID_WAIT, "ends without waiting for the kernel before"),
        ("@%p1 " + GRID_WAIT + "@!%p1 exit;", "ends without waiting for the kernel before"),
        ("@%p0 " + GRID_WAIT + "bar.sync 0;" + READ, "the kernel before may still write"),
        ("griddepcontrol.launch_dependents;" + READ + GRID_WAIT, "may still write"),
    ):
        with pytest.raises(EmulatorFault, match=words) as caught:
            overlapping(lines, before)
        assert caught.value.kind == "dependency"
    # In order, waiting is allowed and nothing is checked; each block waits for itself.
    assert (overlapping(READ + STORE, None) == 5).all()
    assert (overlapping(READ + GRID_WAIT + STORE, None) == 5).all()
    once = "mov.u32 %r11, %ctaid.x; setp.eq.u32 %p2, %r11, 0; @%p2 " + GRID_WAIT
    with pytest.raises(EmulatorFault, match="ends without waiting") as caught:
        overlapping(once, before, grid=(2, 1, 1), num_threads=1)
    assert caught.value.block == (1, 0, 0)


def test_memory_that_overlaps_what_is_written_is_written() -> None:
    data = np.zeros(64, np.uint32)
    text = kernel(PREAMBLE + READ + GRID_WAIT, 1, "sm_90", shared=2048)
    arrays = [("other", data.ctypes.data, 256, True), ("same", data.ctypes.data, 128, True)]
    run = programs.Program(text).run
    params = struct.pack("<Q", data.ctypes.data)
    run("k", (1, 1, 1), (64, 1, 1), 0, params, arrays, overlaps=("nothing",))
    with pytest.raises(EmulatorFault, match="may still write"):
        run("k", (1, 1, 1), (64, 1, 1), 0, params, arrays, overlaps=("same",))


@pytest.mark.parametrize(
    ("version", "target", "fits"),
    [("7.8", "sm_90", True), ("8.0", "sm_90a", True), ("9.0", "sm_120", True),
     ("7.7", "sm_90", False), ("8.0", "sm_89", False)],
)  # fmt: skip
@pytest.mark.parametrize("action", ["wait", "launch_dependents"])
def test_grids_depend_on_each_other_from_sm_90_on(
    version: str, target: str, fits: bool, action: str
) -> None:
    text = kernel(f"griddepcontrol.{action};", 0, target).replace(
        ".version 8.0", f".version {version}"
    )
    if fits:
        launch(text, [])
        return
    with pytest.raises(EmulatorError, match=r"griddepcontrol.*needs PTX ISA 7\.8 and sm_90"):
        launch(text, [])


def test_requests_that_cannot_be() -> None:
    text = kernel("", 1)
    data = np.zeros(1, np.uint32)
    with pytest.raises(EmulatorError, match="no kernel 'q'; the program has k"):
        launch(text, [data], name="q")
    with pytest.raises(EmulatorError, match="a block of 2048 x 1 x 1 threads"):
        launch(text, [data], block=(2048, 1, 1))
    with pytest.raises(EmulatorError, match="has 8 bytes of parameters, 0 were given"):
        launch(text, [])
    with pytest.raises(ValueError, match="async_copies"):
        launch(text, [data], async_copies="never")
    with pytest.raises(EmulatorError, match=r"PTX line 1: unknown directive"):
        programs.Program("hello")


SOURCE = """
extern "C" __device__ __forceinline__ float pick(const float* from, int i) {
  return from[i];
}
extern "C" __global__ void reads(const float* from, float* to, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  to[i] = pick(from, i + n);
}
"""


@needs_nvcc
def test_faults_name_source_lines() -> None:
    data = np.arange(128, dtype=np.float32)
    out = np.zeros(128, np.float32)
    text = compile_cuda(SOURCE)
    options: dict[str, Any] = {"name": "reads", "grid": (2, 1, 1), "block": (64, 1, 1)}
    launch(text, [data, out], extra=b"\0\0\0\0", **options)
    np.testing.assert_array_equal(out, data)
    with pytest.raises(EmulatorFault) as caught:
        launch(text, [data, out], extra=b"\x08\0\0\0", **options)
    error = caught.value
    assert (error.kind, error.block, error.thread) == ("out of bounds", (1, 0, 0), 56)
    assert error.address == data.ctypes.data + 4 * 128
    assert error.allocation == "array0 (512 bytes)"
    assert ".cu:3 (inlined at " in error.source and ".cu:7)" in error.source
    assert "instruction ld.global" in str(error)


@needs_nvcc
def test_a_tile_takes_milliseconds() -> None:
    """64 queries and 64 keys, head dim 64, all checks on."""
    q, k, v = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(3))
    times = []
    for _ in range(8):  # the best of them: a machine may be busy with other things
        begin = time.perf_counter()
        fa.attention(q, k, v, fa.Causal(), target="emulated:sm_80")
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05
