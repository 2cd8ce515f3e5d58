"""A fixture that gives each test its own kernel cache; conftest.py of a folder imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashattn_jit import env


@pytest.fixture(autouse=True)
def private_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own cache and lock folders, and none of the package's other variables."""
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_INSTALLED", "0")
