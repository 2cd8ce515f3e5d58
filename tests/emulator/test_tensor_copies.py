"""Bulk copies: boxes against a model in numpy, and the mistakes that the emulator finds."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest

from flashattn_jit.errors import EmulatorError, EmulatorFault
from tests.emulator.harness import MOMENTS, compile_cuda, kernel, launch
from tests.harness.toolkit import needs_nvcc

MAGIC = int.from_bytes(b"fajitmap", "little")
ELEMENTS = {1: 0, 2: 6, 4: 7, 8: 4}
"""CUtensorMapDataType of elements of so many bytes."""
Array = np.ndarray[Any, Any]


def tensor_map(
    array: Array, box: tuple[int, ...], swizzle: int = 0, changes: dict[str, Any] | None = None
) -> bytes:
    """The map of an array, for boxes of this shape; `box` and the array have dim 0 last."""
    changes = changes or {}
    rank = array.ndim
    given: dict[str, Any] = {
        "magic": MAGIC, "base": array.ctypes.data, "strides": array.strides[-2::-1],
        "sizes": array.shape[::-1], "box": box[::-1], "rank": rank,
        "element": ELEMENTS[array.itemsize], "swizzle": swizzle, "promotion": 0,
    }  # fmt: skip
    assert given.keys() >= changes.keys()
    m = given | changes
    padded = [(*m[name], *([0] * 5))[:n] for name, n in (("strides", 4), ("sizes", 5), ("box", 5))]
    return struct.pack(
        "<QQ4Q5I5H4B46x", m["magic"], m["base"], *padded[0], *padded[1], *padded[2], m["rank"],
        m["element"], m["swizzle"], m["promotion"],
    )  # fmt: skip


def swizzled(rows: bytes, address: int, swizzle: int) -> Array:
    """The bytes of a box as they lie from an address on: 16-byte chunks exchanged."""
    out = np.zeros(len(rows), np.uint8)
    places = address + np.arange(len(rows))
    out[(places ^ (places >> 7 & (1 << swizzle) - 1) << 4) - address] = np.frombuffer(
        rows, np.uint8
    )
    return out


def box_of(array: Array, box: tuple[int, ...], at: tuple[int, ...]) -> Array:
    """The part of an array from `at` on, zeros outside; all with dim 0 last."""
    out = np.zeros(box, array.dtype)
    for index in itertools.product(*(range(n) for n in box)):
        place = tuple(a + i for a, i in zip(at, index, strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            out[index] = array[place]
    return out


DATA = 1024
"""Offset of the box in the buffer, behind the mbarriers. The buffer is at shared address 1024."""

BEGIN = """
mov.u32 %r1, %tid.x; mov.u32 %r2, buffer; setp.eq.u32 %p0, %r1, 0;
mov.b64 %w1, map; cvta.param.u64 %w1, %w1;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
WAIT = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0; @!%p1 bra WAIT;
"""


def copy_out(num_bytes: int) -> str:
    """Copies the buffer's data to array 1, 16 bytes a thread."""
    return f"""
    shl.b32 %r5, %r1, 4;
    NEXT: setp.ge.u32 %p2, %r5, {num_bytes}; @%p2 bra END;
    add.u32 %r6, %r2, %r5; cvt.u64.u32 %w2, %r5; add.u64 %w2, %w2, %a1;
    ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6+{DATA}];
    st.global.v4.u32 [%w2], {{%r10, %r11, %r12, %r13}};
    add.u32 %r5, %r5, 512; bra NEXT;
    END:
    """


def load(rank: int, num_bytes: int, at: tuple[int, ...]) -> str:
    """Thread 0 loads a box; `at` has dim 0 last."""
    places = ", ".join(f"%r{20 + d}" for d in range(rank))
    moves = " ".join(f"mov.s32 %r{20 + d}, {at[rank - 1 - d]};" for d in range(rank))
    return f"""
    {moves}
    @%p0 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r2], {num_bytes};
    @%p0 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r2+{DATA}], [%w1, {{{places}}}], [%r2];
    """


