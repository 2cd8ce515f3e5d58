"""Batches of random lengths, arrays, lists and strides give a right plan or an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.toolchain import find_compiler

SECONDS = 4
MINIMAL_ARTIFACT = Path(__file__).parents[1] / "jit" / "minimal_artifact.cpp"
NATIVE = Path(__file__).parents[2] / "csrc"
SANITIZE = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def test_no_batch_crashes_the_runtime_or_loses_a_row(tmp_path: Path) -> None:
    source = MINIMAL_ARTIFACT.read_text()
    toolchain.build(source, "0" * 64, "cpu:generic", find_compiler(), tmp_path)
    # A new process, as a crash is the failure to be found.
    program = [sys.executable, str(Path(__file__).with_name("batches.py"))]
    arguments = [str(tmp_path / "artifact.so"), "1", str(SECONDS)]
    run = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    refused, made = map(int, run.stdout.split())
    assert refused > 100
    assert made > 20


def test_no_batch_makes_the_scheduler_leave_its_arrays(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    sources = [
        str(p)
        for p in (NATIVE / "scheduler").glob("*.cpp")
        if not p.name.endswith("bindings.cpp")  # they need Python
    ]
    program = str(tmp_path / "fuzz")
    build = subprocess.run(
        [*compiler.command, "-std=c++17", *SANITIZE, f"-I{NATIVE / 'include'}",
         f"-I{NATIVE / 'runtime'}",
         str(Path(__file__).with_name("plan_driver.cpp")), *sources, "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "cannot find -lasan" in build.stderr or "cannot find -lubsan" in build.stderr:
        pytest.skip("the compiler has no sanitizer runtime")
    assert build.returncode == 0, build.stderr
    run = subprocess.run([program, "1", str(SECONDS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    refused, planned = map(int, run.stdout.split())
    assert refused > 200
    assert planned > 100
