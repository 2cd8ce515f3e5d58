"""Who may have written what is loaded: nobody but us, and root in read-only layers, as container
images and site installations belong to root."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashattn_jit import _C

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


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


def complaint(status: os.stat_result, *, read_only: bool, installed: bool = False) -> str:
    """What is wrong with the owner or the mode of something that is loaded; nothing: empty."""
    if not is_ours(status, read_only):
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if others_write(status, installed=installed):
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
        if others_may_rename(status):
            return True
    return False


def is_ours(status: os.stat_result, read_only: bool) -> bool:
    """Whether something belongs to this user, or to root where it is `read_only`."""
    return status.st_uid == os.geteuid() or (read_only and status.st_uid == _ROOT)


def others_may_rename(folder: os.stat_result) -> bool:
    """Whether others may give what lies in a folder another name."""
    sticky = folder.st_mode & stat.S_ISVTX
    return not is_ours(folder, True) or (folder.st_mode & _OTHERS_WRITE != 0 and not sticky)
