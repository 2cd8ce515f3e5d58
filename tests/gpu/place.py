"""Where tests/gpu runs: on CUDA device 0, or as `FAJIT_GPU_TESTS` says.

`emulated:sm_90`: the tests that need no graph or stream, in the emulator; one in `SHARE` by turns.
`compile:sm_90`: none; the kernels that they need are compiled for a target into the cache.
"""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "FAJIT_GPU_TESTS"
SHARE = 200
MODE, _, NAMED = os.environ.get(VARIABLE, "").partition(":")
EMULATED, COMPILE_ONLY = MODE == "emulated", MODE == "compile"

DEVICE = "cpu" if EMULATED else "cuda"
TARGET = f"emulated:{NAMED}" if EMULATED else None
"""Of calls; None for the device's own."""

REASON = ""
if COMPILE_ONLY:
    REASON = f"{VARIABLE} says that kernels are only compiled"
elif not EMULATED and not torch.cuda.is_available():
    REASON = "torch sees no CUDA device"

needs_gpu = pytest.mark.skipif(EMULATED, reason="needs CUDA graphs, streams or devices")


def synchronize() -> None:
    """Waits for the device, and raises the errors of its work."""
    if not EMULATED:
        torch.cuda.synchronize()
