"""A cache and a pack of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.jit.cache.store import Store
from tests.deploy.caches import add_entry
from tests.harness.private_cache import private_environment  # noqa: F401 - a fixture of all tests here


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The cache of this test, with three entries for two targets."""
    made = Store(tmp_path / "cache")
    for name, target in (("a", "cpu:avx2"), ("b", "cpu:avx2"), ("c", "sm_90")):
        add_entry(made, name, target)
    return made


@pytest.fixture
def packed(store: Store, tmp_path: Path) -> Path:
    """A pack of the three entries."""
    path = tmp_path / "kernels.pack"
    pack(path)
    return path
