"""The mark of tests that compile CUDA code."""

from __future__ import annotations

import pytest

from flashattn_jit.jit.compilation.toolchain import find_compiler

needs_nvcc = pytest.mark.skipif(
    find_compiler("sm_80") is None, reason="needs nvcc: install a CUDA toolkit"
)
