"""Code of the processes that compile kernels for the GPU tests; they do not use the GPU."""

from __future__ import annotations

import os
import sys

if "torch" not in sys.modules:  # a spawned process; once torch is loaded it is too late
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def compile_one(want: object, target: str) -> str:
    """Compiles one kernel; returns the error, or an empty text."""
    from tests.gpu.harness import Want, compile_wanted

    assert isinstance(want, Want)
    try:
        compile_wanted(want, target)
    except Exception as error:  # reported by the test that needs it; the others go on
        return f"{want.case} {want.shape.id} {want.dtype}: {type(error).__name__}: {error}"
    return ""
