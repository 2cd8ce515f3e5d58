"""A verified kernel that some layer has, and how its code gets into the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashattn_jit.jit.counters import LayerName
from flashattn_jit.jit.entry import ARTIFACT, Entry, check_content, read_file, stepped_down_to
from flashattn_jit.jit.trust import may_be_swapped

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# Loaded code is mapped from these, and glibc takes a path that it knows for the same library.
_kept_descriptors: list[int] = []


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel: which layer has it and where, and its files, verified when they are read.

    `path` is the entry's folder, or the pack or URL that holds it. `in_folder` says whether its
    artifact is loaded from there: not where others could put another folder in its place between
    its verification and its loading. `head` holds the artifact's first bytes.
    """

    key: str
    compiler_id: str
    layer: LayerName | str
    path: Path
    meta: Mapping[str, Any] = field(repr=False)
    head: bytes = field(repr=False)
    read: Callable[[str], bytes] = field(repr=False)
    in_folder: bool = True

    @property
    def stepped_down_to(self) -> str | None:
        """The key of the kernel with a smaller tile that takes this one's place."""
        return stepped_down_to(self.meta)

    @property
    def artifact_bytes(self) -> int:
        """The size of its shared object."""
        expected = self.meta.get("files", {}).get(ARTIFACT)
        return int(expected["bytes"]) if expected else 0

    @contextlib.contextmanager
    def loadable(self) -> Iterator[Path]:
        """A file that the artifact can be loaded from, for as long as this lasts. Raises OSError.

        One that lies in no folder of its own is put into memory: nothing is written to a disk.
        """
        if self.in_folder:
            yield self.path / ARTIFACT
            return
        content = self.read(ARTIFACT)
        try:
            path = _memory_file(content, self.key)
        except OSError:
            with tempfile.TemporaryDirectory(prefix="flashattn_jit-") as folder:
                copy = Path(folder) / ARTIFACT
                copy.write_bytes(content)
                yield copy
            return
        yield path


def found_in_folder(entry: Entry, layer: LayerName | str, *, read_only: bool = False) -> Found:
    """An entry of a store."""

    def read(name: str) -> bytes:
        content = read_file(
            entry.path / name, entry.meta["files"][name]["bytes"], read_only=read_only
        )
        check_content(name, content, entry.meta)
        return content

    return Found(
        entry.key,
        entry.compiler_id,
        layer,
        entry.path,
        entry.meta,
        entry.head,
        read,
        in_folder=not may_be_swapped(entry.path),
    )


def found_in_memory(
    key: str,
    compiler_id: str,
    layer: LayerName,
    path: Path,
    meta: Mapping[str, Any],
    read: Callable[[str], bytes],
) -> Found:
    """A kernel whose files are read through `read`, its artifact verified now.

    `meta` was checked. Raises ValueError where the artifact is not what it says.
    """

    def checked(name: str) -> bytes:
        content = read(name)
        check_content(name, content, meta)
        return content

    head = checked(ARTIFACT)[:64] if ARTIFACT in meta["files"] else b""
    return Found(key, compiler_id, layer, path, meta, head, checked, in_folder=False)


def _memory_file(content: bytes, key: str) -> Path:
    """A file in memory that nobody can change any more, kept for the life of the process."""
    descriptor = os.memfd_create(f"flashattn_jit-{key[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        path = Path(f"/proc/self/fd/{descriptor}")
        path.stat()  # there may be no /proc
    except BaseException:
        os.close(descriptor)
        raise
    _kept_descriptors.append(descriptor)
    return path
