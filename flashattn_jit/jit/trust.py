"""Which folders and files may hold code that is loaded: our own, that nobody else can write.

Read-only layers may be root's as well: images and site installations are.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from pathlib import Path

from flashattn_jit import _C
from flashattn_jit.errors import UnsafeCacheError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
_ROOT = 0


def is_safe_root(root: Path, *, read_only: bool = False) -> bool:
    """Whether a folder of kernels is there. Raises UnsafeCacheError where others can write to it.

    A link on the way to it is followed only where nobody else could have put it there.
    """
    try:
        status = root.stat()
    except OSError:
        # Absent or out of reach. A writer finds out which when it makes the folder.
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeCacheError(f"the kernel cache {root} is no folder; {_remedy(read_only)}")
    _check(status, root, f"the kernel cache {root}", read_only)
    return True


def check_file(path: Path, *, installed: bool = False) -> None:
    """Raises UnsafeCacheError where others can write to a file of a read-only layer.

    installed: see `others_write`. Raises OSError where it is missing.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeCacheError(f"{path} is no regular file; {_remedy(True)}")
    _check(status, path, f"the pack {path}", read_only=True, installed=installed)


def others_write(status: os.stat_result, *, installed: bool = False) -> bool:
    """Whether others may write to something that is loaded.

    installed: pip brought it, as it brought this package. Under a umask of 002 both are writable to
    their group: whoever is in that may change the code that runs here already.
    """
    bits = status.st_mode & _OTHERS_WRITE
    if installed and bits:
        own = os.stat(_C.__file__)  # noqa: PTH116
        if own.st_gid == status.st_gid:
            bits &= ~own.st_mode | stat.S_IWOTH
    return bits != 0


def complaint(status: os.stat_result, *, read_only: bool) -> str:
    """What is wrong with the owner or the mode of something that is loaded; nothing: empty."""
    user = os.geteuid()
    if status.st_uid != user and not (read_only and status.st_uid == _ROOT):
        return f"belongs to user {status.st_uid}, not to user {user}"
    if status.st_mode & _OTHERS_WRITE:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it"
    return ""


def may_be_swapped(folder: Path) -> bool:
    """Whether others could put another folder in this one's place, through a folder above it.

    What is in it must then be loaded from what was verified, not by its path once more.
    """
    for above in folder.parents:
        try:
            status = above.stat()
        except OSError:
            return True
        if status.st_uid not in (_ROOT, os.geteuid()):
            return True
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            return True
    return False


def _check(
    status: os.stat_result, path: Path, name: str, read_only: bool, installed: bool = False
) -> None:
    user = os.geteuid()
    if status.st_uid != user and not (read_only and status.st_uid == _ROOT):
        raise UnsafeCacheError(
            f"{name} belongs to user {status.st_uid}, not to user {user}, and loading kernels from "
            f"it would run their code; {_remedy(read_only)}"
        )
    if others_write(status, installed=installed):
        raise UnsafeCacheError(
            f"{name} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it, and "
            "loading kernels from it would run their code; check what is in it, then run: "
            f"chmod go-w {path}"
        )
    if os.path.realpath(path) != str(path):
        _check_links(path, name)


def _check_links(path: Path, name: str) -> None:
    """Follows every link on the way to `path`, as the system does."""
    here, pending, links = "/", deque(path.parts[1:]), 0
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)  # noqa: PTH120
            continue
        _check_folder(here, name)
        step = os.path.join(here, part)  # noqa: PTH118
        status = os.lstat(step)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if status.st_uid not in (_ROOT, os.geteuid()) or links > _MOST_LINKS:
            raise UnsafeCacheError(
                f"{name} lies behind the link {step} of user {status.st_uid}, who could lead it "
                "elsewhere; name the folder itself"
            )
        target = Path(step).readlink()
        if target.is_absolute():
            here = "/"
        pending.extendleft(reversed([part for part in target.parts if part != "/"]))


def _check_folder(folder: str, name: str) -> None:
    status = os.lstat(folder)
    is_ours = status.st_uid in (_ROOT, os.geteuid())
    if not is_ours or (status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX):
        raise UnsafeCacheError(
            f"{name} lies behind a link, and others may write to {folder} on the way to it, so "
            f"could lead it elsewhere; name the folder itself, or run: chmod go-w {folder}"
        )


def _remedy(read_only: bool) -> str:
    if read_only:
        return "name another in FLASHATTN_JIT_CACHE_PATH, owned by you or by root"
    return "set FLASHATTN_JIT_CACHE_DIR to a folder of your own"
