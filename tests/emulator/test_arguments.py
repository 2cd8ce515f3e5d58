"""Arguments of emulated launches are checked before they reach the library."""

from __future__ import annotations

from typing import Any

import pytest

from flashattn_jit.errors import EmulatorError
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
