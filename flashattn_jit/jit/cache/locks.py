"""One builder a kernel on this machine: flocks in a node-local folder, waited for with a bound.

The kernel releases a flock when its holder dies, so a killed builder leaves nothing behind; the
lock files themselves mean nothing and stay. Locks only save work: entries are published atomically,
so a builder that could not get its lock builds privately and harms nobody.
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

log = logging.getLogger(__name__)

# A lock lives as long as any process has its descriptor; a forked child gives its own back.
_held: set[int] = set()

# Many that wait for one build go on one after the other, each within a poll of the one before.
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.02
_WARN_AFTER_S = 5.0


@contextlib.contextmanager
def build_lock(key: str, wait_s: float) -> Iterator[float]:
    """Holds the machine's lock on building `key`, or nothing where it cannot be had in time.

    Yields the seconds waited, 0 where it was free. Never raises on behalf of the lock.
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
            # Closing alone would leave it to whatever was forked meanwhile.
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
    """Folders that locks may lie in: the chosen one, else node-local ones, the best first."""
    if chosen := env.lock_dir():
        return [chosen]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parents = (*([runtime] if runtime else []), "/dev/shm", tempfile.gettempdir())
    return [Path(parent, f"flashattn_jit-{os.geteuid()}") for parent in parents]


def not_ours(status: os.stat_result) -> str:
    """Why what lies there is no folder of ours alone; empty where it is one.

    Another user may have made the name first in a shared folder: then it is not ours to use.
    """
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    return "others may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def folder(make: bool = True) -> Path | None:
    """The first node-local folder that is ours alone; made where it is missing, if it may be."""
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
