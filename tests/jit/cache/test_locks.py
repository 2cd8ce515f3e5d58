"""Build locks exclude other processes, end with their holder, and are waited for up to a limit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashattn_jit.jit.cache.locks import build_lock

KEY = "ab" * 32
HOLD = (
    "import sys, time; from flashattn_jit.jit.cache.locks import build_lock\n"
    "with build_lock(sys.argv[1], 0.0):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@contextlib.contextmanager
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock on KEY."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, KEY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_free_lock_is_had_at_once() -> None:
    with build_lock(KEY, 5.0) as waited:
        assert waited < 0.1


def test_locks_of_different_kernels_do_not_meet() -> None:
    with build_lock(KEY, 0.0), build_lock("cd" * 32, 0.0) as waited:
        assert waited < 0.1


def test_the_wait_for_a_stopped_holder_ends_and_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with holder() as process, caplog.at_level(logging.WARNING):
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with build_lock(KEY, 0.3) as waited:
            assert 0.3 <= waited <= time.monotonic() - start
    assert f"process {process.pid} on" in caplog.text


def test_a_killed_holder_leaves_nothing_to_wait_for() -> None:
    with holder() as process:
        process.kill()
        process.wait()
        with build_lock(KEY, 10.0) as waited:
            assert waited < 1.0


def test_a_lock_is_passed_on_when_it_is_released() -> None:
    with build_lock(KEY, 0.0):
        pass
    with build_lock(KEY, 10.0) as waited:
        assert waited < 0.1


@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_a_folder_that_others_can_write_holds_no_locks(tmp_path: Path, mode: int) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    locks.chmod(mode)
    with build_lock(KEY, 0.0):
        assert list(locks.iterdir()) == []


def test_a_link_planted_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    tmp_path.joinpath("locks").symlink_to(elsewhere)
    with build_lock(KEY, 0.0):
        assert list(elsewhere.iterdir()) == []


def test_without_any_folder_builds_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_DIR", os.devnull + "/locks")
    with build_lock(KEY, 5.0) as waited:
        assert waited == 0.0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_meanwhile_holds_no_lock() -> None:
    read, write = os.pipe()
    with build_lock(KEY, 0.0):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # lives until the test is over
            os._exit(0)
    try:
        with build_lock(KEY, 10.0) as waited:
            assert waited == 0.0
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


FORK_AND_DIE = """
import os, signal, sys
from flashattn_jit.jit.cache.locks import build_lock
with build_lock(sys.argv[1], 0.0):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.close(read)
    signal.pause()
"""


def test_nor_where_its_parent_is_killed() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", FORK_AND_DIE, KEY], **pipes)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "forked\n"
        process.kill()
        process.wait()
        with build_lock(KEY, 10.0) as waited:
            assert waited < 1.0
    finally:
        process.stdin.close()
        process.stdout.close()
