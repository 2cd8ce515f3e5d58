"""memcheck and racecheck find no error in a call of each template, where the tool works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.gpu.harness import Want
from tests.registry.case import Shape

ROOT = Path(__file__).resolve().parents[2]
_PATHS = ("/usr/local/cuda/bin/compute-sanitizer",
           "/usr/local/cuda/compute-sanitizer/compute-sanitizer")  # fmt: skip
WANTS = (Want("plain alibi", Shape(1, 4, 2, 1, 130, 64, 64), torch.bfloat16),)


@cache
def sanitizer() -> tuple[str, str]:
    """(path of the tool, reason why it cannot be used): one of them is empty."""
    path = shutil.which("compute-sanitizer") or next((p for p in _PATHS if Path(p).exists()), "")
    if not path:
        return "", "compute-sanitizer is not installed"
    probe = "import torch; torch.ones(1, device='cuda'); torch.cuda.synchronize(); print('probed')"
    done = _run([path, sys.executable, "-c", probe])
    if "probed" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout:
        return path, ""
    return "", f"compute-sanitizer does not work here: {(done.stdout + done.stderr)[-300:]}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_each_template_is_clean(tool):
    path, reason = sanitizer()
    if reason:
        pytest.skip(reason)
    done = _run([path, "--tool", tool, sys.executable, "-m", "tests.gpu.sanitized"])
    words = done.stdout + done.stderr
    assert "done" in done.stdout, words[-2000:]
    clean = "0 errors" in words if tool == "memcheck" else "0 hazards" in words
    assert clean, words[-4000:]
