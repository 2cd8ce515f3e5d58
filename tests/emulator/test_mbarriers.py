"""mbarriers: rings of buffers between warps, and the mistakes that the emulator finds in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashattn_jit.errors import EmulatorError, EmulatorFault
from tests.emulator.harness import MOMENTS, kernel, launch

ITEMS = 6

INIT = """
mov.u32 %r1, %tid.x; and.b32 %r3, %r1, 31; shl.b32 %r4, %r3, 2;
setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r3, 0; setp.lt.u32 %p2, %r1, 32;
mov.u32 %r2, buffer; mov.u32 %r10, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 32; @%p0 mbarrier.init.shared::cta.b64 [%r2+8], 32;
@%p0 mbarrier.init.shared::cta.b64 [%r2+16], 1; @%p0 mbarrier.init.shared::cta.b64 [%r2+24], 1;
bar.sync 0;
"""
"""Two mbarriers of full buffers, for 32 threads, and two of empty ones, for a thread."""

PLACE = """
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r13, %r12, 1;
shl.b32 %r14, %r11, 3; add.u32 %r14, %r14, %r2;
shl.b32 %r15, %r11, 7; add.u32 %r15, %r15, %r2; add.u32 %r15, %r15, %r4;
"""
"""Of item %r10: parity %r12 and its opposite, the mbarriers at %r14, the own word at %r15 + 128."""

RING = (
    INIT
    + "@%p2 bra CONSUMER;\n"
    + f"PRODUCER: {PLACE}"
    + """
    WAIT_EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14+16], %r13;
    @!%p3 bra WAIT_EMPTY;
    mad.lo.u32 %r16, %r10, 100, %r3; st.shared.u32 [%r15+128], %r16;
    mbarrier.arrive.shared::cta.b64 _, [%r14];
    """
    + f"add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, {ITEMS}; @%p4 bra PRODUCER;\n bra DONE;\n"
    + f"CONSUMER: {PLACE}"
    + """
    WAIT_FULL: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12;
    @!%p3 bra WAIT_FULL;
    xor.b32 %r17, %r15, 4; ld.shared.u32 %r16, [%r17+128];
    bar.warp.sync -1;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r14+16];
    shl.b32 %r18, %r10, 7; add.u32 %r18, %r18, %r4; cvt.u64.u32 %w1, %r18; add.u64 %w1, %w1, %a0;
    st.global.u32 [%w1], %r16;
    """
    + f"add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, {ITEMS}; @%p4 bra CONSUMER;\n DONE:"
)
"""Warp 1 passes items to warp 0 through two buffers."""


def run(lines: str, *, threads: int = 64, **options: Any) -> np.ndarray:
    out = np.zeros((ITEMS, 32), np.uint32)
    text = kernel(lines, 1, "sm_90", shared=512)
    launch(text, [out], block=(threads, 1, 1), step_limit=1 << 22, **options)
    return out


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, (old, text.count(old))
    return text.replace(old, new)


def fault(lines: str, **options: Any) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        run(lines, **options)
    return caught.value


EXPECTED = 100 * np.arange(ITEMS)[:, None] + (np.arange(32) ^ 1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_ring(moment: Any) -> None:
    np.testing.assert_array_equal(run(RING, async_copies=moment), EXPECTED)


POLLING = RING.replace("try_wait", "test_wait")
STATES = changed(
    changed(RING, "_, [%r14];", "%w5, [%r14];"),
    "bra PRODUCER;",
    "bra PRODUCER; LAST: mbarrier.try_wait.acquire.cta.shared::cta.b64 %p5, [%r14], %w5, 1000;"
    "@!%p5 bra LAST;",
)
GENERIC = changed(
    RING, "_, [%r14];", "_, [%w9];"
).replace("PRODUCER: ", "PRODUCER:\n").replace(
    "WAIT_EMPTY:", "cvt.u64.u32 %w8, %r14; cvta.shared.u64 %w9, %w8; WAIT_EMPTY:"
).replace("arrive.shared::cta.b64 _, [%w9]", "arrive.release.cta.b64 _, [%w9]")  # fmt: skip


@pytest.mark.parametrize("lines", [POLLING, STATES, GENERIC], ids=["polling", "states", "generic"])
@pytest.mark.parametrize("moment", MOMENTS[:6])
def test_other_forms(lines: str, moment: Any) -> None:
    """Threads that poll, waits for a state instead of a parity, and generic addresses."""
    np.testing.assert_array_equal(run(lines, async_copies=moment), EXPECTED)


MISTAKES = {
    "init without a barrier": ("bar.sync 0;", "", ("race", "mbarrier")),
    "parity of full not flipped": ("[%r14], %r12;", "[%r14], 0;", ("race", "deadlock")),
    "parity of empty not flipped": ("[%r14+16], %r13;", "[%r14+16], 1;", ("race", "deadlock")),
    "a count too large": ("[%r2+16], 1;", "[%r2+16], 2;", ("deadlock",)),
    "a count too small": ("b64 [%r2], 32;", "b64 [%r2], 31;", ("race", "mbarrier", "deadlock")),
    "overwritten before release": ("@!%p3 bra WAIT_EMPTY;", "bra GO; GO:", ("race", "deadlock")),
    "read before the wait": (
        "WAIT_FULL: mbarrier.try_wait",
        "ld.shared.u32 %r16, [%r15+128]; WAIT_FULL: mbarrier.try_wait",
        ("race", "uninitialised"),
    ),
    "released before the read": (
        "xor.b32 %r17, %r15, 4; ld.shared.u32 %r16, [%r17+128];\n    bar.warp.sync -1;\n"
        "    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r14+16];",
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r14+16];"
        "xor.b32 %r17, %r15, 4; ld.shared.u32 %r16, [%r17+128];",
        ("race",),
    ),
    "released for lanes that still read": ("bar.warp.sync -1;", "", ("race",)),
    "a relaxed arrival": ("arrive.shared::cta.b64 _, [%r14];",
                          "arrive.relaxed.cta.shared::cta.b64 _, [%r14];", ("race",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("moment", MOMENTS[:6])
def test_a_mistake_is_found(mistake: str, moment: Any) -> None:
    old, new, kinds = MISTAKES[mistake]
    lines = changed(RING, old, new)
    if mistake == "overwritten before release":
        lines = changed(
            lines, "WAIT_EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14+16], %r13;", ""
        )
    assert fault(lines, async_copies=moment).kind in kinds


def test_a_deadlock_names_the_mbarrier() -> None:
    text = str(fault(changed(RING, "[%r2+16], 1;", "[%r2+16], 2;")))
    assert "warp 1 lanes 0xffffffff at PTX line" in text
    expected = "mbarrier buffer + 16, 1 of 2 arrivals pending, tx-count 0, phase 0"
    assert f"mbarrier.try_wait.parity.shared::cta.b64, {expected}" in text


def test_uses_that_cannot_be() -> None:
    for lines, words in (
        ("mbarrier.arrive.shared::cta.b64 _, [%r2+40];", "no mbarrier has been initialised there"),
        ("@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;", "init of an mbarrier that is one already"),
        ("@%p0 mbarrier.init.shared::cta.b64 [%r2+32], 0;", "an mbarrier for 0 arrivals"),
        ("ld.shared.u32 %r9, [%r2];", "a read of bytes of the mbarrier that was initialised at"),
        ("@%p0 st.shared.u32 [%r2+12], %r1;", "a write of bytes of the mbarrier"),
        ("@%p0 mbarrier.arrive.shared::cta.b64 _, [%r2+16], 2;", "more arrivals than the phase"),
        ("@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1048576;", "out of range"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r2], 2;", "a parity of 2"),
        ("mov.u64 %w1, 7; mbarrier.test_wait.shared::cta.b64 %p4, [%r2], %w1;", "the state is"),
        ("mbarrier.arrive.b64 _, [%a0];", "not one of shared memory"),
        ("@%p0 mbarrier.init.shared::cta.b64 [%r2+36], 1;", "an mbarrier of 8 bytes"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r2], 0;"
         "@%p0 mbarrier.inval.shared::cta.b64 [%r2];", "since the read by"),
    ):  # fmt: skip
        assert words in str(fault(INIT + lines)), words


def test_an_mbarrier_ends() -> None:
    """Its bytes are ordinary ones again, after a barrier, and may become another mbarrier."""
    lines = INIT + "mbarrier.arrive.shared::cta.b64 %w1, [%r2], 1;" + "bar.sync 0;" * 2
    lines = lines.replace("[%r2], 32;", "[%r2], 64;")
    lines += "@%p0 mbarrier.inval.shared::cta.b64 [%r2]; @%p0 st.shared.u32 [%r2], 5;"
    lines += "@%p0 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0;"
    lines += "@%p0 mbarrier.arrive.shared::cta.b64 %w1, [%r2];"
    lines += "mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;"
    run(lines)


def test_threads_that_drop_out() -> None:
    """Warp 1 arrives for the last time in the first phase: the later ones need warp 0 only."""
    lines = (
        INIT.replace("[%r2], 32;", "[%r2], 64;")
        + """
    @!%p2 mbarrier.arrive_drop.shared::cta.b64 %w1, [%r2];
    @%p2 mbarrier.arrive.shared::cta.b64 %w1, [%r2];
    @%p2 mbarrier.arrive.shared::cta.b64 %w1, [%r2];
    @%p2 mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 1;
    """
    )
    waiting = "@%p2 mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;"
    place = lines.index("@%p2 mbarrier.arrive.", lines.index("@%p2 mbarrier.arrive.") + 1)
    for moment in MOMENTS:
        run(lines[:place] + waiting + lines[place:], async_copies=moment)


COPIES = """
mul.wide.u32 %w2, %r1, 16; add.u64 %w3, %a0, %w2; shl.b32 %r5, %r1, 4; add.u32 %r5, %r5, %r2;
cp.async.cg.shared.global [%r5+1024], [%w3], 16;
"""
ARRIVAL = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2];"
READ = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra WAIT;
xor.b32 %r6, %r5, 528; ld.shared.u32 %r7, [%r6+1024];
shl.b32 %r8, %r1, 2; cvt.u64.u32 %w4, %r8; add.u64 %w4, %w4, %a1; st.global.u32 [%w4], %r7;
"""


