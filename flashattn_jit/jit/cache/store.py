"""Compiled kernels on disk: immutable entries, published by one rename and verified when read.

    <root>/v1/<compiler id>/<first two hex digits>/<key>/
        artifact.so      the kernel, stripped
        kernel.cpp       the source; kernel.cu for CUDA targets
        kernel.ptx       CUDA: the PTX of the machine code; the emulator runs it
        build.log        the compiler's output
        command          the commands that ran
        resources.json   size of the artifact; stack use of each function, or resources and budget
                         of each CUDA kernel
        meta.json        key document, compiler, digests; CUDA: the oldest driver
    <root>/v1/.compilers/<fingerprint>.json    identities of known compilers
    <root>/v1/.staging/  .quarantine/  .failed/  .evicted/
                         builds in progress, corrupt entries, failed builds, entries being removed

The entry of a kernel that spills registers on its tile has no artifact: its meta.json names the
kernel on a smaller tile that replaces it.

Loading code means trusting it, so the root must belong to this user and be writable by nobody else
(`is_safe_root`). A look-up writes nothing. The key is recomputed from the document in meta.json, so
an entry cannot be passed off as that of another kernel.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashattn_jit.errors import UnsafeCacheError
from flashattn_jit.jit.cache.entry import (
    META,
    MOST_META_BYTES,
    CompilerIdentity,
    CorruptEntryError,
    Entry,
    check_content,
    check_meta,
    closing,
    complaint,
    is_compiler_id,
    is_key,
    is_ours,
    others_may_rename,
    parse_meta,
    read_entry,
    read_file,
    sha256,
)

log = logging.getLogger(__name__)

REMEDIES = {
    "user": "flashattn-jit cache verify --repair moves corrupt entries aside; they are compiled "
    "again when they are needed",
    "read_only": "make that layer again: it is not repaired from here",
}
"""What to do about corrupt entries, by the kind of their layer."""

LAYOUT = "v1"
EVICTED = ".evicted"
# On a network file system a folder renamed by another machine becomes visible after a delay.
_REREAD_AFTER_S = (0.0, 0.02, 0.1, 0.4)


def entry_folder(compiler_id: str, key: str) -> str:
    """The folder of an entry below a store's root, as a relative path with slashes."""
    return f"{LAYOUT}/{compiler_id}/{key[:2]}/{key}"


