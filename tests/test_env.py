"""Environment variables: defaults, values, and the errors for wrong values."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.errors import EnvironmentVariableError
from tests.harness import processes


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE_DIR", "COMPILE", "CXX", "LOCK_DIR", "LOCK_WAIT_S", "LOG"):
        monkeypatch.delenv(f"FLASHATTN_JIT_{name}", raising=False)
    monkeypatch.delenv("CXX", raising=False)


def test_the_cache_folder_is_the_users_unless_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "flashattn_jit"
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == Path.home() / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", "kernels")
    assert env.cache_dir() == tmp_path / "kernels"


def test_platformdirs_is_not_imported_when_a_folder_is_set() -> None:
    program = (
        "import os, sys; os.environ['FLASHATTN_JIT_CACHE_DIR'] = '/x'\n"
        "from flashattn_jit import env; env.cache_dir(); print('platformdirs' in sys.modules)"
    )
    done = processes.run(["-c", program], check=True)
    assert done.stdout == "False\n"


def test_the_compiler_is_ours_then_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.cxx() == "c++"
    monkeypatch.setenv("CXX", "clang++")
    assert env.cxx() == "clang++"
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "ccache g++")
    assert env.cxx() == "ccache g++"


@pytest.mark.parametrize("mode", ["missing", "always", "never"])
def test_modes_of_compiling(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    assert env.compile_mode() == "missing"
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", mode)
    assert env.compile_mode() == mode


def test_waits_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.lock_wait_s() == 300
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_WAIT_S", "0.5")
    assert env.lock_wait_s() == 0.5


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_wait_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_WAIT_S", value)
    with pytest.raises(EnvironmentVariableError, match=rf"FLASHATTN_JIT_LOCK_WAIT_S='{value}'"):
        env.lock_wait_s()


def test_the_log_level_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("flashattn_jit")
    before = logger.level
    try:
        env.apply_log_level()
        assert logger.level == before
        monkeypatch.setenv("FLASHATTN_JIT_LOG", "debug")
        env.apply_log_level()
        assert logger.level == logging.DEBUG
        monkeypatch.setenv("FLASHATTN_JIT_LOG", "loud")
        with pytest.raises(EnvironmentVariableError, match="debug, info, warning, error"):
            env.apply_log_level()
    finally:
        logger.setLevel(before)


def test_copies_of_the_emulator_are_late_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHATTN_JIT_EMULATOR_COPIES", raising=False)
    assert env.emulator_copies() == "late"
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", "early")
    assert env.emulator_copies() == "early"
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", "random:12")
    assert env.emulator_copies() == 12
    for wrong in ("never", "random", "random:", "random:x", "12"):
        monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", wrong)
        with pytest.raises(EnvironmentVariableError, match="late, early, random:SEED"):
            env.emulator_copies()


def test_pages_are_checked_as_set_or_by_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHATTN_JIT_CHECK_PAGES", raising=False)
    assert env.check_pages() is None
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", value)
        assert env.check_pages() is expected
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "on")
    with pytest.raises(EnvironmentVariableError, match="must be 0 or 1"):
        env.check_pages()
