"""Where kernels are looked for before they are compiled: folders, packs, a remote folder.

    user        FLASHATTN_JIT_CACHE_DIR: the only one that is written
    read_only   each folder or pack of FLASHATTN_JIT_CACHE_PATH, in order; then the packs that
                installed wheels brought, by the wheels' names (`installed.py`)
    remote      FLASHATTN_JIT_CACHE_REMOTE (`remote.py`)

A layer that cannot serve says why; only a user's folder that is not safe is an error.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flashattn_jit import env
from flashattn_jit.errors import PackError, UnsafeCacheError
from flashattn_jit.jit.counters import LayerName
from flashattn_jit.jit.entry import CorruptEntryError, check_meta
from flashattn_jit.jit.found import Found, found_in_folder, found_in_memory
from flashattn_jit.jit.key import KernelKey
from flashattn_jit.jit.misses import Document, Nearest, Searched, nearest
from flashattn_jit.jit.store import Store
from flashattn_jit.jit.trust import check_file

if TYPE_CHECKING:
    from flashattn_jit.jit.pack_file import PackedEntry, PackFile

__all__ = ["Answer", "FolderLayer", "Layer", "PackLayer", "Searched", "layers", "local_layers",
           "nearest_in", "remote_layers", "user_layer"]  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a layer has of a kernel: sound entries, newest first; corrupt ones; else the reason.

    fault: the reason is something to repair, not that the layer holds other kernels.
    """

    found: tuple[Found, ...] = ()
    corrupt: tuple[CorruptEntryError, ...] = ()
    reason: str = ""
    fault: bool = False


class Layer(Protocol):
    """A place where kernels are looked for."""

    @property
    def name(self) -> LayerName:
        """Which kind of layer it is."""

    @property
    def location(self) -> str:
        """Its folder, file or URL."""

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """What it has of a key: of one compiler, or of any. Writes nothing."""

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """Of all that it has: key, where it is, key document. For people, after a miss."""


@dataclass(frozen=True, slots=True)
class FolderLayer:
    """A store's folder."""

    name: LayerName
    store: Store

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.store.root)

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """See `Layer`. Raises UnsafeCacheError where the user's folder is not safe."""
        read_only = self.store.read_only
        try:
            entries, wrong = self.store.look_up(key, compiler_id)
        except UnsafeCacheError as error:
            if not read_only:
                raise
            return Answer(reason=str(error), fault=True)
        except OSError as error:
            return Answer(reason=f"it cannot be read: {error}", fault=True)
        found = tuple(found_in_folder(e, self.name, read_only=read_only) for e in entries)
        if found:
            return Answer(found, tuple(wrong))
        absent = read_only and not _has_mode(self.store.root, stat.S_ISDIR)
        reason = self._reason(key, compiler_id, wrong)
        return Answer((), tuple(wrong), reason, fault=bool(wrong) or absent)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """See `Layer`."""
        for entry in self.store.entries():
            if entry.meta:
                yield entry.key, str(entry.path), entry.meta["document"]

    def _reason(self, key: str, compiler_id: str | None, wrong: list[CorruptEntryError]) -> str:
        if wrong:
            return f"its entry is corrupt: {wrong[0].reason}"
        if not _has_mode(self.store.root, stat.S_ISDIR):
            return "there is no such folder"
        if others := [c for c in self.store.compilers_of(key) if c != compiler_id]:
            return _other_compiler(others, compiler_id)
        return "it has no such kernel"