class Store:
    """A folder of kernels. The constructor does not access the disk.

    A `read_only` store may belong to root as well as to this user, and is never written.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self.root = root
        self.read_only = read_only
        self.base = root / LAYOUT

    def find(self, key: str, compiler_id: str | None) -> Entry | None:
        """The entry of `key`, or None; with `compiler_id` None any compiler's newest valid one.

        Raises CorruptEntryError, UnsafeCacheError, and OSError where it cannot be read.
        """
        found, wrong = self.look_up(key, compiler_id)
        if compiler_id is not None and wrong:
            raise wrong[0]
        return found[0] if found else None

    def look_up(
        self, key: str, compiler_id: str | None
    ) -> tuple[list[Entry], list[CorruptEntryError]]:
        """The valid entries of `key`, newest first, and the errors of the corrupt ones.

        Raises UnsafeCacheError, and OSError if there are entries and none can be read.
        """
        found: list[Entry] = []
        wrong: list[CorruptEntryError] = []
        unreadable: OSError | None = None
        if not is_safe_root(self.root, read_only=self.read_only):
            return found, wrong
        for compiler in [compiler_id] if compiler_id is not None else self.compilers_of(key):
            try:
                path = self.root / entry_folder(compiler, key)
                found.append(read_entry(path, key, read_only=self.read_only))
            except FileNotFoundError:
                continue
            except CorruptEntryError as error:
                wrong.append(error)
            except OSError as error:
                unreadable = error
        if unreadable is not None and not found and not wrong:
            raise unreadable
        return sorted(found, key=lambda entry: entry.created, reverse=True), wrong

    def compilers_of(self, key: str) -> list[str]:
        """The ids of the compilers that made an entry of `key`."""
        return [path.parent.parent.name for path in self.base.glob(f"[!.]*/{key[:2]}/{key}")]

    def paths(self) -> Iterator[Path]:
        """The folder of every entry of every compiler, in order. Raises UnsafeCacheError."""
        if not is_safe_root(self.root, read_only=self.read_only):
            return
        for path in sorted(self.base.glob("[!.]*/??/*")):
            if is_key(path.name) and path.parent.name == path.name[:2]:
                yield path

    def entries(self) -> Iterator[Entry]:
        """Every entry of every compiler, in the order of their paths; artifacts are not verified.

        An entry whose meta.json is invalid has an empty `meta`; `verify` raises the reason.
        Raises UnsafeCacheError.
        """
        for path in self.paths():
            try:
                text = read_file(path / META, MOST_META_BYTES, read_only=self.read_only, use=False)
                meta = parse_meta(text, path.name, path.parent.parent.name)
            except (OSError, ValueError):
                meta = {}
            yield Entry(path, meta)

    def verify(self, path: Path) -> Entry:
        """The entry at `path`, all its files verified.

        Raises CorruptEntryError, UnsafeCacheError, FileNotFoundError where there is none, OSError.
        """
        is_safe_root(self.root, read_only=self.read_only)
        return read_entry(path, path.name, read_only=self.read_only, whole=True)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder to build in, removed at the end unless it was published.

        It is on the file system of the entries, so that publishing is a rename. Raises OSError
        where the root cannot be written, UnsafeCacheError where it is not safe.
        """
        self.make_folder(self.base / ".staging")
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=self.base / ".staging"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(
        self,
        staging: Path,
        key: str,
        compiler: CompilerIdentity,
        meta: Mapping[str, Any],
        replaced: Callable[[CorruptEntryError], object] | None = None,
    ) -> Entry:
        """Makes a staged build the entry of `key`, atomically; of two builders the first wins.

        The key, the compiler and the digest of every file are added to `meta`. A corrupt entry at
        the same path is moved to quarantine and passed to `replaced`. Raises OSError.
        """
        files = {}
        for path in sorted(staging.iterdir()):
            if path.name != META:
                content = path.read_bytes()
                files[path.name] = {"sha256": sha256(content), "bytes": len(content)}
        complete = {
            **meta,
            "key": key,
            "compiler": {"id": compiler.id, "version": compiler.version},
            "files": files,
        }
        return self._publish(staging, key, compiler.id, complete, replaced=replaced)

    def adopt(
        self,
        key: str,
        compiler_id: str,
        files: Mapping[str, bytes | Callable[[], bytes]],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> Entry:
        """Verifies an entry that was made elsewhere, and publishes it.

        `files` holds every file but meta.json, by its name, as content or as a function that reads
        it: of those only one is in memory at a time. An existing entry is returned if it is valid,
        else replaced. With `durable` false the caller syncs the file system after many entries:
        until then a power failure may leave entries that fail verification, which are misses.
        Raises CorruptEntryError where the files do not match `meta`, UnsafeCacheError, OSError;
        then no entry was written.
        """
        target = self.root / entry_folder(compiler_id, key)
        try:
            if not is_key(key) or not is_compiler_id(compiler_id):
                raise ValueError(f"{key!r} of compiler {compiler_id!r} cannot be a kernel's name")
            complete = json.loads(json.dumps(meta))
            check_meta(complete, key, compiler_id)
            if set(files) != set(complete["files"]):
                raise ValueError(f"its files are not those that its {META} names")
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptEntryError(target, str(error)) from None
        with self.staging() as staging:
            for name, given in files.items():
                content = given() if callable(given) else given
                try:
                    check_content(name, content, complete)
                except (ValueError, TypeError) as error:
                    raise CorruptEntryError(target, str(error)) from None
                staging.joinpath(name).write_bytes(content)
            return self._publish(staging, key, compiler_id, complete, durable)

    def quarantine(self, path: Path, inode: int = 0) -> None:
        """Moves an entry to quarantine, for inspection. Does nothing if it was removed already.

        Does nothing either if the folder at `path` has another inode than `inode`: then another
        process has replaced the entry.
        """
        with contextlib.suppress(FileNotFoundError):
            if not inode or path.lstat().st_ino == inode:
                self.move_aside(path, ".quarantine")

    def move_aside(self, path: Path, name: str) -> Path | None:
        """Moves an entry to a new folder in the store's folder `name`; None if it was removed."""
        folder = self.base / name
        self.make_folder(folder)
        own = Path(tempfile.mkdtemp(prefix=path.name[:16] + "-", dir=folder))
        try:
            return path.rename(own / "entry")
        except FileNotFoundError:
            own.rmdir()
            return None

    def is_being_collected(self) -> bool:
        """Whether an eviction has moved an entry that it may move back: see `eviction.collect`."""
        try:
            return any(self.base.joinpath(EVICTED).iterdir())
        except OSError:
            return False

    def keep_failure(self, staging: Path, key: str) -> Path:
        """Keeps the files of a failed build, replacing earlier ones. Returns their folder."""
        folder = self.base / ".failed" / key[:16]
        self.make_folder(folder)
        for path in staging.iterdir():
            if path.is_file():
                path.chmod(0o600)
                path.replace(folder / path.name)
        return folder

    def recall_compiler(self, fingerprint: str) -> CompilerIdentity | None:
        """The stored identity of a compiler, or None."""
        try:
            remembered = json.loads(self._compiler_file(fingerprint).read_bytes())
            found = CompilerIdentity(id=remembered["id"], version=remembered["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if is_compiler_id(found.id) and isinstance(found.version, str) else None

    def remember_compiler(self, fingerprint: str, compiler: CompilerIdentity) -> None:
        """Stores a compiler's identity, so that a hit need not run it. Raises OSError."""
        path = self._compiler_file(fingerprint)
        if self.recall_compiler(fingerprint) == compiler:
            return
        self.make_folder(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"id": compiler.id, "version": compiler.version}, file)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def make_folder(self, folder: Path) -> None:
        """Makes a folder below the root, and the root, each with mode 0700 under any umask.

        Raises OSError, UnsafeCacheError.
        """
        if self.read_only:
            raise OSError(f"{self.root} is a read-only layer")
        if not is_safe_root(self.root):
            for path in (*reversed(self.root.parents), self.root):
                _make_one(path)
            is_safe_root(self.root)
        path = self.root
        for part in folder.relative_to(self.root).parts:
            path = path / part
            _make_one(path)

    def _compiler_file(self, fingerprint: str) -> Path:
        return self.base / ".compilers" / f"{fingerprint}.json"

    def _publish(
        self,
        staging: Path,
        key: str,
        compiler_id: str,
        meta: dict[str, Any],
        durable: bool = True,
        replaced: Callable[[CorruptEntryError], object] | None = None,
    ) -> Entry:
        staging.joinpath(META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
        for path in staging.iterdir():
            path.chmod(0o700 if path.suffix == ".so" else 0o600)
            if durable:
                fsync(path)
        if durable:
            fsync(staging)
        target = self.root / entry_folder(compiler_id, key)
        self.make_folder(target.parent)
        try:
            other = self._rename(staging, target)
        except CorruptEntryError as corrupt:
            log.warning("%s: moving it to quarantine", corrupt)
            self.quarantine(corrupt.path, corrupt.inode)
            if replaced is not None:
                replaced(corrupt)
            other = self._rename(staging, target)
        if other is not None:
            return other
        if durable:
            fsync(target.parent)
        return Entry(target, meta)

    def _rename(self, staging: Path, target: Path) -> Entry | None:
        """Renames a staged build to `target`; returns the entry of a builder that was first.

        rename() never replaces a folder that holds files. Raises CorruptEntryError if that entry
        is not valid.
        """
        try:
            staging.rename(target)
        except OSError as error:
            for delay in _REREAD_AFTER_S:
                time.sleep(delay)
                with contextlib.suppress(FileNotFoundError):
                    return read_entry(target, target.name)
            raise error
        return None


def _make_one(path: Path) -> None:
    # The umask can only remove bits of the mode: 0700 grants others nothing.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def fsync(path: Path) -> None:
    """Flushes a file or a folder to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- whether a folder or a file is safe to load code from ----------------------------------------

_MOST_LINKS = 40


def is_safe_root(root: Path, *, read_only: bool = False) -> bool:
    """Whether a folder of kernels exists. Raises UnsafeCacheError where others can write to it.

    Symlinks in its path must belong to this user or root, in folders that others cannot write to.
    """
    try:
        status = root.stat()
    except OSError:
        # Missing or not accessible. A writer gets the error when it makes the folder.
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeCacheError(f"the kernel cache {root} is no folder; {_remedy(read_only)}")
    _check(status, root, f"the kernel cache {root}", read_only)
    return True


def check_file(path: Path, *, installed: bool = False) -> None:
    """Raises UnsafeCacheError where others can write to a file of a read-only layer.

    installed: see `complaint`. Raises OSError where it is missing.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeCacheError(f"{path} is no regular file; {_remedy(True)}")
    _check(status, path, f"the pack {path}", read_only=True, installed=installed)


def _check(
    status: os.stat_result, path: Path, name: str, read_only: bool, installed: bool = False
) -> None:
    if wrong := complaint(status, read_only=read_only, installed=installed):
        remedy = _remedy(read_only)
        if is_ours(status, read_only):
            # An installed pack is named in no variable.
            remedy = closing(path) if installed else f"{remedy}, or {closing(path)}"
        raise UnsafeCacheError(
            f"{name} {wrong}, and loading kernels from it would run their code; {remedy}"
        )
    if os.path.realpath(path) != str(path):
        _check_links(path, name)


def _check_links(path: Path, name: str) -> None:
    """Checks each symlink in `path`, following it as the kernel does."""
    here, pending, links = "/", deque(path.parts[1:]), 0
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)  # noqa: PTH120
            continue
        if others_may_rename(os.lstat(here)):
            raise UnsafeCacheError(
                f"{name} lies behind a link, and others may write to {here} in its path, so could "
                f"point it elsewhere; name the folder itself, or run: chmod go-w {here}"
            )
        step = os.path.join(here, part)  # noqa: PTH118
        status = os.lstat(step)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if not is_ours(status, True) or links > _MOST_LINKS:
            raise UnsafeCacheError(
                f"{name} lies behind the link {step} of user {status.st_uid}, who could point it "
                "elsewhere; name the folder itself"
            )
        target = Path(step).readlink()
        if target.is_absolute():
            here = "/"
        pending.extendleft(reversed([part for part in target.parts if part != "/"]))


def _remedy(read_only: bool) -> str:
    if read_only:
        return "name another in FLASHATTN_JIT_CACHE_PATH, owned by you or by root"
    return "set FLASHATTN_JIT_CACHE_DIR to a folder of your own"
