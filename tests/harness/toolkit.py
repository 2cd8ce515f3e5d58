"""The mark of tests that compile CUDA kernels."""

from __future__ import annotations

import pytest

from flashattn_jit.jit.compilation.nvcc import find_toolkit

needs_nvcc = pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
