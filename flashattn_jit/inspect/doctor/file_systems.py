"""What a folder's file system allows: read from statvfs and the table of mounts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_NETWORK = (
    "nfs nfs4 cifs smb3 lustre gpfs beegfs ceph glusterfs afs 9p fuse.sshfs fuse.glusterfs "
    "fuse.gcsfuse fuse.s3fs fuse.ceph fuse.juicefs pvfs2 orangefs wekafs panfs"
).split()
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """kind: such as "ext4", "" where unknown. free: bytes that this user may still write."""

    kind: str
    free: int
    free_inodes: int
    noexec: bool
    noatime: bool
    read_only: bool

    @property
    def is_network(self) -> bool:
        """Whether other machines may change what lies there."""
        return self.kind in _NETWORK


def file_system(folder: Path) -> FileSystem:
    """That of an existing folder. Raises OSError."""
    status = os.statvfs(folder)
    # Some file systems report no inodes: then there is no limit to run into.
    return FileSystem(
        kind=_kind(folder.resolve()),
        free=status.f_bavail * status.f_frsize,
        free_inodes=status.f_favail if status.f_files else 2**62,
        noexec=bool(status.f_flag & os.ST_NOEXEC),
        noatime=bool(status.f_flag & os.ST_NOATIME),
        read_only=bool(status.f_flag & os.ST_RDONLY),
    )


def _kind(folder: Path) -> str:
    """The type of the mount that a folder lies on."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    deepest, found = -1, ""
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        path = Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), point))
        # The last of several mounts on one point hides the others.
        if folder.is_relative_to(path) and len(path.parts) >= deepest:
            deepest, found = len(path.parts), kind
    return found
