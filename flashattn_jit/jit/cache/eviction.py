"""Limits the size of a store: removes the least recently used kernels that are not in use.

The time of the last use of a kernel is its artifact's atime (which most systems update once a day;
a hit itself writes nothing), or its mtime if that is later. A kernel that a process of this user
has mapped is kept, and so is a new one, which may be about to be mapped. An entry is renamed before
it is removed, and renamed back if it was mapped in between.
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
"""Entries younger than this are always kept."""

# The greatest age of the list of mapped files when an entry is renamed, as a look-up must not miss
# an entry that is in use.
_LOOK_S = 0.1
# For how many seconds the folders of killed builders and those kept for inspection stay.
_LEFTOVERS = {
    ".staging": 3600.0,
    EVICTED: 3600.0,
    ".quarantine": 7 * 86400.0,
    ".failed": 30 * 86400.0,
}


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection, or with `dry_run` of a simulated one. Bytes are file sizes.

    in_use and young count kernels that are kept although they are beyond the limit.
    leftover_bytes: of abandoned builds, old failures and old corrupt entries.
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
    """Removes the least recently used entries of a store until it has at most `max_bytes`.

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
    """Removes one entry unless it is in use; returns whether it is removed. Raises OSError."""
    entry = _measure(path)
    if entry is None:
        return True
    return entry.inode not in mapped_inodes() and _remove(store, entry)


def mapped_inodes() -> set[int]:
    """The inodes of the artifacts mapped by the processes that this user may inspect.

    Inodes and not paths, which differ between containers.
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
    """An entry's size and times. Reads no file, as that would set its atime."""
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
    """Removes an entry unless it was mapped meanwhile; returns whether it is removed."""
    aside = store.move_aside(entry.path, EVICTED)
    if aside is None:
        return True
    if entry.inode and entry.inode in mapped_inodes():
        # The rename fails if it was built again meanwhile: then the mapped file stays valid.
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
    """Removes old leftovers, see `_LEFTOVERS`. Returns their size."""
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
