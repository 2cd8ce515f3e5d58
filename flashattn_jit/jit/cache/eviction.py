"""Keeping a store below a number of bytes: the least recently used kernels go, none in use.

When a kernel was last used is its artifact's access time (a day's grain on most systems, as a hit
itself writes nothing), or the time when it was made. One that a process of this user has mapped
stays, as does one that was made a moment ago: it may be about to be mapped. An entry is moved aside
before it is removed, and moved back if it was mapped in between.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit.env import format_bytes
from flashattn_jit.errors import InputError
from flashattn_jit.jit.cache.entry import ARTIFACT, META
from flashattn_jit.jit.cache.store import EVICTED, Store

log = logging.getLogger(__name__)

GRACE_S = 600.0
"""How young an entry is that is kept in any case."""

# How old a look at what is in use may be when an entry is moved aside: one that is in use should
# not even be missed for a moment.
_LOOK_S = 0.1
# What is left behind by builders that were killed, and for people to look at: seconds it is kept.
_LEFTOVERS = {
    ".staging": 3600.0,
    EVICTED: 3600.0,
    ".quarantine": 7 * 86400.0,
    ".failed": 30 * 86400.0,
}


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do with `dry_run`. Bytes are those of files on disk.

    in_use and young count kernels that are kept although they are beyond the limit. leftovers:
    bytes of abandoned builds, old failures and old corrupt entries.
    """

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int
    in_use: int
    young: int
    leftover_bytes: int
    dry_run: bool
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        did = "would remove" if self.dry_run else "removed"
        return (
            f"{did} {self.removed} kernels ({format_bytes(self.removed_bytes)}) and "
            f"{format_bytes(self.leftover_bytes)} of leftovers; {self.kept} kernels "
            f"({format_bytes(self.kept_bytes)}) stay, of these beyond the limit {self.in_use} in "
            f"use and {self.young} new"
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    path: Path
    bytes: int
    used: float
    made: float
    inode: int


def collect(
    store: Store, max_bytes: int, *, dry_run: bool = False, grace_s: float = GRACE_S
) -> Collected:
    """Removes the least recently used entries of a store until it takes at most `max_bytes`.

    Raises InputError for a negative limit, UnsafeCacheError, OSError where the store cannot be
    written.
    """
    if max_bytes < 0:
        raise InputError(f"a cache cannot have {max_bytes} bytes; max_bytes must be 0 or more")
    leftovers = _remove_leftovers(store, dry_run)
    entries = [one for path in store.paths() if (one := _measure(path))]
    total = sum(entry.bytes for entry in entries)
    removed: list[_Kept] = []
    in_use = young = 0
    mapped: set[int] = set()
    looked = float("-inf")
    now = time.time()
    for entry in sorted(entries, key=lambda one: (one.used, one.path)):
        if total <= max_bytes:
            break
        if now - entry.made < grace_s:
            young += 1
            continue
        if time.monotonic() - looked >= _LOOK_S:
            mapped, looked = mapped_inodes(), time.monotonic()
        if entry.inode in mapped or not (dry_run or _remove(store, entry)):
            in_use += 1
            continue
        removed.append(entry)
        total -= entry.bytes
    return Collected(
        removed=len(removed),
        removed_bytes=sum(entry.bytes for entry in removed),
        kept=len(entries) - len(removed),
        kept_bytes=total,
        in_use=in_use,
        young=young,
        leftover_bytes=leftovers,
        dry_run=dry_run,
        keys=tuple(entry.path.name for entry in removed),
    )


def remove(store: Store, path: Path) -> bool:
    """Removes one entry unless it is in use; whether it is gone. Raises OSError."""
    entry = _measure(path)
    if entry is None:
        return True
    return entry.inode not in mapped_inodes() and _remove(store, entry)


def mapped_inodes() -> set[int]:
    """The inodes of the artifacts that processes have mapped, as far as this user may look.

    Inodes and not paths: a container names a folder otherwise.
    """
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = process.joinpath("maps").read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and ARTIFACT.encode() in fields[5]:
                inodes.add(int(fields[4]))
    return inodes


def _measure(path: Path) -> _Kept | None:
    """What an entry takes and when it was used. Reads nothing, which would be a use."""
    try:
        files = {file.name: file.lstat() for file in path.iterdir()}
        decisive = files.get(ARTIFACT) or files.get(META) or path.stat()
    except FileNotFoundError:
        return None
    return _Kept(
        path=path,
        bytes=sum(status.st_size for status in files.values()),
        used=max(decisive.st_atime, decisive.st_mtime),
        made=decisive.st_mtime,
        inode=files[ARTIFACT].st_ino if ARTIFACT in files else 0,
    )


def _remove(store: Store, entry: _Kept) -> bool:
    """Whether the entry is gone. It is not where it came into use meanwhile."""
    aside = store.move_aside(entry.path, EVICTED)
    if aside is None:
        return True
    if entry.inode and entry.inode in mapped_inodes():
        # Where it was built anew since, that one serves; this one's code stays mapped.
        with contextlib.suppress(OSError):
            aside.rename(entry.path)
            aside.parent.rmdir()
            return False
    shutil.rmtree(aside.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        entry.path.parent.rmdir()
    log.debug("removed kernel %s", entry.path.name)
    return True


def _remove_leftovers(store: Store, dry_run: bool) -> int:
    """Removes what builders left that are gone. Returns its bytes."""
    size, now = 0, time.time()
    for name, longest_s in _LEFTOVERS.items():
        for path in store.base.joinpath(name).glob("*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if now - status.st_mtime < longest_s or not stat.S_ISDIR(status.st_mode):
                    continue
                size += sum(f.lstat().st_size for f in path.rglob("*") if not f.is_dir())
                if not dry_run:
                    shutil.rmtree(path, ignore_errors=True)
    return size
