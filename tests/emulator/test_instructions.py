"""Instructions that need memory, other lanes or control flow, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashattn_jit.errors import EmulatorFault
from tests.emulator.harness import kernel, launch
from tests.emulator.products import Product
from tests.emulator.products import run as run_product

LANES = np.arange(32)


def random_bits(shape: Any, seed: int, dtype: Any = np.uint32) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(0, info.max, shape, dtype, endpoint=True)


def per_lane(lines: str, inputs: np.ndarray, results: int = 4, **options: Any) -> np.ndarray:
    """Runs `lines` on a warp: %r1 holds a lane's input, %r10.. are stored as its results."""
    body = (
        "mov.u32 %r60, %laneid; mul.wide.u32 %w60, %r60, 4; add.u64 %w61, %a0, %w60;\n"
        "ld.global.u32 %r1, [%w61];\n" + lines + "\n"
        f"mul.wide.u32 %w60, %r60, {4 * results}; add.u64 %w61, %a1, %w60;\n"
        + "\n".join(f"st.global.u32 [%w61+{4 * i}], %r{10 + i};" for i in range(results))
    )
    out = np.zeros((32, results), np.uint32)
    launch(kernel(body, 2, **options), [inputs.astype(np.uint32), out])
    return out


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the values rounded to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Matrices


