"""What a process that compiles kernels for the GPU tests runs. It needs no GPU, and takes none."""

from __future__ import annotations

import os
import sys

if "torch" not in sys.modules:  # a process of its own; where torch is loaded, it is too late
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def compile_one(want: object, target: str) -> str:
    """Compile one kernel; what went wrong, or an empty text."""
    from tests.gpu.harness import Want, compile_wanted

    assert isinstance(want, Want)
    try:
        compile_wanted(want, target)
    except Exception as error:  # reported by the test that needs it; the others go on
        return f"{want.case} {want.shape.id} {want.dtype}: {type(error).__name__}: {error}"
    return ""
