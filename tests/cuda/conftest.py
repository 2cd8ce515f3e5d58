"""All tests here compile CUDA kernels; without nvcc they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.stand_in_driver import driver, stand_in_library  # noqa: F401 - fixtures
from tests.harness.toolkit import needs_nvcc

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(needs_nvcc)
