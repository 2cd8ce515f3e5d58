"""Folders of their own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.jit.store import Store
from tests.deploy.caches import add_entry


@pytest.fixture(autouse=True)
def private_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own cache and lock folders."""
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The cache of this test, with three entries for two targets."""
    made = Store(tmp_path / "cache")
    for name, target in (("a", "cpu:avx2"), ("b", "cpu:avx2"), ("c", "sm_90")):
        add_entry(made, name, target)
    return made
