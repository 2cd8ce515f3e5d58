"""Build locks: one builder per kernel and machine, by flocks in a node-local folder.

The operating system releases a flock when its holder dies, so a killed builder leaves no lock; the
empty lock files stay. Locks only save work: entries are published atomically, so a builder that
does not get the lock within the time limit may build as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flashattn_jit import env
from flashattn_jit.jit.cache.entry import complaint

log = logging.getLogger(__name__)

# A flock lasts as long as any process has its descriptor open, so a forked child closes these.
_held: set[int] = set()

# Processes that wait for one build get the lock in turn, each up to one poll after the other.
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.02
_WARN_AFTER_S = 5.0


@contextlib.contextmanager
def build_lock(key: str, wait_s: float) -> Iterator[float]:
    """Holds the build lock of `key`, or no lock if it cannot be acquired within `wait_s`.

    Yields the seconds waited, 0 if the lock was free. Errors of locking are never raised.
    """
    descriptor = _open(key)
    if descriptor is None:
        yield 0.0
        return
    _held.add(descriptor)
    try:
        waited = _acquire(descriptor, key, wait_s)
        yield waited
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            # A child process forked meanwhile may hold the descriptor, so closing is not enough.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(descriptor: int, key: str, wait_s: float) -> float:
    start = time.monotonic()
    poll, warned = _FIRST_POLL_S, False
    waited = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                log.debug("no lock on kernel %s (%s): building without", key[:16], error)
                return waited
        else:
            _write_holder(descriptor)
            return waited
        if waited >= wait_s:
            log.warning(
                "waited %.0f s for kernel %s, which %s builds: building it here as well",
                waited,
                key[:16],
                _read_holder(descriptor),
            )
            return waited
        if waited >= _WARN_AFTER_S and not warned:
            warned = True
            log.warning(
                "waiting for kernel %s, which %s builds", key[:16], _read_holder(descriptor)
            )
        time.sleep(min(poll, max(0.0, wait_s - waited)))
        waited = time.monotonic() - start
        poll = min(2 * poll, _LONGEST_POLL_S)


def _open(key: str) -> int | None:
    try:
        chosen = folder()
        if chosen is None:
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(chosen / f"{key[:32]}.lock", flags, 0o600)
    except OSError as error:
        log.debug("no lock on kernel %s (%s): building without", key[:16], error)
        return None


def candidates() -> list[Path]:
    """Folders for lock files: FLASHATTN_JIT_LOCK_DIR, else node-local ones, the best first."""
    if chosen := env.lock_dir():
        return [chosen]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parents = (*([runtime] if runtime else []), "/dev/shm", tempfile.gettempdir())
    return [Path(parent, f"flashattn_jit-{os.geteuid()}") for parent in parents]


def not_ours(status: os.stat_result) -> str:
    """Why a path is not a folder that only this user can write to; empty where it is.

    In a shared folder another user may have made a folder of this name first.
    """
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    wrong = complaint(status, read_only=False)
    return f"it {wrong}" if wrong else ""


def folder(make: bool = True) -> Path | None:
    """The first of `candidates` that only this user can write to; with `make` it may be made."""
    for path in candidates():
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            status = os.lstat(path)
        except OSError:
            continue
        if not not_ours(status):
            return path
    log.debug("no folder for build locks: building without")
    return None


def _write_holder(descriptor: int) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        age = time.time() - holder["since"]
        return f"process {holder['pid']} on {holder['host']} (for {age:.0f} s)"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _reset_after_fork() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
