"""memcheck finds no error in a call of each kind of kernel, where the tool works.

racecheck is information: `cp.async` whose data `__syncwarp` publishes may be reported falsely, and
it may be too slow for the time that there is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.gpu.checks import WORD
from tests.gpu.place import DEVICE, EMULATED

ROOT = Path(__file__).resolve().parents[2]
_PATHS = ("/usr/local/cuda/bin/compute-sanitizer",
           "/usr/local/cuda/compute-sanitizer/compute-sanitizer")  # fmt: skip
DRY = ["--dry-run"] if EMULATED else []
SECONDS = {"memcheck": 150, "racecheck": 60}  # of the 300 that benchmarks.gpu gives tests/gpu


@cache
def sanitizer() -> tuple[str, str]:
    """(path of the tool, reason why it cannot be used): one of them is empty."""
    path = shutil.which("compute-sanitizer") or next((p for p in _PATHS if Path(p).exists()), "")
    if not path:
        return "", "compute-sanitizer is not installed"
    probe = f"import torch; torch.ones(1, device={DEVICE!r}).sum().item(); print('probed')"
    done = _run([path, sys.executable, "-c", probe], 40)
    if "probed" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout:
        return path, ""
    return "", f"compute-sanitizer does not work here: {(done.stdout + done.stderr)[-300:]}"


def _run(command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    """The finished process; if it was stopped, with status 1 and that as its output."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, f"stopped after {seconds} s", "")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_each_kind_of_kernel_is_clean(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, reason = sanitizer()
    if reason:
        pytest.skip(reason)
    command = [path, "--tool", tool, sys.executable, "-m", "benchmarks.gpu", "smoke", *DRY]
    done = _run(command, SECONDS[tool])
    words = done.stdout + done.stderr
    if tool == "memcheck":
        assert WORD in done.stdout and "ERROR SUMMARY: 0 errors" in words, words[-4000:]
    else:
        summary = [line for line in words.splitlines() if "RACECHECK SUMMARY" in line]
        with capsys.disabled():
            print(f"\n{summary[-1] if summary else words[-300:]}")
