"""Batches of random lengths, arrays, lists and strides: a plan that is right, or an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flashattn_jit.jit import toolchain
from flashattn_jit.jit.compiler import find_compiler

SECONDS = 6
MINIMAL_ARTIFACT = Path(__file__).parents[1] / "jit" / "minimal_artifact.cpp"


def test_no_batch_crashes_the_runtime_or_loses_a_row(tmp_path: Path) -> None:
    source = MINIMAL_ARTIFACT.read_text()
    toolchain.build(source, "0" * 64, "cpu:generic", find_compiler(), tmp_path)
    # A process of its own: what it must not do is die.
    program = [sys.executable, str(Path(__file__).with_name("batches.py"))]
    arguments = [str(tmp_path / "artifact.so"), "1", str(SECONDS)]
    run = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    refused, made = map(int, run.stdout.split())
    assert refused > 100
    assert made > 20
