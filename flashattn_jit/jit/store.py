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
    <root>/v1/.staging/  .quarantine/  .failed/   builds under way, corrupt entries, failed builds

An entry whose kernel keeps registers in memory on its tile has no artifact: its meta.json names the
kernel with a smaller tile that takes its place.

Loading code is trusting it, so the root must belong to this user and be writable by nobody else.
Looking up an entry writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashattn_jit.errors import CacheError
from flashattn_jit.jit.compiler import CompilerIdentity

log = logging.getLogger(__name__)

ARTIFACT = "artifact.so"
META = "meta.json"
STEPPED_DOWN = "stepped_down"
_LAYOUT = "v1"


class CorruptEntryError(CacheError):
    """An entry's files do not match its meta.json."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cache entry {path} is corrupt: {reason}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified entry: its folder and the content of its meta.json."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def artifact(self) -> Path:
        """The shared object; there is none where `stepped_down_to` is set."""
        return self.path / ARTIFACT

    @property
    def stepped_down_to(self) -> str | None:
        """The key of the kernel with a smaller tile that takes this one's place."""
        step = self.meta.get(STEPPED_DOWN)
        return str(step["key"]) if step else None


class Store:
    """A folder of kernels. Making one touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._base = root / _LAYOUT

    def find(self, key: str, compiler_id: str | None) -> Entry | None:
        """The entry of `key`, None where there is none.

        With `compiler_id` None any compiler's entry will do: the newest that is sound.
        Raises CorruptEntryError, and CacheError where the root is not safe to load code from.
        """
        if not self._is_safe():
            return None
        if compiler_id is not None:
            return self._read(self._base / compiler_id / key[:2] / key, key)
        found: list[Entry] = []
        for path in self._base.glob(f"[!.]*/{key[:2]}/{key}"):
            with contextlib.suppress(CorruptEntryError):
                if entry := self._read(path, key):
                    found.append(entry)
        return max(found, key=lambda entry: str(entry.meta.get("created", "")), default=None)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder to build in, removed at the end unless it was published.

        Lies beside the entries, so that publishing is a rename. Raises OSError where the root
        cannot be written, CacheError where it is not safe.
        """
        self._make_folder(self._base / ".staging")
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=self._base / ".staging"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(
        self, staging: Path, key: str, compiler: CompilerIdentity, meta: Mapping[str, Any]
    ) -> Entry:
        """Makes a staged build the entry of `key`, whole or not at all; the first of two wins.

        `meta` is completed with the key, the compiler and the digest of every file. Raises OSError.
        """
        complete = {
            **meta,
            "key": key,
            "compiler": {"id": compiler.id, "version": compiler.version},
            "files": {
                path.name: {"sha256": _sha256(path.read_bytes()), "bytes": path.stat().st_size}
                for path in sorted(staging.iterdir())
                if path.name != META
            },
        }
        staging.joinpath(META).write_text(json.dumps(complete, indent=1, sort_keys=True) + "\n")
        for path in staging.iterdir():
            path.chmod(0o700 if path.suffix == ".so" else 0o600)
            _fsync(path)
        _fsync(staging)
        target = self._base / compiler.id / key[:2] / key
        self._make_folder(target.parent)
        try:
            staging.rename(target)
        except OSError:
            # Another builder was first (a folder that holds files is never replaced). Theirs
            # serves as well as ours, if it is sound.
            entry = self._read(target, key)
            if entry is None:
                raise
            return entry
        _fsync(target.parent)
        return Entry(target, complete)

    def quarantine(self, path: Path) -> None:
        """Moves an entry out of the way, for inspection. Does nothing where it is gone already."""
        folder = self._base / ".quarantine"
        self._make_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            path.rename(Path(tempfile.mkdtemp(prefix=path.name[:16] + "-", dir=folder)) / "entry")

    def keep_failure(self, staging: Path, key: str) -> Path:
        """Keeps a failed build's files, in place of an earlier failure's. Returns their folder."""
        folder = self._base / ".failed" / key[:16]
        self._make_folder(folder)
        for path in staging.iterdir():
            if path.is_file():
                path.replace(folder / path.name)
        return folder

    def recall_compiler(self, fingerprint: str) -> CompilerIdentity | None:
        """The identity of a compiler that was remembered, None otherwise."""
        try:
            remembered = json.loads(self._compiler_file(fingerprint).read_bytes())
            return CompilerIdentity(id=remembered["id"], version=remembered["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember_compiler(self, fingerprint: str, compiler: CompilerIdentity) -> None:
        """Remembers a compiler's identity, so that a hit need not ask it. Raises OSError."""
        path = self._compiler_file(fingerprint)
        if self.recall_compiler(fingerprint) == compiler:
            return
        self._make_folder(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"id": compiler.id, "version": compiler.version}, file)
        Path(name).replace(path)

    def _compiler_file(self, fingerprint: str) -> Path:
        return self._base / ".compilers" / f"{fingerprint}.json"

    def _read(self, path: Path, key: str) -> Entry | None:
        try:
            text = path.joinpath(META).read_bytes()
        except FileNotFoundError:
            if path.is_dir():
                raise CorruptEntryError(path, f"it has no {META}") from None
            return None
        try:
            meta = json.loads(text)
            found_key, entry = meta["key"], Entry(path, meta)
            steps_down = entry.stepped_down_to is not None
            expected = {} if steps_down else meta["files"][ARTIFACT]
            size, digest = (0, "") if steps_down else (expected["bytes"], expected["sha256"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CorruptEntryError(path, f"its {META} cannot be read") from None
        if found_key != key:
            raise CorruptEntryError(path, f"its {META} is of another kernel")
        if steps_down:
            return entry
        try:
            artifact = path.joinpath(ARTIFACT).read_bytes()
        except FileNotFoundError:
            raise CorruptEntryError(path, f"it has no {ARTIFACT}") from None
        if len(artifact) != size or _sha256(artifact) != digest:
            raise CorruptEntryError(path, f"{ARTIFACT} is not what was published")
        return entry

    def _is_safe(self) -> bool:
        """Whether the root is there. Raises CacheError where others could put code into it."""
        try:
            status = self.root.stat()
        except OSError:
            # Absent or out of reach. A writer finds out which when it makes the folder.
            return False
        if not stat.S_ISDIR(status.st_mode):
            raise CacheError(
                f"the kernel cache {self.root} is no folder; set FLASHATTN_JIT_CACHE_DIR"
            )
        if status.st_uid != os.geteuid():
            raise CacheError(
                f"the kernel cache {self.root} belongs to user {status.st_uid}, not to user "
                f"{os.geteuid()}, and loading kernels from it would run their code; set "
                "FLASHATTN_JIT_CACHE_DIR to a folder of your own"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError(
                f"the kernel cache {self.root} has mode {stat.S_IMODE(status.st_mode):04o}: others "
                "may write to it, and loading kernels from it would run their code; check what is "
                f"in it, then run: chmod go-w {self.root}"
            )
        return True

    def _make_folder(self, folder: Path) -> None:
        """Makes a folder below the root, and the root, each 0700 whatever the umask."""
        if not self._is_safe():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._make_one(self.root)
            self._is_safe()
        path = self.root
        for part in folder.relative_to(self.root).parts:
            path = path / part
            self._make_one(path)

    @staticmethod
    def _make_one(path: Path) -> None:
        # mkdir's mode is cut by the umask, never widened: 0700 grants others nothing.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
