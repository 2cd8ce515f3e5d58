"""A ZIP archive as a function of its members' names, sizes and checksums: one right form, no other.

Members are stored uncompressed, one behind the other in a fixed order, with a fixed time and mode.
So equal members make equal bytes; where each member lies follows from the sizes in front of it; and
an archive is checked by comparing its directory with the one that it must have. Nothing in a
foreign archive's directory is believed, and any tool can list and extract ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")

_LOCAL_MAGIC, _CENTRAL_MAGIC = b"PK\x03\x04", b"PK\x01\x02"
_VERSION, _VERSION64 = 20, 45
_MADE_BY = 3 << 8 | _VERSION  # a Unix machine: modes are in the upper half of the attributes
_TIME, _DATE = 0, 1 << 5 | 1  # 1980-01-01, the earliest
_MODE = 0o100600
_MOST32, _MOST16 = 0xFFFFFFFF, 0xFFFF

MAX_MEMBER_BYTES = 1 << 30
"""A member's size needs no 64-bit fields below this; places in the archive may."""


class Member(NamedTuple):
    """A file in the archive. The name is ASCII."""

    name: str
    size: int
    crc32: int


def local_header(member: Member) -> bytes:
    """What stands in front of a member's content."""
    name = member.name.encode("ascii")
    return _LOCAL.pack(
        _LOCAL_MAGIC, _VERSION, 0, 0, _TIME, _DATE, member.crc32, member.size, member.size,
        len(name), 0,
    ) + name  # fmt: skip


def local_bytes(member: Member) -> int:
    """The bytes of `local_header`, which do not depend on the checksum."""
    return _LOCAL.size + len(member.name)


def first_size(head: bytes) -> int:
    """The size that the archive's first header states; 0 where there is no such header."""
    if len(head) < _LOCAL.size or head[:4] != _LOCAL_MAGIC:
        return 0
    return int(_LOCAL.unpack_from(head)[8])


def places(members: Sequence[Member]) -> Iterator[int]:
    """Where each member's header begins; then where the directory does."""
    at = 0
    for member in members:
        yield at
        at += local_bytes(member) + member.size
    yield at


def directory(members: Sequence[Member]) -> bytes:
    """All that follows the last member."""
    parts: list[bytes] = []
    *begins, start = places(members)
    for member, begin in zip(members, begins, strict=True):
        parts += _record(member, begin)
    size = sum(map(len, parts))
    count = len(members)
    if count >= _MOST16 or start >= _MOST32 or size >= _MOST32:
        parts.append(
            _END64.pack(
                b"PK\x06\x06", _END64.size - 12, 3 << 8 | _VERSION64, _VERSION64, 0, 0, count,
                count, size, start,
            )
        )  # fmt: skip
        parts.append(_LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1))
    some, size32, start32 = min(count, _MOST16), min(size, _MOST32), min(start, _MOST32)
    parts.append(_END.pack(b"PK\x05\x06", 0, 0, some, some, size32, start32, 0))
    return b"".join(parts)


def directory_bytes(members: Sequence[Member]) -> int:
    """An upper bound of what `directory` makes, for a reader that allocates it."""
    return sum(_CENTRAL.size + len(m.name) + 12 for m in members) + 128


def complaint(members: Sequence[Member], found: bytes) -> str:
    """What is wrong with a directory that is not `directory(members)`, naming the first member."""
    at, names = 0, {m.name for m in members}
    seen: set[str] = set()
    if found[:4] == _LOCAL_MAGIC and len(found) >= _LOCAL.size:
        name_bytes = _LOCAL.unpack_from(found)[9]
        name = found[_LOCAL.size : _LOCAL.size + name_bytes].decode("latin-1")
        return f"member {name!r} is {'there twice' if name in names else 'not in its index'}"
    *begins, _ = places(members)
    for member, begin in zip(members, begins, strict=True):
        expected = b"".join(_record(member, begin))
        if found[at : at + len(expected)] != expected:
            return _record_complaint(member, found[at:], names, seen)
        seen.add(member.name)
        at += len(expected)
    if found[at : at + 4] == _CENTRAL_MAGIC:
        return _record_complaint(None, found[at:], names, seen)
    return "the end of its directory is not what its index implies"


def _record(member: Member, begin: int) -> tuple[bytes, ...]:
    name = member.name.encode("ascii")
    extra = struct.pack("<2HQ", 1, 8, begin) if begin >= _MOST32 else b""
    version = _VERSION64 if extra else _VERSION
    fixed = _CENTRAL.pack(
        _CENTRAL_MAGIC, 3 << 8 | version, version, 0, 0, _TIME, _DATE, member.crc32, member.size,
        member.size, len(name), len(extra), 0, 0, 0, _MODE << 16, min(begin, _MOST32),
    )  # fmt: skip
    return fixed, name, extra


def _record_complaint(
    expected: Member | None, found: bytes, names: set[str], seen: set[str]
) -> str:
    """What is wrong with the first record of `found`."""
    if len(found) < _CENTRAL.size or found[:4] != _CENTRAL_MAGIC:
        assert expected is not None
        return f"its directory has no record of member {expected.name!r}"
    (_, _, _, flags, method, _, _, _, packed, size, name_bytes, *_, attributes, begin) = (
        _CENTRAL.unpack_from(found)
    )
    name = found[_CENTRAL.size : _CENTRAL.size + name_bytes].decode("latin-1")
    member = f"member {name!r}"
    if flags & 1:
        return f"{member} is encrypted"
    if method or packed != size:
        return f"{member} is compressed"
    if (attributes >> 16) & 0o170000 not in (0, 0o100000):
        return f"{member} is no plain file, such as a link"
    if name in seen:
        return f"{member} is there twice"
    if name not in names:
        return f"{member} is not in its index"
    if expected is not None and name == expected.name:
        words = "another size" if size != expected.size else f"another place ({begin}) or attribute"
        return f"{member} has {words} than its index implies"
    return f"{member} is out of its order"