def fragments_a(matrix: np.ndarray) -> np.ndarray:
    """[16, k] of 16-bit values as the words of each lane."""
    words = np.zeros((32, matrix.shape[1] // 4), np.uint32)
    for lane in range(32):
        for i in range(words.shape[1]):
            row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
            low, high = matrix[row, column : column + 2].astype(np.uint32)
            words[lane, i] = low | high << 16
    return words


def fragments_b(matrix: np.ndarray) -> np.ndarray:
    """[k, 8] of 16-bit values as the words of each lane."""
    words = np.zeros((32, matrix.shape[0] // 8), np.uint32)
    for lane in range(32):
        for i in range(words.shape[1]):
            row, column = 2 * (lane % 4) + 8 * i, lane // 4
            low, high = matrix[row : row + 2, column].astype(np.uint32)
            words[lane, i] = low | high << 16
    return words


def fragments_c(matrix: np.ndarray) -> np.ndarray:
    lane = np.arange(32)[:, None]
    i = np.arange(4)[None, :]
    return matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]


def matrix_products(kind: str, k: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((16, k)), generator.standard_normal((k, 8))
    c = generator.standard_normal((16, 8)).astype(np.float32)
    bits = (lambda x: x.astype(np.float16).view(np.uint16)) if kind == "f16" else bf16
    back = (lambda x: x.view(np.float16)) if kind == "f16" else bf16_values
    a, b = bits(a), bits(b)
    exact = back(a).astype(np.float64) @ back(b).astype(np.float64) + c.astype(np.float64)
    words = np.concatenate([fragments_a(a), fragments_b(b), fragments_c(c).view(np.uint32)], axis=1)
    words = np.ascontiguousarray(words)
    count = words.shape[1]
    names = [f"%r{1 + i}" for i in range(count - 4)] + [f"%f{i}" for i in range(4)]
    loads = "\n".join(
        f"ld.global.{'f32' if name[1] == 'f' else 'b32'} {name}, [%w61+{4 * i}];"
        for i, name in enumerate(names)
    )
    num_a = k // 4
    body = (
        f"mov.u32 %r60, %laneid; mul.wide.u32 %w60, %r60, {4 * count}; add.u64 %w61, %a0, %w60;\n"
        f"{loads}\nmma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 "
        f"{{%f0, %f1, %f2, %f3}}, {{{', '.join(names[:num_a])}}}, "
        f"{{{', '.join(names[num_a:-4])}}}, {{%f0, %f1, %f2, %f3}};\n"
        "mul.wide.u32 %w60, %r60, 16; add.u64 %w61, %a1, %w60;\n"
        "st.global.v4.f32 [%w61], {%f0, %f1, %f2, %f3};"
    )
    out = np.zeros((32, 4), np.float32)
    launch(kernel(body, 2, target="sm_75" if k == 8 else "sm_80"), [words, out])
    np.testing.assert_array_equal(out, fragments_c(exact.astype(np.float32)))


def test_matrix_products() -> None:
    for seed, (kind, k) in enumerate([("f16", 16), ("bf16", 16), ("f16", 8)]):
        matrix_products(kind, k, seed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_loads(count: int, transposed: bool) -> None:
    """Rows at random multiples of 16 bytes."""
    memory = random_bits((64, 8), count, np.uint16)
    order = np.random.default_rng(5).permutation(64)[:32]
    names = ", ".join(f"%r{10 + i}" for i in range(count))
    trans = ".trans" if transposed else ""
    copy = "\n".join(
        f"ld.global.v4.u32 {{%r30,%r31,%r32,%r33}}, [%w10+{512 * i}];"
        f"st.shared.v4.u32 [%r6+{512 * i}], {{%r30,%r31,%r32,%r33}};"
        for i in range(2)
    )
    body = (
        "mov.u32 %r60, %laneid; mul.wide.u32 %w60, %r60, 16; add.u64 %w10, %a2, %w60;\n"
        "mov.u32 %r5, buffer; shl.b32 %r6, %r60, 4; add.u32 %r6, %r5, %r6;\n"
        f"{copy}\nbar.sync 0;\n"
        "mul.wide.u32 %w60, %r60, 4; add.u64 %w61, %a0, %w60; ld.global.u32 %r1, [%w61];\n"
        "shl.b32 %r1, %r1, 4; add.u32 %r1, %r1, %r5;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r1];\n"
        f"mul.wide.u32 %w60, %r60, {4 * count}; add.u64 %w61, %a1, %w60;\n"
        + "\n".join(f"st.global.u32 [%w61+{4 * i}], %r{10 + i};" for i in range(count))
    )
    out = np.zeros((32, count), np.uint32)
    launch(kernel(body, 3, shared=1024), [order.astype(np.uint32), out, memory])
    for i in range(count):
        matrix = memory[order[8 * i : 8 * i + 8]]
        matrix = matrix.T if transposed else matrix
        pairs = matrix.reshape(32, 2).astype(np.uint32)
        np.testing.assert_array_equal(out[:, i], pairs[:, 0] | pairs[:, 1] << 16)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_stores(count: int, transposed: bool) -> None:
    """Rows at random multiples of 16 bytes; each lane then reads 16 bytes of the 512."""
    order = np.random.default_rng(count).permutation(32)
    words = random_bits((32, 5), 3)
    words[:, 0] = order
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    trans = ".trans" if transposed else ""
    body = (
        "mov.u32 %r60, %laneid; mul.wide.u32 %w60, %r60, 20; add.u64 %w61, %a0, %w60;\n"
        "ld.global.u32 %r1, [%w61]; mov.u32 %r5, buffer; shl.b32 %r2, %r60, 4;\n"
        "add.u32 %r2, %r2, %r5; mov.u32 %r6, 0; st.shared.v4.u32 [%r2], {%r6, %r6, %r6, %r6};\n"
        "bar.warp.sync -1; shl.b32 %r1, %r1, 4; add.u32 %r1, %r1, %r5;\n"
        + "".join(f"ld.global.u32 %r{20 + i}, [%w61+{4 + 4 * i}];\n" for i in range(4))
        + f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r1], {{{names}}};\n"
        "bar.warp.sync -1; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];\n"
        "mul.wide.u32 %w60, %r60, 16; add.u64 %w61, %a1, %w60;\n"
        "st.global.v4.u32 [%w61], {%r10, %r11, %r12, %r13};"
    )
    out = np.zeros((32, 8), np.uint16)
    launch(kernel(body, 2, "sm_90", shared=512), [words, out])
    expected = np.zeros((32, 8), np.uint16)
    for i in range(count):
        pairs = np.stack([words[:, 1 + i] & 0xFFFF, words[:, 1 + i] >> 16], axis=1)
        matrix = pairs.astype(np.uint16).reshape(8, 8)
        expected[order[8 * i : 8 * i + 8]] = matrix.T if transposed else matrix
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(EmulatorFault, match="no __syncwarp since the write by warp 0"):
        unordered = body.replace("bar.warp.sync -1; ld.shared", "ld.shared")
        launch(kernel(unordered, 2, "sm_90", shared=512), [words, out])


def test_warpgroup_products() -> None:
    """test_wgmma.py has the others."""
    run_product(Product())


def test_register_counts() -> None:
    """test_wgmma.py has the others."""
    lines = "setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 248;"
    launch(kernel(lines, 0, "sm_90a"), [], block=(128, 1, 1))


# Other lanes


def test_shuffles() -> None:
    data = random_bits(32, 1)
    lines = """
    shfl.sync.bfly.b32 %r10|%p1, %r1, 5, 31, -1;
    shfl.sync.idx.b32 %r11|%p2, %r1, %r60, 0x1803, -1;
    shfl.sync.up.b32 %r12|%p3, %r1, 3, 0, -1;
    shfl.sync.down.b32 %r13|%p4, %r1, 9, 0x101f, -1;
    selp.u32 %r14, 1, 0, %p1; selp.u32 %r15, 1, 0, %p2;
    selp.u32 %r16, 1, 0, %p3; selp.u32 %r17, 1, 0, %p4;
    """
    out = per_lane(lines, data, 8)
    bfly = LANES ^ 5
    # Segments of 8 lanes (0x18 keeps bits 3 and 4), of whose lanes 4 to 7 are out of range.
    inside = LANES & 0x18
    index = inside | (LANES & 7)
    index_valid = index <= (inside | 3)
    up, down = LANES - 3, LANES + 9
    last = LANES & 0x10 | 0xF  # segments of 16
    for column, (source, valid) in enumerate(
        [(bfly, np.ones(32, bool)), (index, index_valid), (up, up >= 0), (down, down <= last)]
    ):
        np.testing.assert_array_equal(out[:, column], data[np.where(valid, source, LANES)])
        np.testing.assert_array_equal(out[:, 4 + column], valid)


def test_votes() -> None:
    data = random_bits(32, 2) & 1
    lines = """
    setp.ne.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r60, 32;
    vote.sync.ballot.b32 %r10, %p1, -1;
    vote.sync.any.pred %p3, %p1, -1; vote.sync.all.pred %p4, %p1, -1;
    vote.sync.uni.pred %p5, %p2, -1; vote.sync.all.pred %p6, !%p1, -1;
    selp.u32 %r11, 1, 0, %p3; selp.u32 %r12, 1, 0, %p4; selp.u32 %r13, 1, 0, %p5;
    """
    out = per_lane(lines, data)
    ballot = int((data.astype(np.uint64) << LANES.astype(np.uint64)).sum())
    np.testing.assert_array_equal(out, np.tile([ballot, 1, 0, 1], (32, 1)))


def test_reductions() -> None:
    data = random_bits(32, 3)
    lines = """
    redux.sync.add.u32 %r10, %r1, -1; redux.sync.min.s32 %r11, %r1, -1;
    redux.sync.max.u32 %r12, %r1, -1; redux.sync.and.b32 %r13, %r1, -1;
    redux.sync.or.b32 %r14, %r1, -1; redux.sync.xor.b32 %r15, %r1, -1;
    redux.sync.max.s32 %r16, %r1, -1; redux.sync.min.u32 %r17, %r1, -1;
    """
    signed = data.view(np.int32)
    expected = [
        data.sum(dtype=np.uint32), signed.min().view(np.uint32), data.max(),
        np.bitwise_and.reduce(data), np.bitwise_or.reduce(data), np.bitwise_xor.reduce(data),
        signed.max().view(np.uint32), data.min(),
    ]  # fmt: skip
    np.testing.assert_array_equal(per_lane(lines, data, 8), np.tile(expected, (32, 1)))


def test_elections() -> None:
    lines = """
    setp.lt.u32 %p1, %r60, 5; mov.u32 %r10, 9; mov.u32 %r11, 9;
    @!%p1 elect.sync %r10|%p2, 0xffffffe0; @!%p1 selp.u32 %r11, 1, 0, %p2;
    @%p1 elect.sync _|%p3, 0x0000001f; @%p1 selp.u32 %r11, 1, 0, %p3;
    """
    out = per_lane(lines, LANES, 2, target="sm_90")
    np.testing.assert_array_equal(out[:, 0], np.where(LANES < 5, 9, 5))
    np.testing.assert_array_equal(out[:, 1], (LANES == 0) | (LANES == 5))


def test_members_of_a_part_meet() -> None:
    """Two halves of a warp, in different branches, each with its own member mask."""
    lines = """
    setp.lt.u32 %p1, %r60, 12;
    @%p1 bra FEW;
    redux.sync.add.u32 %r10, %r1, 0xfffff000;
    mov.u32 %r11, 2;
    bra DONE;
    FEW: redux.sync.add.u32 %r10, %r1, 0x00000fff;
    mov.u32 %r11, 1;
    DONE: bar.warp.sync -1;
    """
    data = random_bits(32, 4)
    out = per_lane(lines, data, 2)
    few = LANES < 12
    np.testing.assert_array_equal(
        out[:, 0], np.where(few, data[:12].sum(dtype=np.uint32), data[12:].sum(dtype=np.uint32))
    )
    np.testing.assert_array_equal(out[:, 1], np.where(few, 1, 2))


def test_active_mask() -> None:
    lines = """
    activemask.b32 %r10; mov.u32 %r11, 0;
    setp.lt.u32 %p1, %r60, 5;
    @!%p1 bra DONE;
    activemask.b32 %r11;
    DONE:
    """
    out = per_lane(lines, LANES, 2)
    np.testing.assert_array_equal(out[:, 0], 0xFFFFFFFF)
    np.testing.assert_array_equal(out[:, 1], np.where(LANES < 5, 0x1F, 0))


# Control flow


def test_divergence() -> None:
    """Each lane counts Collatz steps: lanes diverge, reconverge and end after different counts."""
    lines = """
    mov.u32 %r10, 0; mov.u32 %r2, %r1;
    NEXT: setp.le.u32 %p1, %r2, 1;
    @%p1 bra DONE;
    and.b32 %r3, %r2, 1; setp.eq.u32 %p2, %r3, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r2, %r2, 3, 1;
    bra.uni STEP;
    EVEN: shr.u32 %r2, %r2, 1;
    STEP: add.u32 %r10, %r10, 1;
    bra NEXT;
    DONE: activemask.b32 %r11;
    """
    out = per_lane(lines, LANES + 1, 2)

    def steps(n: int) -> int:
        return 0 if n <= 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    np.testing.assert_array_equal(out[:, 0], [steps(n + 1) for n in range(32)])
    np.testing.assert_array_equal(out[:, 1], 0xFFFFFFFF)


def test_branch_tables() -> None:
    lines = """
    { .reg .b32 %t; and.b32 %t, %r1, 3;
    TABLE: .branchtargets A, B, C, A;
    brx.idx %t, TABLE;
    A: mov.u32 %r10, 100; bra OUT;
    B: mov.u32 %r10, 200; bra OUT;
    C: mov.u32 %r10, 300;
    OUT: }
    """
    out = per_lane(lines, LANES, 1)
    np.testing.assert_array_equal(out[:, 0], np.array([100, 200, 300, 100])[LANES % 4])


def test_exits() -> None:
    """Lanes that have exited take no part in a shfl, which does not wait for them."""
    lines = """
    setp.ge.u32 %p1, %r60, 16; mov.u32 %r10, 7;
    @%p1 exit;
    shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;
    """
    out = per_lane(lines, LANES, 1)
    np.testing.assert_array_equal(out[:, 0], np.where(LANES < 16, LANES ^ 1, 0))


def test_trap() -> None:
    with pytest.raises(EmulatorFault, match="the kernel ended itself") as caught:
        per_lane("setp.eq.u32 %p1, %r60, 9; @%p1 trap;", LANES, 0)
    assert (caught.value.kind, caught.value.thread) == ("trap", 9)


def test_barriers() -> None:
    """A sum over 4 warps: through shared memory, with votes at the barrier, and a named barrier."""
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, buffer; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    setp.lt.u32 %p1, %r1, 50;
    barrier.sync.aligned 0;
    xor.b32 %r5, %r3, 128; add.u32 %r5, %r5, %r2; ld.shared.u32 %r10, [%r5];
    bar.red.popc.u32 %r11, 0, %p1;
    bar.red.and.pred %p2, 1, 128, %p1; bar.red.or.pred %p3, 2, !%p1;
    selp.u32 %r12, 1, 0, %p2; selp.u32 %r13, 1, 0, %p3;
    setp.ge.u32 %p4, %r1, 64;
    @%p4 bra HIGH;
    bar.arrive 3, 128; bra DONE;
    HIGH: bar.sync 3, 128;
    DONE: mul.wide.u32 %w1, %r1, 16; add.u64 %w2, %a0, %w1;
    st.global.v4.u32 [%w2], {%r10, %r11, %r12, %r13};
    """
    out = np.zeros((128, 4), np.uint32)
    launch(kernel(body, 1, shared=512), [out], block=(128, 1, 1))
    thread = np.arange(128)
    np.testing.assert_array_equal(out[:, 0], thread ^ 32)
    np.testing.assert_array_equal(out[:, 1:], np.tile([50, 0, 1], (128, 1)))


# Memory


def test_loads_and_stores() -> None:
    """Vectors of each width, narrow types extended, offsets, and parameters as a byte array."""
    source = random_bits(64, 6, np.uint8)
    body = """
    ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%a0+16];
    st.global.wb.v4.b32 [%a1], {%r1, %r2, %r3, %r4};
    ld.global.v2.f64 {%d1, %d2}, [%a0+32]; st.global.v2.f64 [%a1+16], {%d1, %d2};
    ld.global.s8 %r5, [%a0+3]; st.global.u32 [%a1+32], %r5;
    ld.global.u8 %h1, [%a0+4]; cvt.u32.u16 %r6, %h1; st.global.u32 [%a1+36], %r6;
    ld.volatile.global.s16 %w1, [%a0+6]; st.global.u64 [%a1+40], %w1;
    ld.global.b16 %h2, [%a0+8]; st.global.u8 [%a1+48], %h2;
    ld.param.b16 %h3, [p2+6]; st.global.b16 [%a1+50], %h3;
    mov.b64 %w2, p2; add.s64 %w2, %w2, 12; ld.param.v2.u32 {%r7, %r8}, [%w2+-4];
    st.global.v2.u32 [%a1+56], {%r7, %r8};
    """
    text = kernel(body, 2).replace(".param .u64 p1)", ".param .u64 p1, .param .align 8 .b8 p2[16])")
    out = np.zeros(64, np.uint8)
    extra = bytes(range(100, 116))
    launch(text, [source, out], block=(1, 1, 1), extra=extra, read_only=[0])
    np.testing.assert_array_equal(out[:32], source[16:48])
    assert out[32:36].view(np.int32)[0] == source[3:4].view(np.int8)[0]
    assert out[36:40].view(np.uint32)[0] == source[4]
    assert out[40:48].view(np.int64)[0] == source[6:8].view(np.int16)[0]
    assert out[48] == source[8] and out[49] == 0
    assert bytes(out[50:52]) == extra[6:8]
    assert bytes(out[56:64]) == extra[8:16]


def test_generic_addressing() -> None:
    """One generic load reads shared, local, constant and global memory, lane by lane."""
    body = """
    .local .align 8 .b8 own[8];
    mov.u32 %r1, %laneid; mov.u32 %r2, buffer; mov.u64 %w1, own;
    st.shared.u32 [%r2], 11; st.local.u32 [%w1+4], %r1;
    bar.warp.sync -1;
    cvt.u64.u32 %w2, %r2; cvta.shared.u64 %w3, %w2; cvta.local.u64 %w4, %w1; add.u64 %w4, %w4, 4;
    mov.u64 %w5, table; cvta.const.u64 %w5, %w5; cvta.to.global.u64 %w6, %a0;
    and.b32 %r3, %r1, 3;
    setp.eq.u32 %p0, %r3, 0; setp.eq.u32 %p1, %r3, 1; setp.eq.u32 %p2, %r3, 2;
    selp.b64 %w7, %w3, %w6, %p0; selp.b64 %w7, %w4, %w7, %p1; selp.b64 %w7, %w5, %w7, %p2;
    ld.u32 %r4, [%w7];
    cvta.to.shared.u64 %w8, %w3; cvt.u32.u64 %r5, %w8; ld.shared.u32 %r6, [%r5];
    mul.wide.u32 %w9, %r1, 8; add.u64 %w10, %a1, %w9; st.global.v2.u32 [%w10], {%r4, %r6};
    """
    text = kernel(body, 2, shared=16).replace(
        ".visible .entry", ".const .align 4 .u32 table[2] = {77, 78};\n.visible .entry"
    )
    # All lanes of the warp write the same value to one word of shared memory, which is a race.
    out = np.zeros((32, 2), np.uint32)
    with pytest.raises(EmulatorFault, match="race"):
        launch(text, [np.array([5], np.uint32), out])
    launch(text, [np.array([5], np.uint32), out], check_races=False)
    np.testing.assert_array_equal(out[:, 0], np.choose(LANES % 4, [11, LANES, 77, 5]))
    np.testing.assert_array_equal(out[:, 1], 11)


def test_atomics() -> None:
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, buffer;
    setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r2], 0; bar.sync 0;
    atom.shared.add.u32 %r3, [%r2], 2;
    red.global.add.u32 [%a0], %r1; atom.global.max.s32 %r4, [%a0+4], %r1;
    cvt.rn.f32.u32 %f1, %r1; red.relaxed.gpu.global.add.f32 [%a0+8], %f1;
    atom.global.cas.b32 %r5, [%a0+12], 0, 9;
    cvt.u64.u32 %w1, %r1; atom.global.add.u64 %w2, [%a0+16], %w1;
    atom.global.exch.b32 %r6, [%a0+24], %r1; atom.global.inc.u32 %r7, [%a0+28], 9;
    red.global.or.b32 [%a0+32], %r1; atom.global.min.u32 %r8, [%a0+36], %r1;
    bar.sync 0;
    ld.shared.u32 %r9, [%r2]; @%p1 st.global.u32 [%a0+40], %r9;
    """
    out = np.zeros(12, np.uint32)
    out[9] = 1000
    launch(kernel(body, 1, shared=16), [out], grid=(3, 1, 1), block=(64, 1, 1), num_threads=2)
    total = 3 * sum(range(64))
    assert (out[0], out[1], out.view(np.float32)[2], out[3]) == (total, 63, total, 9)
    assert out[4:6].view(np.uint64)[0] == total
    assert out[6] < 64
    assert (out[7], out[8], out[9], out[10]) == (192 % 10, 63, 0, 128)


def test_hints() -> None:
    lines = """
    prefetch.global.L2 [%a0]; prefetch.tensormap [%a0]; membar.gl; nanosleep.u32 20;
    createpolicy.fractional.L2::evict_first.b64 %w1, 1.0;
    ld.global.L2::cache_hint.u32 %r10, [%a0], %w1;
    """
    np.testing.assert_array_equal(per_lane(lines, LANES + 3, 1)[:, 0], 3)


def test_fences() -> None:
    """What they order is in test_tensor_copies.py; here, that they change nothing else."""
    lines = """
    fence.acq_rel.gpu; fence.proxy.async;
    fence.proxy.async.shared::cta; fence.proxy.async.global; fence.mbarrier_init.release.cluster;
    """
    np.testing.assert_array_equal(per_lane(lines + "mov.u32 %r10, %r1;", LANES, 1)[:, 0], LANES)


@pytest.mark.parametrize("overlaps", [None, ("array0",)])
def test_overlapping_launches(overlaps: tuple[str, ...] | None) -> None:
    lines = """
    griddepcontrol.wait; ld.global.u32 %r1, [%a0];
    griddepcontrol.launch_dependents; st.global.u32 [%a1], %r1;
    """
    data = [np.full(1, 3, np.uint32), np.zeros(1, np.uint32)]
    launch(kernel(lines, 2, "sm_90"), data, overlaps=overlaps)
    assert data[1][0] == 3


@pytest.mark.parametrize("moment", ["late", "early", 1, 2])
def test_asynchronous_copies(moment: Any) -> None:
    """Copy sizes, zeros beyond the source size, and a wait for the older of two groups."""
    body = """
    mov.u32 %r1, %laneid; mov.u32 %r2, buffer; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
    mul.wide.u32 %w1, %r1, 16; add.u64 %w2, %a0, %w1; and.b32 %r5, %r1, 15;
    cp.async.cg.shared.global.L2::128B [%r4], [%w2], 16, %r5;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r4+512], [%w2+4], 4;
    cp.async.ca.shared.global [%r4+520], [%w2+8], 8;
    createpolicy.fractional.L2::evict_first.b64 %w5;
    cp.async.cg.shared.global.L2::cache_hint [%r4+1024], [%w2], 16, %w5;
    cp.async.cg.shared.global.L2::cache_hint [%r4+1536], [%w2], 16, %r5, %w5;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
    cp.async.wait_all;
    ld.shared.u32 %r14, [%r4+512]; ld.shared.v2.u32 {%r15, %r16}, [%r4+520];
    ld.shared.u32 %r17, [%r4+1024]; ld.shared.u32 %r18, [%r4+1536];
    mul.wide.u32 %w3, %r1, 36; add.u64 %w4, %a1, %w3;
    """ + "\n".join(f"st.global.u32 [%w4+{4 * i}], %r{10 + i};" for i in range(9))
    source = random_bits((32, 16), 7, np.uint8)
    out = np.zeros((32, 36), np.uint8)
    launch(kernel(body, 2, shared=2048), [source, out], async_copies=moment, read_only=[0])
    kept = np.arange(16)[None] < (LANES % 16)[:, None]
    np.testing.assert_array_equal(out[:, :16], np.where(kept, source, 0))
    np.testing.assert_array_equal(out[:, 16:20], source[:, 4:8])
    np.testing.assert_array_equal(out[:, 20:28], source[:, 8:])
    np.testing.assert_array_equal(out[:, 28:32], source[:, :4])
    np.testing.assert_array_equal(out[:, 32:], np.where(kept, source, 0)[:, :4])