def gather(lines: str, moment: Any) -> np.ndarray:
    source, out = np.arange(256, dtype=np.uint32), np.zeros(64, np.uint32)
    text = kernel(INIT.replace("[%r2], 32;", "[%r2], 64;") + lines, 2, "sm_90", shared=2048)
    launch(text, [source, out], block=(64, 1, 1), async_copies=moment, read_only=[0])
    return out


@pytest.mark.parametrize("moment", MOMENTS)
def test_copies_that_arrive(moment: Any) -> None:
    expected = 4 * (np.arange(64) ^ 33)
    np.testing.assert_array_equal(gather(COPIES + ARRIVAL + READ, moment), expected)
    counted = ARRIVAL.replace(".noinc", "") + "mbarrier.arrive.shared::cta.b64 _, [%r2];"
    np.testing.assert_array_equal(gather(COPIES + counted + READ, moment), expected)
    for wrong in (
        ARRIVAL + COPIES,  # the arrival does not wait for later copies
        COPIES + "mbarrier.arrive.shared::cta.b64 _, [%r2];",
        COPIES + ARRIVAL + "bra GO;",
    ):
        with pytest.raises(EmulatorFault) as caught:
            gather(wrong + changed(READ, "xor.b32", "GO: xor.b32"), moment)
        assert caught.value.kind in ("in flight", "race", "uninitialised")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mbarrier.arrive.shared::cta.b64 [%r2];", "operands|kind|address"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %w1, [%r2], 1;", "unknown modifier"),
        ("mbarrier.init.shared::cta [%r2], 1;", "expected .b64"),
        ("mbarrier.test_wait.shared::cta.b64 %p1, [%r2], 0, 5;", "operands"),
        ("cp.async.mbarrier.wait.b64 [%r2];", "expected .arrive"),
    ],
)
def test_forms_that_are_none(line: str, words: str) -> None:
    with pytest.raises(EmulatorError, match=words):
        run(line)
