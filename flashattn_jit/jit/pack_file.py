"""A pack: cache entries in one ZIP archive, read at random, with every file's digest in front.

    pack.json                                               the index: `pack_index`
    v1/<compiler id>/<first two hex digits>/<key>/<file>    entries as in a store, in order

The index alone says what is in a pack and where: names are made of checked compiler ids, keys and
file names, so none can escape; places follow from the sizes, so no two overlap; the rest of the
archive must be what `zip_frame` makes of the index, byte for byte. A file is given out only after
its digest was compared. Whoever wrote a pack decides the code in it, as with a store's folder: a
pack is trusted only if it belongs to this user or root and nobody else may write to it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from flashattn_jit.errors import PackError
from flashattn_jit.jit import zip_frame
from flashattn_jit.jit.entry import META, MOST_META_BYTES, others_write, parse_meta
from flashattn_jit.jit.pack_index import (
    INDEX,
    MAX_INDEX_BYTES,
    FileDigest,
    member_name,
    parse_index,
)
from flashattn_jit.jit.zip_frame import Member


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One entry of an open pack."""

    key: str
    compiler_id: str
    files: Mapping[str, FileDigest]
    pack: PackFile = field(repr=False, compare=False)
    begin: int = field(repr=False, compare=False)  # of the first file's header

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its meta.json. Raises PackError where that is not of this entry's key and files."""
        where = f"member {self._member(META).name!r}"
        if self.files[META].bytes > MOST_META_BYTES:
            raise self.pack.error(f"{where} is too large")
        try:
            meta = parse_meta(self.read(META), self.key, self.compiler_id)
        except ValueError as error:
            raise self.pack.error(
                f"entry {member_name(self.compiler_id, self.key, '')!r}: {error}"
            ) from None
        said = {name: (f["bytes"], f["sha256"]) for name, f in meta["files"].items()}
        if said != {name: f[:2] for name, f in self.files.items() if name != META}:
            raise self.pack.error(f"{where} lists other files than the index")
        return meta

    def read(self, name: str) -> bytes:
        """A file's content. Raises PackError where it is not what the index says, KeyError."""
        content = self.read_unverified(name)
        digest = self.files[name]
        if (len(content), hashlib.sha256(content).hexdigest()) != digest[:2]:
            raise self.pack.error(f"member {self._member(name).name!r} is not what its digest says")
        return content

    def read_unverified(self, name: str) -> bytes:
        """A file's content, for a caller that compares its digest. Raises PackError, KeyError."""
        begin = self.begin
        for other in self.files:
            if other == name:
                break
            member = self._member(other)
            begin += zip_frame.local_bytes(member) + member.size
        member = self._member(name)
        header = zip_frame.local_header(member)
        if self.pack.read_at(begin, len(header)) != header:
            raise self.pack.error(f"the header of member {member.name!r} is not what it must be")
        return self.pack.read_at(begin + len(header), member.size)

    def _member(self, name: str) -> Member:
        return Member(
            member_name(self.compiler_id, self.key, name),
            self.files[name].bytes,
            self.files[name].crc32,
        )


class PackFile:
    """An open pack; a context manager. What it was when it was opened is what it stays.

    Opening reads the index and the directory, not the entries. Safe in threads and after a fork.
    Raises PackError, naming the member, for anything but a pack, for one of a foreign owner and for
    one that others may write to (installed: see `entry.others_write`); OSError where it cannot be
    read.
    """

    def __init__(self, path: str | os.PathLike[str], *, installed: bool = False) -> None:
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.bytes = _check_owner(self._descriptor, self.path, installed)
            self._entries = self._read_index()
        except BaseException:
            self.close()
            raise
        self._by_key: dict[str, list[PackedEntry]] = {}
        for entry in self._entries:
            self._by_key.setdefault(entry.key, []).append(entry)

    def entries(self) -> Iterator[PackedEntry]:
        """All entries, by compiler and key."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str, compiler_id: str | None = None) -> list[PackedEntry]:
        """The entries of a key, of one compiler or of all."""
        found = self._by_key.get(key, [])
        return [e for e in found if compiler_id is None or e.compiler_id == compiler_id]

    def read_at(self, begin: int, size: int) -> bytes:
        """Bytes of the archive; fewer at its end. Raises PackError where it was closed."""
        parts: list[bytes] = []
        while size > 0:
            # A read stops at 2 GiB.
            try:
                part = os.pread(self._descriptor, min(size, 1 << 30), begin)
            except OSError as error:
                raise self.error(f"it cannot be read: {error}") from error
            if not part:
                break
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def error(self, reason: str) -> PackError:
        """The error for this pack."""
        return PackError(f"pack {self.path}: {reason}")

    def close(self) -> None:
        """Gives its descriptor back; entries cannot be read any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> PackFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def _read_index(self) -> list[PackedEntry]:
        head = self.read_at(0, zip_frame.local_bytes(Member(INDEX, 0, 0)))
        size = zip_frame.first_size(head)
        if not 0 < size <= min(MAX_INDEX_BYTES, self.bytes):
            raise self.error(f"it does not begin with {INDEX}: it is no pack, or cut short")
        text = self.read_at(len(head), size)
        index = Member(INDEX, size, zlib.crc32(text))
        if len(text) != size or head != zip_frame.local_header(index):
            raise self.error(f"member {INDEX!r} is damaged, cut short or not stored as it is")
        listed = parse_index(text, self.error)
        begin = len(head) + size
        members, entries = [index], []
        for compiler_id, key, files in listed:
            entries.append(PackedEntry(key, compiler_id, files, self, begin))
            prefix = member_name(compiler_id, key, "")
            for name, digest in files.items():
                member = Member(prefix + name, digest.bytes, digest.crc32)
                begin += zip_frame.local_bytes(member) + member.size
                members.append(member)
        self._check_frame(members, begin)
        return entries

    def _check_frame(self, members: Sequence[Member], start: int) -> None:
        if start >= self.bytes:
            # Some member is not of the size that the index says, or the file ends too early.
            for member, begin in zip(members, zip_frame.places(members), strict=False):
                header = zip_frame.local_header(member)
                if self.read_at(begin, len(header)) != header:
                    raise self.error(f"it is cut short before member {member.name!r}")
                if begin + len(header) + member.size > self.bytes:
                    raise self.error(f"it is cut short in member {member.name!r}")
            raise self.error("it is cut short behind its members")
        most = zip_frame.directory_bytes(members)
        found = self.read_at(start, min(self.bytes - start, most + 1))
        if found == zip_frame.directory(members):
            return
        for member, begin in zip(members, zip_frame.places(members), strict=False):
            header = zip_frame.local_header(member)
            if self.read_at(begin, len(header)) != header:
                raise self.error(
                    f"the header of member {member.name!r} is not where or what it must be"
                )
        raise self.error(zip_frame.complaint(members, found))


def _check_owner(descriptor: int, path: Path, installed: bool) -> int:
    """The size of a pack that only this user or root can have written."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise PackError(f"pack {path} is no file")
    if status.st_uid not in (os.geteuid(), 0):
        raise PackError(
            f"pack {path} belongs to user {status.st_uid}, not to user {os.geteuid()}, and kernels "
            "of it would run as this user; if you trust it, take a copy of your own"
        )
    if others_write(status, installed=installed):
        raise PackError(
            f"pack {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it, and "
            f"kernels of it would run as this user; if you trust it, run: chmod go-w {path}"
        )
    return status.st_size
