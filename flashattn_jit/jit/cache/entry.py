"""The entry of a kernel on disk, read without trusting it.

First who may have written what is loaded: nobody but us, and root in read-only layers, as container
images and site installations belong to root. Then an entry: its folder, the checks of its
meta.json, and how it is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashattn_jit import _C
from flashattn_jit.errors import CacheError
from flashattn_jit.variants.ir.ir import MAX_NAME

from .keys import document_digest

# --- who may have written it ---------------------------------------------------------------------

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


# --- an entry ------------------------------------------------------------------------------------

ARTIFACT = "artifact.so"
META = "meta.json"
STEPPED_DOWN = "stepped_down"

MOST_FILE_BYTES = 1 << 30
MOST_META_BYTES = 16 << 20
_MOST_FILES = 64

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_COMPILER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CompilerIdentity:
    """`id` is a folder name made from `version`, the compiler's own words about itself."""

    id: str
    version: str


class CorruptEntryError(CacheError):
    """An entry's files do not match its meta.json.

    `inode` is its folder's, which tells it from one that took its place since; 0 where unknown.
    """

    def __init__(self, path: Path, reason: str, inode: int = 0) -> None:
        super().__init__(f"cache entry {path} is corrupt: {reason}")
        self.path = path
        self.reason = reason
        self.inode = inode


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a store: its folder and the content of its meta.json.

    `head` holds the artifact's first bytes where the artifact was read and verified.
    """

    path: Path
    meta: Mapping[str, Any]
    head: bytes = field(default=b"", compare=False, repr=False)

    @property
    def key(self) -> str:
        """The kernel's key."""
        return self.path.name

    @property
    def compiler_id(self) -> str:
        """The folder name of the compiler that made it."""
        return self.path.parent.parent.name

    @property
    def artifact(self) -> Path:
        """The shared object; there is none where `stepped_down_to` is set."""
        return self.path / ARTIFACT

    @property
    def stepped_down_to(self) -> str | None:
        """The key of the kernel with a smaller tile that takes this one's place."""
        return stepped_down_to(self.meta)

    @property
    def document(self) -> dict[str, str]:
        """What the key was computed from, field by field."""
        return {str(name): str(text) for name, text in self.meta.get("document", ())}

    @property
    def created(self) -> str:
        """When it was compiled: ISO 8601, UTC."""
        return str(self.meta.get("created", ""))

    @property
    def bytes(self) -> int:
        """What its files take, meta.json not counted."""
        return sum(int(expected["bytes"]) for expected in self.meta.get("files", {}).values())


def stepped_down_to(meta: Mapping[str, Any]) -> str | None:
    """The key of the kernel with a smaller tile that takes the place of the one of `meta`."""
    step = meta.get(STEPPED_DOWN)
    return str(step["key"]) if step else None


def is_key(text: object) -> bool:
    """Whether `text` has the form of a key."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def is_compiler_id(text: object) -> bool:
    """Whether `text` can be the name of a compiler's folder."""
    return isinstance(text, str) and _COMPILER_ID.fullmatch(text) is not None


def is_file_name(text: object) -> bool:
    """Whether `text` can be the name of an entry's file other than meta.json."""
    return isinstance(text, str) and _FILE_NAME.fullmatch(text) is not None and text != META


def parse_meta(text: bytes, key: str, compiler_id: str | None = None) -> dict[str, Any]:
    """The content of a meta.json, every field that is used checked.

    Raises ValueError, which says what is wrong, also where its document is not that of `key`.
    """
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its {META} cannot be read") from None
    check_meta(meta, key, compiler_id)
    return meta  # type: ignore[no-any-return]


