"""The key of a kernel, and its entry on disk, read as untrusted input.

A key is a sha256 over a canonical document of everything that decides a kernel's artifact. The
document holds no path, time, process id, `hash()`, Python or torch version, and needs neither
rendering nor a compiler, so any machine computes the same key for the same kernel.

Files that are loaded must have been written by this user, or by root in read-only layers, as
container images and site installations belong to root.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Any

from flashattn_jit import _C, env
from flashattn_jit.errors import CacheError
from flashattn_jit.variants.ir.ir import MAX_NAME

# --- keys ----------------------------------------------------------------------------------------

# Raised when the meaning of an entry or of a document field changes.
SCHEMA = 1

# The module that renders. It and the modules of these folders that it imports decide the text of a
# source; what they import from elsewhere (errors, environment, paths) does not.
_GENERATOR = "codegen/render.py"
_GENERATING = ("codegen/", "variants/")

# nvcc includes it at the start of every source.
_CUDA_PRELUDE = "fajit/cuda/lean/cuda_runtime.h"

# Each begins with a literal, which `re` searches for: 2 ms less than anchors at line starts. A
# match inside a comment only adds a file.
_HEADER = re.compile(rb'#[ \t]*include[ \t]*[<"](fajit/(?:\{\{.*?\}\}|[^>"{])+)[>"]')
_EXPRESSION = re.compile(r"\{\{.*?\}\}")
_IMPORT = re.compile(rb"from (flashattn_jit|\.+)\.?([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)")
_WORD = re.compile(rb"\w+")
_TEMPLATE = re.compile(rb"""\{%-?\s*(?:include|import|from|extends)\s+["']([^"']+)["']""")


@dataclass(frozen=True, slots=True)
class KernelKey:
    """`hex` names the kernel; `document` holds the (name, text) fields that it is the digest of."""

    hex: str
    document: tuple[tuple[str, str], ...]


Document = Mapping[str, str] | Iterable[Sequence[str]]
"""A key document: `KernelKey.document`, or its form in a meta.json."""


def kernel_key(spec: str, template: str, target: str, flags: Sequence[str]) -> KernelKey:
    """The key of a kernel.

    `spec` is the kernel spec's canonical JSON, `template` its root template's name below
    templates/, `flags` the compiler's, in order. Raises FileNotFoundError for a missing template
    or header.
    """
    document = (
        ("schema", str(SCHEMA)),
        ("abi_version", str(_C.ABI_VERSION)),
        ("target", target),
        ("flags", "\n".join(flags)),
        ("sources", sources_digest(template)),
        ("spec", spec),
    )
    return KernelKey(document_digest(document), document)


def document_digest(document: Iterable[Sequence[str]]) -> str:
    """The key of a document. Raises ValueError for text that cannot be encoded."""
    return _digest((name, text.encode()) for name, text in document)


@cache
def sources_digest(template: str) -> str:
    """`read_sources` for the package's own files, computed once a process."""
    return read_sources(template, env.templates_dir(), env.include_dir(), env.PACKAGE_DIR)


def sources_changed(template: str) -> bool:
    """Whether the files changed since `sources_digest` first read them."""
    return sources_digest.__wrapped__(template) != sources_digest(template)


def read_sources(template: str, templates: Path, headers: Path, package: Path) -> str:
    """Digest of the names and contents of the files that `reached_sources` finds."""
    return _digest(sorted(reached_sources(template, templates, headers, package).items()))


def reached_sources(
    template: str, templates: Path, headers: Path, package: Path
) -> dict[str, bytes]:
    """A template, the templates and fajit/ headers that it reaches, and the code generator.

    Keys are paths below these folders, such as ``include/fajit/abi.h``. Every `#include` and
    `import` is followed, also one that a macro or a condition would skip.
    """
    # Strings and plain stat calls: with pathlib this took half of the time of a hit on disk.
    folders = {"templates": f"{templates}/", "include": f"{headers}/", "package": f"{package}/"}
    contents: dict[str, bytes] = {}
    pending = [("templates", template)]
    if _is_file(folders["package"] + _GENERATOR):
        pending.append(("package", _GENERATOR))
    if ".cu." in template and _is_file(folders["include"] + _CUDA_PRELUDE):
        pending.append(("include", _CUDA_PRELUDE))
    modules: dict[str, bool] = {}
    while pending:
        kind, name = pending.pop()
        label = f"{kind}/{name}"
        if label in contents:
            continue
        with open(folders[kind] + name, "rb") as file:  # noqa: PTH123
            contents[label] = text = file.read()
        if kind == "package":
            pending += [("package", f) for f in _imported(name, text, folders[kind], modules)]
            continue
        pending += [
            ("include", header)
            for found in _HEADER.findall(text)
            for header in _headers_named(found.decode(), headers)
        ]
        if kind == "templates":
            pending += [("templates", found.decode()) for found in _TEMPLATE.findall(text)]
    return contents


def _headers_named(name: str, headers: Path) -> Iterator[str]:
    """The header `name`; where it contains Jinja expressions, every header that matches."""
    if "{{" not in name:
        yield name
        return
    for path in headers.glob(_EXPRESSION.sub("*", name)):
        yield path.relative_to(headers).as_posix()


def _imported(name: str, text: bytes, package: str, modules: dict[str, bool]) -> Iterator[str]:
    """Files of the generating folders that the module in file `name` imports by `from ... import`.

    `modules` caches which files exist.
    """
    parents = name.split("/")[:-1]
    for start, module, names in _IMPORT.findall(text):
        # The first dot of a relative import is the module's own folder.
        above = 0 if start == b"flashattn_jit" else max(0, len(parents) + 1 - len(start))
        folder = [*parents[:above], *(module.decode().split(".") if module else ())]
        candidates = [folder, *([*folder, word.decode()] for word in _WORD.findall(names))]
        for candidate in candidates:
            found = "/".join(candidate) + ".py"
            if found not in modules:
                modules[found] = found.startswith(_GENERATING) and _is_file(package + found)
            if modules[found]:
                yield found


def _is_file(path: str) -> bool:
    return isfile(path)  # noqa: PTH113


def _digest(fields: Iterable[tuple[str, bytes]]) -> str:
    # Each part is preceded by its length, so that different documents have different bytes.
    digest = hashlib.sha256()
    for name, value in fields:
        for part in (name.encode(), value):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


# --- owners and modes of what is loaded ----------------------------------------------------------

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def complaint(status: os.stat_result, *, read_only: bool, installed: bool = False) -> str:
    """What is wrong with the owner or the mode of a file or folder that is loaded, or empty.

    installed: by pip, like this package. Under a umask of 002 both are writable to their group,
    whose members may change the code of this package already.
    """
    if not is_ours(status, read_only):
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    bits = status.st_mode & _OTHERS_WRITE
    if installed and bits:
        own = os.stat(_C.__file__)  # noqa: PTH116
        if own.st_gid == status.st_gid:
            bits &= ~own.st_mode | stat.S_IWOTH
    if bits:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it"
    return ""


def closing(path: Path) -> str:
    """How to keep others from writing to a file or folder of this user, once it was looked at."""
    return f"see who wrote to it (ls -la {path}), then run: chmod go-w {path}"


def may_be_swapped(folder: Path) -> bool:
    """Whether others could replace this folder by renaming one above it.

    Its files must then be loaded from the content that was verified, not by path again.
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
    """Whether a file or folder belongs to this user, or to root if `read_only`."""
    return status.st_uid == os.geteuid() or (read_only and status.st_uid == _ROOT)


def others_may_rename(folder: os.stat_result) -> bool:
    """Whether others may rename what is in a folder."""
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
    """`id` is a folder name made from `version`, the compiler's own version text."""

    id: str
    version: str


class CorruptEntryError(CacheError):
    """An entry's files do not match its meta.json.

    `inode` is that of its folder, to recognise a later replacement; 0 where unknown.
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
        """The path of the shared object, which an entry that steps down lacks."""
        return self.path / ARTIFACT

    @property
    def document(self) -> dict[str, str]:
        """The key document, by field."""
        return {str(name): str(text) for name, text in self.meta.get("document", ())}

    @property
    def created(self) -> str:
        """When it was compiled: ISO 8601, UTC."""
        return str(self.meta.get("created", ""))

    @property
    def bytes(self) -> int:
        """The size of its files, without meta.json."""
        return sum(int(expected["bytes"]) for expected in self.meta.get("files", {}).values())


def is_key(text: object) -> bool:
    """Whether `text` has the form of a key."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def is_compiler_id(text: object) -> bool:
    """Whether `text` can be the name of a compiler's folder."""
    return isinstance(text, str) and _COMPILER_ID.fullmatch(text) is not None


def is_file_name(text: object) -> bool:
    """Whether `text` can be the name of an entry's file other than meta.json."""
    return isinstance(text, str) and _FILE_NAME.fullmatch(text) is not None and text != META


def parse_meta(text: bytes, key: str, compiler_id: str) -> dict[str, Any]:
    """The content of a meta.json, checked by `check_meta`. Raises ValueError."""
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its {META} cannot be read") from None
    check_meta(meta, key, compiler_id)
    return meta  # type: ignore[no-any-return]


def check_meta(meta: object, key: str, compiler_id: str) -> None:
    """Checks every field of `meta` that is used, and that its key document is that of `key`.

    Raises ValueError, which says what is wrong.
    """
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
    if compiler["id"] != compiler_id:
        raise ValueError(f"its {META} names compiler {compiler['id']!r}, not {compiler_id!r}")
    step = meta.get(STEPPED_DOWN)
    if step is not None and not (isinstance(step, Mapping) and is_key(step.get("key"))):
        raise ValueError(f"its {META} does not say what it stepped down to")
    _check_files(meta.get("files"), has_artifact=step is None)
    _check_facts(meta)


def _check_facts(meta: Mapping[str, Any]) -> None:
    """Checks the types and ranges of the fields that are only printed or compared."""
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
    # NaN fails the comparison.
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
    """Raises ValueError where the content of a file does not match `meta`.

    An artifact must contain its own key: this is checked before loading, so that the artifact of
    another kernel is never loaded.
    """
    expected = meta["files"][name]
    if len(content) != expected["bytes"] or sha256(content) != expected["sha256"]:
        raise ValueError(f"{name} is not what was published")
    if name == ARTIFACT and meta["key"].encode() not in content:
        raise ValueError(f"{name} is of another kernel")


def read_entry(path: Path, key: str, *, read_only: bool = False, whole: bool = False) -> Entry:
    """The entry at `path`, its meta.json and its artifact verified; with `whole` all its files.

    With `whole` the atime of the files is kept. Raises FileNotFoundError where there is no entry,
    CorruptEntryError where it fails verification, OSError where it cannot be read.
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
        os.lstat(path)  # raises if the entry was removed meanwhile, which is no damage
        raise CorruptEntryError(path, str(error), status.st_ino) from None
    return Entry(path, meta, head)


def read_file(path: Path, most_bytes: int, *, read_only: bool = False, use: bool = True) -> bytes:
    """The content of a regular file that only this user (or root, if `read_only`) can write.

    use: the read counts as a use of the kernel; without it the atime is kept, by which eviction
    finds the least recently used kernels.
    Raises ValueError where it is missing, a symlink, too long, or others can write to it; OSError.
    """
    # O_NONBLOCK: opening a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags if use else flags | os.O_NOATIME)
        except PermissionError:
            descriptor = os.open(path, flags)  # O_NOATIME is allowed to a file's owner only
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
