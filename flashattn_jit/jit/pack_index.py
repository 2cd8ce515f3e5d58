"""The index of a pack: its entries, and every file's size and digests, in canonical JSON.

    {"entries": [{"compiler": "gcc-12.2.0-...", "files": {"artifact.so": [BYTES, SHA256, CRC32],
     ...}, "key": "..."}, ...], "pack_schema": 1}

An index is read as an enemy's: names are compiler ids, keys and file names, each of a form that no
path can escape by, sizes are bounded, entries are in order and no name is said twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from flashattn_jit.errors import PackError
from flashattn_jit.jit.entry import META
from flashattn_jit.jit.zip_frame import MAX_MEMBER_BYTES

SCHEMA = 1
INDEX = "pack.json"

MAX_INDEX_BYTES = 1 << 28
MAX_FILES = 16
"""Files of one entry; a store makes seven."""

_COMPILER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}", re.ASCII)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_CRC = re.compile(r"[0-9a-f]{8}", re.ASCII)


class FileDigest(NamedTuple):
    """What the index says of one file."""

    bytes: int
    sha256: str
    crc32: int


class Listed(NamedTuple):
    """What the index says of one entry; its files by name, in order."""

    compiler_id: str
    key: str
    files: Mapping[str, FileDigest]


def member_name(compiler_id: str, key: str, name: str) -> str:
    """Where a file of an entry is in the archive: as below a store's root."""
    return f"v1/{compiler_id}/{key[:2]}/{key}/{name}"


def complaint(listed: Listed) -> str | None:
    """What keeps an entry from being in a pack, None where nothing does."""
    if not _COMPILER.fullmatch(listed.compiler_id):
        return f"the compiler {listed.compiler_id!r} is no folder name"
    if not _KEY.fullmatch(listed.key):
        return f"the key {listed.key!r} is no digest"
    if META not in listed.files or len(listed.files) > MAX_FILES:
        return f"it must have {META} and at most {MAX_FILES} files"
    for name, digest in listed.files.items():
        if not _FILE.fullmatch(name):
            return f"file {name!r} has no plain file name"
        if not 0 <= digest.bytes < MAX_MEMBER_BYTES:
            return f"file {name!r} is not below 1 GiB"
    return None


def index_text(entries: Sequence[Listed]) -> bytes:
    """The index of some entries. Its length does not depend on the digests."""
    return _canonical(
        {
            "pack_schema": SCHEMA,
            "entries": [
                {
                    "key": e.key,
                    "compiler": e.compiler_id,
                    "files": {n: [f.bytes, f.sha256, f"{f.crc32:08x}"] for n, f in e.files.items()},
                }
                for e in entries
            ],
        }
    )


def parse_index(text: bytes, error: Callable[[str], PackError]) -> list[Listed]:
    """The entries of an index. Raises what `error` makes of a reason."""
    try:
        index = json.loads(text)
        canonical = _canonical(index) == text
    except (ValueError, RecursionError):
        raise error(f"{INDEX} is no JSON") from None
    # So that no name is said twice, and no other reader sees other values.
    if not canonical or not isinstance(index, dict):
        raise error(f"{INDEX} is not in its canonical form")
    if index.get("pack_schema") != SCHEMA:
        raise error(
            f"its schema is {index.get('pack_schema')!r}, this version reads {SCHEMA}; pack it "
            "again with this version"
        )
    listed = index.get("entries")
    if index.keys() != {"entries", "pack_schema"} or not isinstance(listed, list):
        raise error(f"{INDEX} has other fields than entries and pack_schema")
    entries = [_entry(place, one, error) for place, one in enumerate(listed)]
    for entry, following in pairwise(entries):
        if entry[:2] >= following[:2]:
            name = member_name(*following[:2], "")
            raise error(f"entry {name!r} is there twice or out of order")
    return entries


def _entry(place: int, one: Any, error: Callable[[str], PackError]) -> Listed:
    match one:
        case {"compiler": str(compiler), "files": dict(files), "key": str(key)} if len(one) == 3:
            listed = Listed(compiler, key, {})
        case _:
            raise error(f"entry {place} has other fields than compiler, files and key")
    where = f"entry {place} ({compiler[:128]}/{key[:64]})"
    digests: dict[str, FileDigest] = {}
    for name, stated in files.items():
        match stated:
            case [int(size), str(sha256), str(crc32)] if (
                type(size) is int and _KEY.fullmatch(sha256) and _CRC.fullmatch(crc32)
            ):
                digests[name] = FileDigest(size, sha256, int(crc32, 16))
            case _:
                raise error(f"{where} states no size and two digests of file {name!r}")
    listed = Listed(compiler, key, digests)
    if reason := complaint(listed):
        raise error(f"{where}: {reason}")
    return listed


def _canonical(index: Any) -> bytes:
    return json.dumps(index, sort_keys=True, separators=(",", ":")).encode("ascii")