def check_meta(meta: object, key: str, compiler_id: str | None = None) -> None:
    """Raises ValueError where `meta` is not that of an entry of `key`: see `parse_meta`."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"its {META} cannot be read")
    if meta.get("key") != key:
        raise ValueError(f"its {META} is of another kernel")
    document = meta.get("document")
    if not isinstance(document, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
        for pair in document
    ):
        raise ValueError(f"its {META} has no key document")
    if document_digest(document) != key:
        raise ValueError(f"the document in its {META} is not that of its key")
    compiler = meta.get("compiler")
    if not isinstance(compiler, Mapping) or not is_compiler_id(compiler.get("id")):
        raise ValueError(f"its {META} names no compiler")
    if compiler_id is not None and compiler["id"] != compiler_id:
        raise ValueError(f"its {META} names compiler {compiler['id']!r}, not {compiler_id!r}")
    step = meta.get(STEPPED_DOWN)
    if step is not None and not (isinstance(step, Mapping) and is_key(step.get("key"))):
        raise ValueError(f"its {META} does not say what it stepped down to")
    _check_files(meta.get("files"), has_artifact=step is None)
    _check_facts(meta)


def _check_facts(meta: Mapping[str, Any]) -> None:
    """What is told to people only: of the kind that it is printed and compared as."""
    created, complaints = meta.get("created", ""), meta.get("complaints", [])
    name = meta.get("name", "")
    facts = {
        "name": isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable(),
        "created": isinstance(created, str) and len(created) <= 64 and created.isprintable(),
        "compiler": isinstance(meta["compiler"].get("version", ""), str),
        "complaints": isinstance(complaints, (list, tuple))
        and all(isinstance(text, str) for text in complaints),
        "compile_s": _is_number(meta.get("compile_s", 0.0), (int, float)),
        "min_driver": _is_number(meta.get("min_driver", 0), int),
    }
    for name, is_right in facts.items():
        if not is_right:
            raise ValueError(f"its {META} has a wrong {name}")


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    # NaN is not in any range.
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < 1e9  # type: ignore[operator]


def _check_files(files: object, has_artifact: bool) -> None:
    if not isinstance(files, Mapping) or len(files) > _MOST_FILES:
        raise ValueError(f"its {META} names no files")
    for name, expected in files.items():
        if not is_file_name(name):
            raise ValueError(f"its {META} names a file {name!r}, which is no plain name")
        size = expected.get("bytes") if isinstance(expected, Mapping) else None
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or not 0 <= size <= MOST_FILE_BYTES
            or not is_key(expected.get("sha256"))
        ):
            raise ValueError(f"its {META} has no size and digest for {name}")
    if has_artifact != (ARTIFACT in files):
        raise ValueError(f"its {META} names {'no' if has_artifact else 'an'} {ARTIFACT}")


def check_content(name: str, content: bytes, meta: Mapping[str, Any]) -> None:
    """Raises ValueError where a file is not what its meta.json says.

    An artifact must hold its own key: it is looked for before the artifact is loaded, so that one
    of another kernel never is.
    """
    expected = meta["files"][name]
    if len(content) != expected["bytes"] or sha256(content) != expected["sha256"]:
        raise ValueError(f"{name} is not what was published")
    if name == ARTIFACT and meta["key"].encode() not in content:
        raise ValueError(f"{name} is of another kernel")


def read_entry(path: Path, key: str, *, read_only: bool = False, whole: bool = False) -> Entry:
    """The entry at `path`, its meta.json and its artifact verified; all its files with `whole`.

    Raises FileNotFoundError where there is none, CorruptEntryError where it is not what was
    published, OSError where it cannot be read.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise CorruptEntryError(path, "it is no folder", status.st_ino)
    try:
        if wrong := complaint(status, read_only=read_only):
            raise ValueError(f"it {wrong}")
        text = read_file(path / META, MOST_META_BYTES, read_only=read_only, use=not whole)
        meta = parse_meta(text, key, path.parent.parent.name)
        files = meta["files"]
        names = sorted(files) if whole else [ARTIFACT] if ARTIFACT in files else []
        head = b""
        for name in names:
            size = files[name]["bytes"]
            content = read_file(path / name, size, read_only=read_only, use=not whole)
            check_content(name, content, meta)
            if name == ARTIFACT:
                head = content[:64]
        if whole and (others := {p.name for p in path.iterdir()} - {META, *files}):
            raise ValueError(f"it holds {min(others)!r}, which its {META} does not name")
    except ValueError as error:
        os.lstat(path)  # gone meanwhile: it was removed, not damaged
        raise CorruptEntryError(path, str(error), status.st_ino) from None
    return Entry(path, meta, head)


def read_file(path: Path, most_bytes: int, *, read_only: bool = False, use: bool = True) -> bytes:
    """The content of a regular file that only we can write.

    With `use` false its time of access stays, by which kernels are told that nobody uses.
    Raises ValueError where it is missing, a link, too long, or others can write to it; OSError.
    """
    # Not blocking: a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags if use else flags | os.O_NOATIME)
        except PermissionError:
            descriptor = os.open(path, flags)  # only a file's owner may leave its time alone
    except FileNotFoundError:
        raise ValueError(f"it has no {path.name}") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(f"{path.name} is no regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is no regular file")
        if wrong := complaint(status, read_only=read_only):
            raise ValueError(f"{path.name} {wrong}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise ValueError(f"{path.name} is not what was published")
    return content


def sha256(content: bytes) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(content).hexdigest()
