"""Writes packs: each file of an entry is read once, compared with its digest, put in its place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, PackError
from ..jit import zip_frame
from ..jit.entry import META
from ..jit.layers import Found
from ..jit.pack_index import (
    INDEX,
    MAX_INDEX_BYTES,
    FileDigest,
    Listed,
    complaint,
    index_text,
    member_name,
)
from ..jit.zip_frame import Member


def write_pack(
    path: str | os.PathLike[str],
    sources: Sequence[Found],
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Writes a pack of some entries, whole or not at all; returns its size in bytes.

    Equal entries make equal bytes, in whatever order they come. Each file is read once and compared
    with the digest that its entry states. Raises PackError for one that differs or that a pack
    cannot hold, OSError where it cannot be written.
    """
    path = checked_path("path", path)
    check_place(path)
    with replacing(path) as file:
        return write_entries(file, sources, progress)


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it was written whole, and else leaves nothing.

    mode: the file's; by default all may read it whom the umask lets.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644 & ~_umask() if mode is None else mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def checked_path(name: str, value: object) -> Path:
    """A path that the caller gave, as a `Path`; name: of the argument.

    Raises InputError where it is no text, PackError where no file can have that name.
    """
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InputError(f"{name} must be a str or an os.PathLike, got {type(value).__name__}")
    if not text:
        raise PackError(f"{name} is empty; give the name of a file or folder")
    try:
        if b"\0" not in os.fsencode(text):
            return Path(text)
    except UnicodeEncodeError:
        pass
    raise PackError(f"{name} {text!r} holds a character that no file name can have")


def check_place(path: Path) -> None:
    """Raises PackError where no pack can be written: its folder is missing, or it is a folder."""
    folder = path.parent
    if not folder.is_dir():
        nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
        if nearest == folder:
            what = "is no folder; correct the path"
        elif nearest.is_dir():
            made = f"mkdir -p {shlex.quote(str(folder))}"
            what = f"does not exist; make it ({made}), or correct the path"
        else:
            what = f"does not exist, and {nearest} is no folder; correct the path"
        raise PackError(f"cannot write the pack {path}: its folder {folder} {what}")
    if path.is_dir():
        raise PackError(f"cannot write the pack {path}: it is a folder; name a file in it")


def write_entries(
    file: BinaryIO,
    sources: Sequence[Found],
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Writes a pack to an open file that is empty; returns its size. See `write_pack`."""
    chosen = {(s.compiler_id, s.key): s for s in sources}
    sources = [chosen[name] for name in sorted(chosen)]
    # Digests have a fixed width, so the index's length is known before they are.
    metas = [_meta_text(source) for source in sources]
    blank = [
        Listed(s.compiler_id, s.key, _blank_digests(s, len(m)))
        for s, m in zip(sources, metas, strict=True)
    ]
    for source, listed in zip(sources, blank, strict=True):
        if reason := complaint(listed):
            raise PackError(f"{source.path} cannot be packed: {reason}")
    index_bytes = len(index_text(blank))
    if index_bytes > MAX_INDEX_BYTES:
        raise PackError(
            f"{len(sources)} entries are too many for one pack; choose fewer, such as by target"
        )
    file.seek(zip_frame.local_bytes(Member(INDEX, 0, 0)) + index_bytes)
    members: list[Member] = []
    entries: list[Listed] = []
    for source, listed, meta in zip(sources, blank, metas, strict=True):
        digests: dict[str, FileDigest] = {}
        for name, (size, *_) in listed.files.items():
            content, sha256 = _read(source, name, meta)
            digests[name] = digest = FileDigest(size, sha256, zlib.crc32(content))
            path = member_name(source.compiler_id, source.key, name)
            members.append(Member(path, size, digest.crc32))
            file.write(zip_frame.local_header(members[-1]))
            file.write(content)
        entries.append(listed._replace(files=digests))
        if progress is not None:
            progress(len(entries), len(sources))
    index = index_text(entries)
    assert len(index) == index_bytes
    members.insert(0, Member(INDEX, index_bytes, zlib.crc32(index)))
    file.write(zip_frame.directory(members))
    end = file.tell()
    file.seek(0)
    file.write(zip_frame.local_header(members[0]) + index)
    return end


def _read(source: Found, name: str, meta: bytes) -> tuple[bytes, str]:
    """A file of an entry, compared with its digest."""
    if name == META:
        return meta, hashlib.sha256(meta).hexdigest()
    return read_file(source, name), str(source.meta["files"][name]["sha256"])


def read_file(source: Found, name: str) -> bytes:
    """A file of an entry. Raises PackError where it is not what its digest says."""
    try:
        return source.read(name)
    except (ValueError, OSError) as error:
        raise PackError(
            f"{source.path} cannot be packed: {error}; run: flashattn-jit cache verify"
        ) from error


def _blank_digests(source: Found, meta_bytes: int) -> dict[str, FileDigest]:
    """The sizes of an entry's files, by name; what its meta.json does not list is left."""
    sizes = {name: int(stated["bytes"]) for name, stated in source.meta["files"].items()}
    sizes[META] = meta_bytes
    return {name: FileDigest(sizes[name], "0" * 64, 0) for name in sorted(sizes)}


def _meta_text(source: Found) -> bytes:
    # As a store writes it: the same entry packed from a folder and from a pack is the same bytes.
    return (json.dumps(source.meta, indent=1, sort_keys=True) + "\n").encode()


def _umask() -> int:
    # There is no way to ask without setting it, which other threads would see.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
