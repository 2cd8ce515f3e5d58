"""All tests here compile CUDA kernels; without nvcc they are skipped."""

from __future__ import annotations

import pytest

from flashattn_jit.jit.compilation.toolchain import find_compiler


@pytest.fixture(scope="session")
def _has_nvcc() -> bool:
    return find_compiler("sm_80") is not None


@pytest.fixture(autouse=True)
def _needs_nvcc(_has_nvcc: bool) -> None:
    if not _has_nvcc:
        pytest.skip("needs nvcc: install a CUDA toolkit")