def run(
    lines: str, arrays: list[Array], tensor: bytes = bytes(128), *, shared: int = 1 << 16,
    threads: int = 32, **options: Any,
) -> None:  # fmt: skip
    text = kernel(lines, 2, "sm_90", shared=shared)
    text = text.replace(".param .u64 p1)", ".param .u64 p1, .param .align 64 .b8 map[128])")
    extra = bytes(48) + tensor  # the parameters before it have 16 bytes
    launch(text, arrays, block=(threads, 1, 1), extra=extra, step_limit=1 << 24, **options)


def loaded(
    array: Array, box: tuple[int, ...], at: tuple[int, ...], swizzle: int = 0, **options: Any
) -> Array:
    """The shared memory that a load of a box fills, byte by byte."""
    changes = options.pop("changes", {})
    num_bytes = int(np.prod(box)) * array.itemsize
    out = np.zeros(num_bytes, np.uint8)
    lines = BEGIN + load(len(box), num_bytes, at) + WAIT + copy_out(num_bytes)
    tensor = tensor_map(array, box, swizzle, changes)
    run(lines, [array, out], tensor, read_only=[0], **options)
    return out


def numbers(shape: tuple[int, ...], dtype: Any = np.uint16) -> Array:
    """Different values, in memory that is aligned to 128 bytes."""
    count = int(np.prod(shape))
    raw = np.zeros(count * np.dtype(dtype).itemsize + 128, np.uint8)
    begin = -raw.ctypes.data % 128
    array = raw[begin : begin + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    array[...] = (1 + np.arange(count) % 251).reshape(shape)
    return array


BOXES: list[tuple[tuple[int, ...], Any, tuple[int, ...], tuple[int, ...], int]] = [
    ((40,), np.uint16, (32,), (0,), 0),
    ((40,), np.uint16, (32,), (-5,), 0),
    ((256,), np.uint8, (64,), (200,), 0),
    ((24, 64), np.uint16, (16, 64), (3, 0), 3),
    ((24, 64), np.uint16, (16, 64), (-3, 0), 3),
    ((24, 128), np.uint16, (16, 64), (20, 64), 3),
    ((24, 72), np.uint16, (16, 64), (20, 16), 3),
    ((24, 32), np.uint16, (16, 32), (7, 0), 2),
    ((24, 32), np.uint16, (24, 16), (1, 8), 1),
    ((24, 32), np.uint16, (16, 32), (0, 0), 3),  # rows of half a swizzle's span
    ((24, 32), np.uint32, (9, 32), (40, -40), 3),  # nothing of it is inside
    ((5, 6, 64), np.uint16, (2, 4, 64), (4, 3, 0), 3),
    ((3, 4, 5, 32), np.uint32, (1, 2, 8, 32), (2, -1, -2, 0), 3),
    ((2, 3, 2, 4, 16), np.uint64, (2, 1, 3, 2, 8), (-1, 1, 0, 3, 12), 2),
]


@pytest.mark.parametrize(("shape", "dtype", "box", "at", "swizzle"), BOXES)
def test_boxes(shape: Any, dtype: Any, box: Any, at: Any, swizzle: int) -> None:
    array = numbers(shape, dtype)
    expected = swizzled(box_of(array, box, at).tobytes(), 1024 + DATA, swizzle)
    for moment in MOMENTS[:5]:
        out = loaded(array, box, at, swizzle, async_copies=moment)
        np.testing.assert_array_equal(out, expected)


def test_the_swizzle_is_of_addresses() -> None:
    """A box at an address that is no multiple of 1024 bytes begins inside the pattern."""
    array = numbers((16, 64))
    place = DATA + 128 * 3
    lines = (BEGIN + load(2, 2048, (0, 0)) + WAIT + copy_out(2048)).replace(
        f"[%r2+{DATA}]", f"[%r2+{place}]").replace(f"[%r6+{DATA}]", f"[%r6+{place}]")  # fmt: skip
    out = np.zeros(2048, np.uint8)
    run(lines, [array, out], tensor_map(array, (16, 64), 3))
    np.testing.assert_array_equal(out, swizzled(array.tobytes(), 1024 + place, 3))
    assert (out != swizzled(array.tobytes(), 1024, 3)).any()


def test_what_is_outside_is_not_read() -> None:
    """Rows behind the tensor hold NaN, or are in no allocation."""
    whole = numbers((24, 64)).view(np.float16)
    whole[:10], whole[10:] = 1, np.nan
    out = loaded(whole[:10], (16, 64), (4, 0), 3).view(np.float16).reshape(16, 64)
    assert (out[:6] == 1).all() and (out[6:] == 0).all()
    longer = {"sizes": (64, 25)}
    with pytest.raises(EmulatorFault, match="a read of 16 bytes in no allocation"):
        loaded(whole, (16, 64), (10, 0), 3, changes=longer)


def test_wrong_values_of_mistakes() -> None:
    """Coordinates exchanged, and another swizzle, show in what is loaded."""
    array = numbers((64, 128))
    expected = swizzled(box_of(array, (16, 64), (16, 64)).tobytes(), 2048, 3)
    np.testing.assert_array_equal(loaded(array, (16, 64), (16, 64), 3), expected)
    assert (loaded(array, (16, 64), (64, 16), 3) != expected).any()
    assert (loaded(array, (16, 64), (16, 64), 0) != expected).any()


MAPS = {
    "what lies there is no tensor map": {"magic": MAGIC + 1},
    "a map of 3 dimensions": {"rank": 3},
    "an unknown element": {"element": 13},
    "base is not aligned": {"base": 8},
    "rows of 24 bytes": {"box": (12, 16)},
    "rows of 256 bytes are longer than the swizzle's 128": {"box": (128, 16)},
    "a box of 257 of 24 elements in dimension 1": {"box": (64, 257)},
    "a box of 16 of 0 elements in dimension 1": {"sizes": (64, 0)},
    "a stride of 136 bytes": {"strides": (136,)},
    "a stride of 1099511627776 bytes": {"strides": (1 << 40,)},
}


@pytest.mark.parametrize("words", MAPS)
def test_maps_are_checked(words: str) -> None:
    with pytest.raises(EmulatorFault, match=words) as caught:
        loaded(numbers((24, 64)), (16, 64), (0, 0), 3, changes=MAPS[words])
    assert caught.value.kind == "tensor map"


def test_maps_lie_in_parameters_or_memory() -> None:
    array = numbers((24, 64))
    out = np.zeros(2048, np.uint8)
    memory = numbers((256,), np.uint8)
    memory[:128] = np.frombuffer(tensor_map(array, (16, 64), 3), np.uint8)
    lines = BEGIN + load(2, 2048, (8, 0)) + WAIT + copy_out(2048)
    lines = lines.replace("mov.b64 %w1, map; cvta.param.u64 %w1, %w1;", "ld.global.u64 %w1, [%a0];")
    pointer = np.array([memory.ctypes.data, array.ctypes.data], np.uint64)
    text = kernel(lines, 4, "sm_90", shared=1 << 12)
    launch(text, [pointer, out, memory, array])
    np.testing.assert_array_equal(out, swizzled(array[8:].tobytes(), 2048, 3))
    pointer[0] += 32
    with pytest.raises(EmulatorFault, match="misaligned"):
        launch(text, [pointer, out, memory, array])
    wrong = BEGIN.replace(
        "cvta.param.u64 %w1, %w1;", "cvta.param.u64 %w1, %w1; add.u64 %w1, %w1, 64;"
    )
    with pytest.raises(EmulatorFault, match="the parameters hold no tensor map there"):
        run(wrong + load(2, 2048, (0, 0)), [array, out])


# A ring: thread 32 loads tiles of 16 rows, warp 0 copies them to array 1.

ITEMS, TILE = 5, 2048
RING = f"""
mov.u32 %r1, %tid.x; and.b32 %r3, %r1, 31; mov.u32 %r2, buffer; mov.b64 %w1, map;
cvta.param.u64 %w1, %w1; mov.u32 %r10, 0; mov.u32 %r20, 0;
setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r3, 0; setp.lt.u32 %p2, %r1, 32;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1; @%p0 mbarrier.init.shared::cta.b64 [%r2+8], 1;
@%p0 mbarrier.init.shared::cta.b64 [%r2+16], 1; @%p0 mbarrier.init.shared::cta.b64 [%r2+24], 1;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p2 bra CONSUMER;
@!%p1 bra DONE;
PRODUCER:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r13, %r12, 1;
shl.b32 %r14, %r11, 3; add.u32 %r14, %r14, %r2; mad.lo.u32 %r15, %r11, {TILE}, %r2;
WAIT_EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14+16], %r13; @!%p3 bra WAIT_EMPTY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r14], {TILE};
shl.b32 %r21, %r10, 4;
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
    [%r15+{DATA}], [%w1, {{%r20, %r21}}], [%r14];
add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, {ITEMS}; @%p4 bra PRODUCER;
bra DONE;
CONSUMER:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
shl.b32 %r14, %r11, 3; add.u32 %r14, %r14, %r2; mad.lo.u32 %r15, %r11, {TILE}, %r2;
WAIT_FULL: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12; @!%p3 bra WAIT_FULL;
mov.u32 %r16, %r3;
CHUNK:
shr.u32 %r17, %r16, 3; xor.b32 %r18, %r17, %r16; and.b32 %r18, %r18, 7; shl.b32 %r18, %r18, 4;
mad.lo.u32 %r18, %r17, 128, %r18; add.u32 %r18, %r18, %r15;
ld.shared.v4.u32 {{%r30, %r31, %r32, %r33}}, [%r18+{DATA}];
mad.lo.u32 %r19, %r10, 128, %r16; mul.wide.u32 %w2, %r19, 16; add.u64 %w2, %w2, %a1;
st.global.v4.u32 [%w2], {{%r30, %r31, %r32, %r33}};
add.u32 %r16, %r16, 32; setp.lt.u32 %p4, %r16, 128; @%p4 bra CHUNK;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r14+16];
add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, {ITEMS}; @%p4 bra CONSUMER;
DONE:
"""


def ring(lines: str, **options: Any) -> tuple[Array, Array]:
    source, out = numbers((16 * ITEMS, 64)), numbers((16 * ITEMS, 64))
    out[...] = 0
    tensor = tensor_map(source, (16, 64), 3)
    run(lines, [source, out], tensor, threads=64, read_only=[0], **options)
    return source, out


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_ring(moment: Any) -> None:
    source, out = ring(RING, async_copies=moment)
    np.testing.assert_array_equal(out, source)


MISTAKES = {
    "no proxy fence after reads": ("fence.proxy.async.shared::cta;\n", "", ("proxy",)),
    "a proxy fence by one lane before the others": (
        "fence.proxy.async.shared::cta;", "@%p1 fence.proxy.async;", ("proxy",)
    ),
    "16 bytes too many": (f"_, [%r14], {TILE};", f"_, [%r14], {TILE + 16};", ("deadlock",)),
    "16 bytes too few": (f"_, [%r14], {TILE};", f"_, [%r14], {TILE - 16};", ("deadlock",)),
    "no bytes expected": (
        f"arrive.expect_tx.shared::cta.b64 _, [%r14], {TILE};",
        "arrive.shared::cta.b64 _, [%r14];",
        ("in flight", "race", "uninitialised", "deadlock"),
    ),
    "a wrong count": ("[%r2+16], 1;", "[%r2+16], 2;", ("deadlock",)),
    "parity not flipped": ("[%r14+16], %r13;", "[%r14+16], 1;",
                           ("race", "in flight", "proxy", "deadlock", "mbarrier")),
    "no fence after init": ("@%p0 fence.mbarrier_init.release.cluster;", "", ("proxy",)),
    "no barrier after init": ("bar.sync 0;", "", ("race", "mbarrier")),
    "released by a lane for others": ("bar.warp.sync -1;\n", "", ("race",)),
    "the other mbarrier": ("[%r14], %r12; @!%p3", "[%r14+8], %r12; @!%p3",
                           ("mbarrier", "race", "in flight", "deadlock")),
    "no wait": (
        "[%r14], %r12; @!%p3 bra WAIT_FULL;",
        "[%r14], %r12; bra GO; GO:",
        ("in flight", "race", "uninitialised"),
    ),
    "the block ends": (
        "@%p4 bra PRODUCER;",
        "@%p4 bra PRODUCER; cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
        f" [%r15+{DATA + 2 * TILE}], [%w1, {{%r20, %r21}}], [%r14];",
        ("exit", "deadlock"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    old, new, kinds = MISTAKES[mistake]
    assert RING.count(old) == 1, RING.count(old)
    lines = RING.replace(old, new)
    if mistake == "no wait":
        lines = lines.replace("mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12;", "")
    for moment in MOMENTS[:8]:
        if mistake == "the block ends" and moment != "late":
            continue
        with pytest.raises(EmulatorFault) as caught:
            ring(lines, async_copies=moment)
        assert caught.value.kind in kinds, (moment, str(caught.value))


def test_a_buffer_released_before_it_is_read() -> None:
    release = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r14+16];"
    lines = RING.replace(release, "").replace("mov.u32 %r16, %r3;", f"mov.u32 %r16, %r3; {release}")
    for moment in MOMENTS:
        with pytest.raises(EmulatorFault) as caught:
            ring(lines, async_copies=moment)
        assert caught.value.kind in ("race", "in flight", "proxy")


def test_messages_of_proxies() -> None:
    with pytest.raises(EmulatorFault) as caught:
        ring(RING.replace("fence.proxy.async.shared::cta;", ""))
    text = str(caught.value)
    assert "a copy into bytes by the asynchronous proxy: fence.proxy.async is missing" in text
    assert "after the read by thread (0, 0, 0) at PTX line" in text
    with pytest.raises(EmulatorFault, match=r"fence.mbarrier_init or fence.proxy.async is missing"):
        ring(RING.replace("@%p0 fence.mbarrier_init.release.cluster;", ""))
    ring(RING.replace("fence.mbarrier_init.release.cluster", "fence.proxy.async"))


def test_a_wait_for_one_copy_is_not_one_for_another() -> None:
    """Two boxes, each with its own mbarrier: the data of one after the wait for the other."""
    second = load(2, 2048, (8, 0)).replace("[%r2]", "[%r2+8]").replace(
        f"[%r2+{DATA}]", f"[%r2+{DATA + 2048}]")  # fmt: skip
    begin = BEGIN.replace(
        "@%p0 fence", "@%p0 mbarrier.init.shared::cta.b64 [%r2+8], 1; @%p0 fence", 1
    )
    array, out = numbers((24, 64)), np.zeros(4096, np.uint8)
    both = WAIT + WAIT.replace("[%r2]", "[%r2+8]").replace("WAIT", "ALSO")
    for moment in MOMENTS:
        lines = begin + load(2, 2048, (0, 0)) + second
        given: Any = ([array, out], tensor_map(array, (16, 64), 3))
        run(lines + both + copy_out(4096), *given, async_copies=moment)
        for one in (WAIT, WAIT.replace("[%r2]", "[%r2+8]")):
            with pytest.raises(EmulatorFault) as caught:
                run(lines + one + copy_out(4096), *given, async_copies=moment)
            assert caught.value.kind in ("in flight", "race")


# Stores

FILL = f"""
mov.u32 %r1, %tid.x; mov.u32 %r2, buffer; setp.eq.u32 %p0, %r1, 0; mov.b64 %w1, map;
cvta.param.u64 %w1, %w1; shl.b32 %r3, %r1, 6; add.u32 %r4, %r2, %r3; mov.u32 %r20, 0;
mov.s32 %r21, 4;
st.shared.v4.u32 [%r4+{DATA}], {{%r1, %r1, %r1, %r1}};
st.shared.v4.u32 [%r4+{DATA + 16}], {{%r1, %r1, %r1, %r1}};
st.shared.v4.u32 [%r4+{DATA + 32}], {{%r1, %r1, %r1, %r1}};
st.shared.v4.u32 [%r4+{DATA + 48}], {{%r1, %r1, %r1, %r1}};
"""
STORE = f"""
fence.proxy.async.shared::cta;
bar.warp.sync -1;
@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%w1, {{%r20, %r21}}], [%r2+{DATA}];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group.read 0;
"""
AGAIN = f"bar.warp.sync -1; st.shared.u32 [%r4+{DATA}], %r1;"


def stored(lines: str, moment: Any = "late", **options: Any) -> Array:
    out = numbers((12, 64))
    out[...] = 0
    run(lines, [np.zeros(4, np.uint8), out], tensor_map(out, (16, 64), 3), async_copies=moment,
        **options)  # fmt: skip
    return out


@pytest.mark.parametrize("moment", MOMENTS)
def test_stores(moment: Any) -> None:
    """Rows outside of the tensor are not written."""
    out = stored(FILL + STORE + AGAIN, moment)
    lanes = np.repeat(np.arange(32, dtype=np.uint32), 16).tobytes()
    order = np.arange(2048) ^ (np.arange(2048) >> 7 & 7) << 4
    rows = np.frombuffer(lanes, np.uint8)[order].view(np.uint16).reshape(16, 64)
    np.testing.assert_array_equal(out[4:], rows[:8])
    assert (out[:4] == 0).all()


@pytest.mark.parametrize("moment", MOMENTS[:6])
def test_mistakes_in_stores_are_found(moment: Any) -> None:
    for old, new, kind in (
        ("fence.proxy.async.shared::cta;", "", "proxy"),
        ("fence.proxy.async.shared::cta;", "@%p0 fence.proxy.async;", "proxy"),
        ("fence.proxy.async.shared::cta;", "fence.proxy.async.global;", "proxy"),
        ("bar.warp.sync -1;", "", "race"),
        ("@%p0 cp.async.bulk.wait_group.read 0;", "", "in flight"),
        ("@%p0 cp.async.bulk.commit_group;", "", "in flight"),
        ("wait_group.read 0", "wait_group.read 1", "in flight"),
    ):
        assert STORE.count(old) == 1
        with pytest.raises(EmulatorFault) as caught:
            stored(FILL + STORE.replace(old, new) + AGAIN, moment)
        assert caught.value.kind == kind, (new, str(caught.value))
    with pytest.raises(EmulatorFault, match="may still be reading: a wait is missing"):
        stored(FILL + STORE.replace("wait_group.read 0", "wait_group 1") + AGAIN, moment)
    with pytest.raises(EmulatorFault, match=r"cp.async.bulk.wait_group is missing") as caught:
        stored(FILL + STORE.replace("wait_group.read 0", "wait_group.read 1"), moment)
    assert caught.value.kind == "exit"
    with pytest.raises(EmulatorFault, match="read-only"):
        stored(FILL + STORE, moment, read_only=[1])


# Runs of bytes

BYTES = BEGIN + f"""
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 96;
createpolicy.fractional.L2::evict_first.b64 %w3, 1.0;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
    [%r2+{DATA}], [%a0+16], 96, [%r2], %w3;
{WAIT}
setp.lt.u32 %p2, %r1, 6; shl.b32 %r4, %r1, 4; add.u32 %r4, %r4, %r2;
@%p2 ld.shared.u32 %r5, [%r4+{DATA}]; add.u32 %r5, %r5, 1000;
@%p2 st.shared.u32 [%r4+{DATA}], %r5;
fence.proxy.async; bar.warp.sync -1;
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%a1+32], [%r2+{DATA}], 96;
@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
"""  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS[:6])
def test_runs_of_bytes(moment: Any) -> None:
    source, out = numbers((64,), np.uint32), numbers((64,), np.uint32)
    out[...] = 0
    run(BYTES, [source, out], async_copies=moment)
    expected = source[4:28].copy()
    expected[::4] += 1000
    np.testing.assert_array_equal(out[8:32], expected)
    assert not out[:8].any() and not out[32:].any()
    for old, new, kind in (
        ("[%a0+16]", "[%a0+8]", "misaligned"),
        (f"[%r2+{DATA}], [%a0", f"[%r2+{DATA + 8}], [%a0", "misaligned"),
        ("[%a0+16], 96", "[%a0+16], 88", "copy"),
        ("[%a0+16]", "[%a0+176]", "out of bounds"),
        ("[%a1+32]", "[%a1+176]", "out of bounds"),
        (f"[%r2+{DATA}], [%a0", "[%r2+65472], [%a0", "out of bounds"),
        ("%w3;\n", "%w1;\n", "cache policy"),
        ("fence.proxy.async;", "", "proxy"),
    ):
        assert BYTES.count(old) == 1, old
        with pytest.raises(EmulatorFault) as caught:
            run(BYTES.replace(old, new), [source, out], async_copies=moment)
        assert caught.value.kind == kind, (new, str(caught.value))


SOURCE = """
struct alignas(64) Map { unsigned char bytes[128]; };
extern "C" __global__ void load_box(const void*, uint4* to, const __grid_constant__ Map map) {
  __shared__ alignas(1024) uint4 tile[128];
  __shared__ unsigned long long arrived;
  const unsigned at = __cvta_generic_to_shared(tile), barrier = __cvta_generic_to_shared(&arrived);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" ::"r"(barrier));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(at), "l"(&map), "r"(0), "r"(5), "r"(barrier) : "memory");
  }
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier) : "memory");
  for (int i = threadIdx.x; i < 128; i += 32) to[i] = tile[i];
}
"""


@needs_nvcc
@pytest.mark.parametrize("moment", MOMENTS[:4])
def test_a_kernel_of_nvcc(moment: Any) -> None:
    array, out = numbers((24, 64)), np.zeros(2048, np.uint8)
    extra = bytes(48) + tensor_map(array, (16, 64), 3)
    text = compile_cuda(SOURCE, "sm_90a")
    launch(text, [array, out], name="load_box", extra=extra, async_copies=moment)
    np.testing.assert_array_equal(out, swizzled(array[5:21].tobytes(), 1024, 3))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0, "
         "{%r1}], [%r2];", "coordinates"),
        ("cp.async.bulk.tensor.2d.shared::cta.global [%r2], [%a0, {%r1, %r1}], [%r2];",
         "completes"),
        ("cp.async.bulk.tensor.2d.im2col.shared::cta.global.mbarrier::complete_tx::bytes [%r2], "
         "[%a0, {%r1, %r1}], [%r2];", "unknown modifier"),
        ("ld.global.u32 %r1, [%a0, {%r1}];", "coordinates are not expected"),
        ("cp.async.bulk.wait_group %r1;", "not a constant"),
    ],
)  # fmt: skip
def test_forms_that_are_none(line: str, words: str) -> None:
    with pytest.raises(EmulatorError, match=words):
        run(line, [np.zeros(4, np.uint32)] * 2)
    with pytest.raises(EmulatorError, match=r"needs PTX ISA 8\.0 and sm_90"):
        launch(kernel("cp.async.bulk.commit_group;", 0, "sm_80"), [])
