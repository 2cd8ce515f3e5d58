"""Where tests/gpu runs: on CUDA device 0, or as `FAJIT_GPU_TESTS` says.

`emulated:sm_90`: the tests that need no graph or stream, in the emulator; one in `SHARE` by turns.
`compile:sm_90`: all of these, but kernels are only compiled for the target, into the cache: nothing
is launched and no value is compared.
"""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "FAJIT_GPU_TESTS"
SHARE = 200
MODE, _, NAMED = os.environ.get(VARIABLE, "").partition(":")
EMULATED, COMPILE_ONLY = MODE == "emulated", MODE == "compile"

ON_GPU = not (EMULATED or COMPILE_ONLY)
DEVICE = "cuda" if ON_GPU else "cpu"
TARGET = None if ON_GPU else f"emulated:{NAMED}"
"""Of calls; None for the device's own."""

REASON = ""
if ON_GPU and not torch.cuda.is_available():
    REASON = "torch sees no CUDA device"

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs, streams or devices")


def synchronize() -> None:
    """Waits for the device, and raises the errors of its work."""
    if ON_GPU:
        torch.cuda.synchronize()
