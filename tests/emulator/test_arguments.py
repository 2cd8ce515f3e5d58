"""Arguments of emulated launches are checked before they reach the library."""

from __future__ import annotations

from typing import Any

import pytest

from flashattn_jit.errors import EmulatorError, EmulatorFault
from flashattn_jit.jit.emulator import programs
from tests.harness import processes

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k() { ret; }
.visible .entry spin() { LOOP: bra LOOP; }
"""


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": (1, 1)}, {"grid": (2**32, 1, 1)}, {"grid": (1, -1, 1)}, {"grid": (1.0, 1, 1)},
        {"block": (32, 1, 1, 1)}, {"shared_bytes": 2**32}, {"num_threads": -1},
        {"kernel": "k\0zzz"}, {"allocations": [("x\x1fy", 0, 1, True)]},
        {"allocations": [("x", 0, -1, True)]}, {"allocations": [("x", 0, 1, True, True, True)]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_errors(wrong: dict[str, Any]) -> None:
    given = {
        "kernel": "k", "grid": (1, 1, 1), "block": (32, 1, 1), "shared_bytes": 0, "params": b"",
        "allocations": [],
    }  # fmt: skip
    program = programs.Program(PTX)
    program.run(**given)
    with pytest.raises(EmulatorError):
        program.run(**{**given, **wrong})


def test_text_behind_a_nul_is_an_error() -> None:
    with pytest.raises(EmulatorError, match="ptx"):
        programs.Program(PTX + "\0garbage")


def test_a_process_ends_while_a_thread_runs_a_kernel() -> None:
    code = f"""
import threading, time
from flashattn_jit.jit.emulator import programs
program = programs.Program({PTX!r})
run = lambda: program.run("spin", (1, 1, 1), (32, 1, 1), 0, b"", [], num_threads=1)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.5)
"""
    assert processes.run(["-c", code]).returncode == 0


SIZES = {
    "grid": ((2**31 - 1, 1, 1), (1, 65535, 1), (1, 1, 65535)),
    "block": ((1024, 1, 1), (1, 1024, 1), (2, 8, 64), (16, 64, 1)),
}
TOO_MANY = {
    "grid": ((1, 65536, 1), (1, 1, 65536), (0, 1, 1), (1, 1, 0)),
    "block": ((1025, 1, 1), (1, 1025, 1), (1, 1, 65), (0, 1, 1), (33, 32, 1), (1024, 1024, 64)),
}


def sized(name: str, sizes: tuple[int, int, int]) -> None:
    """Runs an empty kernel with one block or one thread, but for one of its sizes."""
    given = {"grid": (1, 1, 1), "block": (1, 1, 1), name: sizes}
    programs.Program(PTX).run("k", shared_bytes=0, params=b"", allocations=[], **given)


@pytest.mark.parametrize("sizes", SIZES["block"] + SIZES["grid"][1:], ids=str)
def test_the_largest_sizes_of_a_launch_are_run(sizes: tuple[int, int, int]) -> None:
    sized("block" if sizes in SIZES["block"] else "grid", sizes)


@pytest.mark.parametrize(
    ("name", "sizes"), [(n, s) for n, all_sizes in TOO_MANY.items() for s in all_sizes], ids=str
)
def test_sizes_that_no_device_launches_are_errors(name: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(EmulatorError, match=f"a {name} of .* are possible"):
        sized(name, sizes)


def test_the_most_blocks_of_a_grid_are_not_refused() -> None:
    # They are too many to run: the first one is a fault.
    text = PTX.replace("k() { ret; }", "k() { .reg .b64 %a; mov.u64 %a, 0; st.global.u8 [%a], 1; }")
    program = programs.Program(text)
    with pytest.raises(EmulatorFault, match="out of bounds"):
        program.run("k", (2**31 - 1, 65535, 65535), (1, 1, 1), 0, b"", [])


def run_params(params: str, body: str) -> None:
    text = f".visible .entry p({params}) {{ .reg .b32 %r<4>; .reg .b64 %a<2>; {body} ret; }}"
    programs.Program(PTX + text).run("p", (1, 1, 1), (1, 1, 1), 0, bytes(64), [])


@pytest.mark.parametrize(
    ("params", "access", "align"),
    [
        (".param .align 8 .b8 s[32]", "ld.param.v4.u32 {%r0, %r1, %r2, %r3}, [s+16];", 8),
        (".param .u64 x, .param .align 4 .b8 s[32]", "ld.param.u64 %a0, [s];", 4),
        (".param .b8 s[32]", "ld.param.u32 %r0, [s];", 1),
    ],
)
def test_an_access_wider_than_the_declared_alignment_is_a_fault(
    params: str, access: str, align: int
) -> None:
    with pytest.raises(EmulatorFault, match=f"parameter s, which is aligned to {align}") as caught:
        run_params(params, access)
    assert caught.value.kind == "misaligned"
    run_params(params.replace(f".align {align} ", "").replace(".b8 s", ".align 16 .b8 s"), access)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (".param .align {} .u64 x", "parameter x is aligned to less than an element"),
        (".param .align {} .b8 x[24]", "an alignment is a power of two"),
    ],
)
def test_an_alignment_that_ptx_has_not_is_an_error(params: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run_params(params.format(4 if "u64" in params else 12), "")
    run_params(params.format(8), "")