@dataclass(frozen=True, slots=True)
class PackLayer:
    """A pack file, read in place. installed: by pip, see `trust.others_write`."""

    path: Path
    installed: bool = False
    name: LayerName = "read_only"

    @property
    def location(self) -> str:
        """The file."""
        return str(self.path)

    def pack(self) -> PackFile:
        """The open pack. Raises PackError, UnsafeCacheError, OSError."""
        return _open_pack(self.path, self.installed)

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """See `Layer`."""
        found: list[Found] = []
        wrong: list[CorruptEntryError] = []
        try:
            pack = self.pack()
            for packed in pack.find(key, compiler_id):
                try:
                    found.append(self._found(packed))
                except (PackError, ValueError) as error:
                    wrong.append(CorruptEntryError(self.path, str(error)))
            reason = "" if found else _pack_reason(pack, key, compiler_id, wrong)
        except (PackError, UnsafeCacheError, OSError) as error:
            return Answer(reason=str(error), fault=True)
        found.sort(key=lambda one: str(one.meta.get("created", "")), reverse=True)
        return Answer(tuple(found), tuple(wrong), reason, fault=bool(wrong) and not found)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """See `Layer`."""
        try:
            for packed in self.pack().entries():
                yield packed.key, str(self.path), dict(packed.meta["document"])
        except (PackError, UnsafeCacheError, OSError, ValueError, KeyError, TypeError):
            return

    def _found(self, packed: PackedEntry) -> Found:
        meta = packed.meta
        check_meta(meta, packed.key, packed.compiler_id)
        return found_in_memory(
            packed.key, packed.compiler_id, self.name, self.path, meta, packed.read
        )


def _pack_reason(
    pack: PackFile, key: str, compiler_id: str | None, wrong: list[CorruptEntryError]
) -> str:
    if wrong:
        return f"its entry is corrupt: {wrong[0].reason}"
    others = [entry.compiler_id for entry in pack.find(key)]
    return _other_compiler(others, compiler_id) if others else "it has no such kernel"


def user_layer() -> FolderLayer:
    """The layer that is written."""
    return FolderLayer("user", Store(env.cache_dir()))


def local_layers() -> Iterator[FolderLayer | PackLayer]:
    """The layers on this machine, in the order in which they are searched.

    What is installed is looked for only once the layers in front of it have been asked.
    """
    yield user_layer()
    for path in env.cache_path():
        if _has_mode(path, stat.S_ISREG):
            yield PackLayer(path)
        else:
            yield FolderLayer("read_only", Store(path, read_only=True))
    if env.cache_installed():
        from flashattn_jit.jit.installed import installed_packs

        for pack in installed_packs():
            yield PackLayer(pack.path, installed=True)


def remote_layers() -> tuple[Layer, ...]:
    """The remote layer, where it is set."""
    url = env.cache_remote()
    if url is None:
        return ()
    from flashattn_jit.jit.remote import RemoteLayer

    return (RemoteLayer(url),)


def layers() -> tuple[Layer, ...]:
    """All layers, in the order in which they are searched."""
    return (*local_layers(), *remote_layers())


def nearest_in(key: KernelKey, among: Iterable[Layer]) -> Nearest | None:
    """The entry of these layers that comes closest to a key that none of them has."""
    return nearest(key, (found for layer in among for found in _documents(layer)))


def _documents(layer: Layer) -> Iterator[tuple[str, str, Document]]:
    try:
        yield from layer.documents()
    except (UnsafeCacheError, OSError) as error:
        log.debug("cannot list %s: %s", layer.location, error)


def _has_mode(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(path.stat().st_mode)
    except (OSError, ValueError):  # is_file() and is_dir() let some through
        return False


def _other_compiler(others: list[str], compiler_id: str | None) -> str:
    return (
        f"it has the kernel as {', '.join(sorted(others))} made it, and this machine's compiler is "
        f"{compiler_id}; FLASHATTN_JIT_COMPILE=never takes any compiler's"
    )


# Opening a pack reads its index; a file that was replaced is opened anew.
_packs: dict[tuple[Path, bool], tuple[tuple[int, int, int], PackFile]] = {}
_packs_lock = threading.Lock()


def _open_pack(path: Path, installed: bool) -> PackFile:
    from flashattn_jit.jit.pack_file import PackFile

    status = path.stat()
    version = status.st_ino, status.st_size, status.st_mtime_ns
    with _packs_lock:
        kept = _packs.get((path, installed))
        if kept is None or kept[0] != version:
            check_file(path, installed=installed)
            kept = version, PackFile(path, installed=installed)
            # The one before stays open: kernels found in it read their other files from it.
            _packs[path, installed] = kept
    return kept[1]


def _reset_after_fork() -> None:
    global _packs_lock
    _packs_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
