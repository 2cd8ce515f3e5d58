"""A pack: cache entries in one ZIP archive with random access.

    v1/<compiler id>/<first two hex digits>/<key>/<file>    entries as in a store, in order

Members are stored uncompressed, in the order of their names, with a fixed time and mode, so that
equal entries make equal bytes. A member's comment is its sha256; the archive's comment holds the
schema and the sha256 of the directory.

An archive is read as untrusted input. Names must be those of entries, which excludes path
traversal; members must be contiguous, so that none overlap and no size is wrong; and a file is
returned only after its digest was compared. The author of a pack decides which code runs, as with a
store's folder: a pack is trusted only if it belongs to this user or root and nobody else may write
to it.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from flashattn_jit.errors import PackError
from flashattn_jit.jit.cache.entry import (
    META,
    MOST_FILE_BYTES,
    MOST_META_BYTES,
    closing,
    complaint,
    is_compiler_id,
    is_file_name,
    is_key,
    parse_meta,
    sha256,
)
from flashattn_jit.jit.cache.store import entry_folder

EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of an archive's members: the earliest that ZIP can express."""

_SCHEMA = 2
_COMMENT = f"flashattn_jit pack of schema {_SCHEMA}, sha256 of the directory: ".encode()
_DIGEST_BYTES = 64
_MOST_DIRECTORY_BYTES = 1 << 28
_ATTRIBUTES = 0o100600 << 16


def write_archive(file: BinaryIO, members: Iterable[tuple[str, str, bytes]]) -> int:
    """Writes a pack to an open file that is empty; returns its size in bytes.

    members: the name, sha256 and content of each file, in the order of their names. Raises
    PackError where they are too many, OSError.
    """
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = _comment_of(b"")  # the final one has the same length
        for name, digest, content in members:
            archive.writestr(_member(name, digest), content)
    file.seek(archive.start_dir)
    directory = file.read()
    if len(directory) > _MOST_DIRECTORY_BYTES:
        raise PackError("kernels are too many for one pack; choose fewer, such as by target")
    file.seek(-len(archive.comment), os.SEEK_END)
    file.write(_comment_of(directory))
    return file.tell()


def _member(name: str, digest: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, EARLIEST)
    info.external_attr = _ATTRIBUTES
    info.comment = digest.encode("ascii")
    return info


def _header(name: str, size: int, checksum: int) -> bytes:
    """The local header in front of a member's content."""
    info = _member(name, "")
    info.CRC, info.compress_size, info.file_size = checksum, size, size
    return info.FileHeader()


_HEADER_BYTES = len(_header("", 0, 0))


def _comment_of(directory: bytes) -> bytes:
    """An archive's comment. directory: all bytes after its members."""
    return _COMMENT + sha256(directory[:-_DIGEST_BYTES]).encode("ascii")


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One entry of an open pack; its files by name, in order."""

    key: str
    compiler_id: str
    files: dict[str, zipfile.ZipInfo]
    pack: PackFile = field(repr=False, compare=False)

    @property
    def folder(self) -> str:
        """Its folder in the archive: the one below a store's root."""
        return entry_folder(self.compiler_id, self.key)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its meta.json. Raises PackError where that does not match the entry's key and files."""
        member = self.files[META]
        try:
            meta = parse_meta(self.read(META), self.key, self.compiler_id)
        except ValueError as error:
            raise self.pack.error(f"entry {self.folder!r}: {error}") from None
        listed = {name: (f["bytes"], f["sha256"]) for name, f in meta["files"].items()}
        held = {n: (m.file_size, m.comment.decode()) for n, m in self.files.items() if n != META}
        if listed != held:
            raise self.pack.error(f"member {member.filename!r} lists other files than the pack has")
        return meta

    def read(self, name: str) -> bytes:
        """A file's content. Raises PackError where its digest differs, KeyError."""
        content = self.read_unverified(name)
        member = self.files[name]
        if sha256(content).encode("ascii") != member.comment:
            raise self.pack.error(f"member {member.filename!r} is not what its digest says")
        return content

    def read_unverified(self, name: str) -> bytes:
        """A file's content, for callers that compare its digest. Raises PackError, KeyError."""
        member = self.files[name]
        header = _header(member.filename, member.file_size, member.CRC)
        if self.pack.read_at(member.header_offset, len(header)) != header:
            raise self.pack.error(f"the header of {member.filename!r} is not what it must be")
        return self.pack.read_at(member.header_offset + len(header), member.file_size)


