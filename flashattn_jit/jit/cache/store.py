"""Compiled kernels on disk: immutable entries, published by one rename, verified when read.

    <root>/v1/<compiler id>/<first two hex digits>/<key>/
        artifact.so      the kernel, stripped
        kernel.cpp       what was compiled; kernel.cu for CUDA targets
        kernel.ptx       CUDA: what the machine code was made of; the emulator runs it
        build.log        what the compiler said
        command          the commands that ran
        resources.json   size of the artifact; stack use of each function, or what each CUDA kernel
                         uses and may use
        meta.json        key document, compiler, digests; CUDA: the least driver
    <root>/v1/.compilers/<fingerprint>.json    identities of compilers seen
    <root>/v1/.staging/  .quarantine/  .failed/  .evicted/
                         builds under way, corrupt entries, failed builds, entries being removed

An entry whose kernel keeps registers in memory on its tile has no artifact: its meta.json names the
kernel with a smaller tile that takes its place.

Loading code is trusting it, so the root must belong to this user and be writable by nobody else
(`is_safe_root`). Looking up an entry writes nothing. A key is computed anew from the document in
meta.json, so an entry cannot pass for another kernel's.
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

LAYOUT = "v1"
EVICTED = ".evicted"
# A folder renamed by another machine on a network file system is seen after a while only.
_REREAD_AFTER_S = (0.0, 0.02, 0.1, 0.4)


class Store:
    """A folder of kernels. Making one touches nothing on disk.

    A `read_only` store may be root's as well as this user's, and is never written.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self.root = root
        self.read_only = read_only
        self.base = root / LAYOUT

    def find(self, key: str, compiler_id: str | None) -> Entry | None:
        """The entry of `key`, None where there is none.

        With `compiler_id` None any compiler's entry will do: the newest that is sound.
        Raises CorruptEntryError, UnsafeCacheError, and OSError where it cannot be read.
        """
        found, wrong = self.look_up(key, compiler_id)
        if compiler_id is not None and wrong:
            raise wrong[0]
        return found[0] if found else None

    def look_up(
        self, key: str, compiler_id: str | None
    ) -> tuple[list[Entry], list[CorruptEntryError]]:
        """The sound entries of `key`, newest first, and what is wrong with the others.

        Raises UnsafeCacheError, and OSError where all that there is cannot be read.
        """
        found: list[Entry] = []
        wrong: list[CorruptEntryError] = []
        unreadable: OSError | None = None
        if not is_safe_root(self.root, read_only=self.read_only):
            return found, wrong
        for compiler in [compiler_id] if compiler_id is not None else self.compilers_of(key):
            try:
                path = self._path(key, compiler)
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

        One whose meta.json cannot be read has an empty `meta`; `verify` says why.
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

        Lies beside the entries, so that publishing is a rename. Raises OSError where the root
        cannot be written, UnsafeCacheError where it is not safe.
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
        """Makes a staged build the entry of `key`, whole or not at all; the first of two wins.

        `meta` is completed with the key, the compiler and the digest of every file. An entry that
        is not sound and has its place goes to quarantine; `replaced` is told. Raises OSError.
        """
        contents = {p.name: p.read_bytes() for p in sorted(staging.iterdir()) if p.name != META}
        complete = {
            **meta,
            "key": key,
            "compiler": {"id": compiler.id, "version": compiler.version},
            "files": {
                name: {"sha256": sha256(content), "bytes": len(content)}
                for name, content in contents.items()
            },
        }
        return self._publish(staging, key, compiler.id, complete, replaced=replaced)

    def adopt(
        self,
        key: str,
        compiler_id: str,
        files: Mapping[str, bytes | Path],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> Entry:
        """Publishes an entry that was made elsewhere, once all of it is checked.

        `files` holds every file but meta.json, by its name, as content or as a path to read. The
        entry that has its place is returned where it is sound, and replaced where it is not. With
        `durable` false the caller syncs the file system after many of them: until then a power
        failure may leave entries that fail their verification, which are misses.
        Raises CorruptEntryError where it is not what its `meta` says, UnsafeCacheError, OSError;
        then nothing is left.
        """
        place = self._path(key, compiler_id)
        try:
            if not is_key(key) or not is_compiler_id(compiler_id):
                raise ValueError(f"{key!r} of compiler {compiler_id!r} cannot be a kernel's name")
            complete = json.loads(json.dumps(meta))
            check_meta(complete, key, compiler_id)
            if set(files) != set(complete["files"]):
                raise ValueError(f"its files are not those that its {META} names")
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptEntryError(place, str(error)) from None
        with self.staging() as staging:
            for name, given in files.items():
                content = given.read_bytes() if isinstance(given, Path) else bytes(given)
                try:
                    check_content(name, content, complete)
                except ValueError as error:
                    raise CorruptEntryError(place, str(error)) from None
                staging.joinpath(name).write_bytes(content)
            return self._publish(staging, key, compiler_id, complete, durable)

    def quarantine(self, path: Path, inode: int = 0) -> None:
        """Moves an entry out of the way, for inspection. Does nothing where it is gone already.

        Nor where `inode`, of the folder that is meant, is not that of the one that is there:
        another process has put a sound one in its place.
        """
        with contextlib.suppress(FileNotFoundError):
            if not inode or path.lstat().st_ino == inode:
                self.move_aside(path, ".quarantine")

    def move_aside(self, path: Path, place: str) -> Path | None:
        """Moves an entry to a folder of its own below `place`; None where it is gone already."""
        folder = self.base / place
        self.make_folder(folder)
        own = Path(tempfile.mkdtemp(prefix=path.name[:16] + "-", dir=folder))
        try:
            return path.rename(own / "entry")
        except FileNotFoundError:
            own.rmdir()
            return None

    def is_being_collected(self) -> bool:
        """Whether some entry is aside that may come back: see `eviction.collect`."""
        try:
            return any(self.base.joinpath(EVICTED).iterdir())
        except OSError:
            return False

    def keep_failure(self, staging: Path, key: str) -> Path:
        """Keeps a failed build's files, in place of an earlier failure's. Returns their folder."""
        folder = self.base / ".failed" / key[:16]
        self.make_folder(folder)
        for path in staging.iterdir():
            if path.is_file():
                path.chmod(0o600)
                path.replace(folder / path.name)
        return folder

    def recall_compiler(self, fingerprint: str) -> CompilerIdentity | None:
        """The identity of a compiler that was remembered, None otherwise."""
        try:
            remembered = json.loads(self._compiler_file(fingerprint).read_bytes())
            found = CompilerIdentity(id=remembered["id"], version=remembered["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if is_compiler_id(found.id) and isinstance(found.version, str) else None

    def remember_compiler(self, fingerprint: str, compiler: CompilerIdentity) -> None:
        """Remembers a compiler's identity, so that a hit need not ask it. Raises OSError."""
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
        """Makes a folder below the root, and the root, each 0700 whatever the umask.

        Raises OSError, UnsafeCacheError.
        """
        if self.read_only:
            raise OSError(f"{self.root} is a read-only layer")
        if not is_safe_root(self.root):
            for parent in reversed(self.root.parents):
                _make_one(parent)
            _make_one(self.root)
            is_safe_root(self.root)
        path = self.root
        for part in folder.relative_to(self.root).parts:
            path = path / part
            _make_one(path)

    def _path(self, key: str, compiler_id: str) -> Path:
        return self.base / compiler_id / key[:2] / key

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
        target = self._path(key, compiler_id)
        self.make_folder(target.parent)
        try:
            other = self._take_place(staging, target, key)
        except CorruptEntryError as corrupt:
            log.warning("%s: moving it to quarantine", corrupt)
            self.quarantine(corrupt.path, corrupt.inode)
            if replaced is not None:
                replaced(corrupt)
            other = self._take_place(staging, target, key)
        if other is not None:
            return other
        if durable:
            fsync(target.parent)
        return Entry(target, meta)

    def _take_place(self, staging: Path, target: Path, key: str) -> Entry | None:
        """Moves a staged build to its place; where another builder was first, theirs.

        It serves as well as ours, if it is sound: a folder that holds files is never replaced.
        """
        try:
            staging.rename(target)
        except OSError as error:
            for delay in _REREAD_AFTER_S:
                time.sleep(delay)
                with contextlib.suppress(FileNotFoundError):
                    return read_entry(target, key)
            raise error
        return None


def _make_one(path: Path) -> None:
    # mkdir's mode is cut by the umask, never widened: 0700 grants others nothing.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def fsync(path: Path) -> None:
    """Makes a file or a folder survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- folders and files that may hold code --------------------------------------------------------

_MOST_LINKS = 40


def is_safe_root(root: Path, *, read_only: bool = False) -> bool:
    """Whether a folder of kernels is there. Raises UnsafeCacheError where others can write to it.

    A link on the way to it is followed only where nobody else could have put it there.
    """
    try:
        status = root.stat()
    except OSError:
        # Absent or out of reach. A writer finds out which when it makes the folder.
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeCacheError(f"the kernel cache {root} is no folder; {_remedy(read_only)}")
    _check(status, root, f"the kernel cache {root}", read_only)
    return True


def check_file(path: Path, *, installed: bool = False) -> None:
    """Raises UnsafeCacheError where others can write to a file of a read-only layer.

    installed: see `others_write`. Raises OSError where it is missing.
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
            remedy = f"check what is in it, then run: chmod go-w {path}"
        raise UnsafeCacheError(
            f"{name} {wrong}, and loading kernels from it would run their code; {remedy}"
        )
    if os.path.realpath(path) != str(path):
        _check_links(path, name)


def _check_links(path: Path, name: str) -> None:
    """Follows every link on the way to `path`, as the system does."""
    here, pending, links = "/", deque(path.parts[1:]), 0
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)  # noqa: PTH120
            continue
        _check_folder(here, name)
        step = os.path.join(here, part)  # noqa: PTH118
        status = os.lstat(step)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if not is_ours(status, True) or links > _MOST_LINKS:
            raise UnsafeCacheError(
                f"{name} lies behind the link {step} of user {status.st_uid}, who could lead it "
                "elsewhere; name the folder itself"
            )
        target = Path(step).readlink()
        if target.is_absolute():
            here = "/"
        pending.extendleft(reversed([part for part in target.parts if part != "/"]))


def _check_folder(folder: str, name: str) -> None:
    if others_may_rename(os.lstat(folder)):
        raise UnsafeCacheError(
            f"{name} lies behind a link, and others may write to {folder} on the way to it, so "
            f"could lead it elsewhere; name the folder itself, or run: chmod go-w {folder}"
        )


def _remedy(read_only: bool) -> str:
    if read_only:
        return "name another in FLASHATTN_JIT_CACHE_PATH, owned by you or by root"
    return "set FLASHATTN_JIT_CACHE_DIR to a folder of your own"