class PackFile:
    """An open pack; a context manager. Replacing the file at its path does not change it.

    Opening reads the directory, not the entries. Safe in threads and after a fork.
    Raises PackError, naming the member, for a file that is not a valid pack, that belongs to
    another user or that others may write to (installed: see `entry.complaint`), and where it
    cannot be read.
    """

    _descriptor = -1

    def __init__(self, path: str | os.PathLike[str], *, installed: bool = False) -> None:
        self.path = Path(path)
        try:
            # O_NONBLOCK: opening a pipe would wait for its writer.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PackError(f"pack {self.path} cannot be read: {error.strerror}") from error
        try:
            _check_owner(self._descriptor, self.path, installed)
            self._entries = self._read_directory()
        except BaseException:
            self.close()
            raise
        self._by_key: dict[str, list[PackedEntry]] = {}
        for entry in self._entries:
            self._by_key.setdefault(entry.key, []).append(entry)

    def entries(self) -> Iterator[PackedEntry]:
        """All entries, in the order of their folders."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str, compiler_id: str | None = None) -> list[PackedEntry]:
        """The entries of a key, by one compiler or by all."""
        found = self._by_key.get(key, [])
        return [e for e in found if compiler_id is None or e.compiler_id == compiler_id]

    def read_at(self, begin: int, size: int) -> bytes:
        """Bytes of the archive; fewer at its end. Raises PackError where it was closed.

        Uses pread, as threads and forked processes share the file offset. One call reads at most
        2 GiB, more than a member or the directory can have.
        """
        try:
            return os.pread(self._descriptor, size, begin)
        except OSError as error:
            raise PackError(f"pack {self.path} cannot be read: {error.strerror}") from error

    def error(self, reason: str) -> PackError:
        """The error for invalid content of this pack."""
        return PackError(f"pack {self.path}: {reason}; pack it again, or copy it again")

    def close(self) -> None:
        """Closes the file; its entries cannot be read any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> PackFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _read_directory(self) -> list[PackedEntry]:
        try:
            with (
                _BoundedFile(self._descriptor, closefd=False) as file,
                zipfile.ZipFile(file) as archive,
            ):
                members, start, comment = archive.infolist(), archive.start_dir, archive.comment
        except Exception as error:  # invalid bytes raise more than BadZipFile
            raise self.error(f"it is cut short, or no pack: {error}") from error
        if not comment.startswith(_COMMENT):
            raise self.error(f"its schema is not {_SCHEMA}, the one that this version reads")
        directory = self.read_at(start, os.fstat(self._descriptor).st_size - start)
        if _comment_of(directory) != comment:
            raise self.error("its directory is not what its digest says")
        entries: dict[str, PackedEntry] = {}
        end, last = 0, ""
        for member in members:
            name = member.orig_filename
            folder, _, file_name = name.rpartition("/")
            if folder not in entries:
                entries[folder] = self._entry(folder)
            if wrong := _complaint(member, file_name):
                raise self.error(f"member {name!r} {wrong}")
            if name <= last:
                raise self.error(f"member {name!r} is there twice or out of order")
            if member.header_offset != end:
                raise self.error(f"member {name!r} does not begin where the one before it ends")
            end, last = end + _HEADER_BYTES + len(name) + member.file_size, name
            entries[folder].files[file_name] = member
        if end != start:
            raise self.error(f"member {last!r} does not end where the directory begins")
        for folder, entry in entries.items():
            if META not in entry.files:
                raise self.error(f"entry {folder!r} has no {META}")
        return list(entries.values())

    def _entry(self, folder: str) -> PackedEntry:
        parts = folder.split("/")
        if len(parts) == 4 and is_compiler_id(parts[1]) and is_key(parts[3]):
            entry = PackedEntry(parts[3], parts[1], {}, self)
            if folder == entry.folder:
                return entry
        raise self.error(f"{folder!r} is no folder of an entry")


class _BoundedFile(io.FileIO):
    """A file whose reads are limited to the size of a directory, as its header is untrusted."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_DIRECTORY_BYTES:
            raise ValueError("its directory is too large")
        return super().read(size)


def _complaint(member: zipfile.ZipInfo, file_name: str) -> str:
    """Why a member, by itself, cannot be part of a pack; empty where it can."""
    if file_name != META and not is_file_name(file_name):
        return "has no plain file name"
    if member.flag_bits:
        return "is encrypted, or not plainly stored"
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        return "is compressed"
    if member.external_attr != _ATTRIBUTES:
        return "is no plain file, such as a link"
    if member.file_size > (MOST_META_BYTES if file_name == META else MOST_FILE_BYTES):
        return "is too large"
    if not is_key(member.comment.decode("latin-1")):
        return "has no digest"
    return ""


def _check_owner(descriptor: int, path: Path, installed: bool) -> None:
    """Raises PackError for a pack that others than this user or root may have written."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise PackError(f"pack {path} is no file")
    if wrong := complaint(status, read_only=True, installed=installed):
        raise PackError(
            f"pack {path} {wrong}, and kernels of it would run as this user; if you trust it, take "
            f"a copy of your own, or {closing(path)}"
        )
