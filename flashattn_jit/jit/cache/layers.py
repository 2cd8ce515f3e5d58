"""Where kernels are looked for before they are compiled: folders, packs, a remote folder.

    user        FLASHATTN_JIT_CACHE_DIR: the only one that is written
    read_only   each folder or pack of FLASHATTN_JIT_CACHE_PATH, in order; then the packs that
                installed wheels brought, by the wheels' names (`installed_packs.py`)
    remote      FLASHATTN_JIT_CACHE_REMOTE (`remote.py`)

First what a layer finds, and how its code gets into the process; then whether this machine can run
it, asked before it is loaded: a kernel that needs other instructions, another machine or a newer
driver is a miss with its reason, as the layers below may have one that fits. Last the layers of
this machine. One that cannot serve says why; only a user's folder that is not safe is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flashattn_jit import env
from flashattn_jit.codegen.spec import host_target
from flashattn_jit.codegen.targets import CPU_TARGETS, included, is_cuda
from flashattn_jit.errors import PackError, UnsafeCacheError
from flashattn_jit.jit.cache.entry import (
    ARTIFACT,
    CorruptEntryError,
    Document,
    Entry,
    check_content,
    check_meta,
    may_be_swapped,
    read_file,
    stepped_down_to,
)
from flashattn_jit.jit.cache.store import Store, check_file

if TYPE_CHECKING:
    from flashattn_jit.jit.cache.pack_file import PackedEntry, PackFile

log = logging.getLogger(__name__)

LayerName = Literal["memory", "user", "read_only", "remote"]
LAYERS: tuple[LayerName, ...] = ("memory", "user", "read_only", "remote")


@dataclass(slots=True)
class Counters:
    """Kernels found, by layer, and what happened where none had one.

    misses: kernels that no folder had. waits: builds of other processes that were waited for,
    lock_wait_s: how long. corrupt: entries that were not what was published.
    """

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    misses: int = 0
    compiles: int = 0
    compile_s: float = 0.0
    waits: int = 0
    lock_wait_s: float = 0.0
    corrupt: int = 0

    @property
    def disk_hits(self) -> int:
        """Kernels from folders and packs."""
        return self.hits["user"] + self.hits["read_only"]


# --- what is found -------------------------------------------------------------------------------

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# Loaded code is mapped from these, and glibc takes a path that it knows for the same library.
_kept_descriptors: list[int] = []


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel: which layer has it and where, and its files, verified when they are read.

    `path` is the entry's folder, or the pack or URL that holds it. `in_folder` says whether its
    artifact is loaded from there: not where others could put another folder in its place between
    its verification and its loading. `head` holds the artifact's first bytes.
    """

    key: str
    compiler_id: str
    layer: LayerName | str
    path: Path
    meta: Mapping[str, Any] = field(repr=False)
    head: bytes = field(repr=False)
    read: Callable[[str], bytes] = field(repr=False)
    in_folder: bool = True

    @property
    def stepped_down_to(self) -> str | None:
        """The key of the kernel with a smaller tile that takes this one's place."""
        return stepped_down_to(self.meta)

    def smaller_tile(self, smaller: Sequence[str]) -> str:
        """Which of the keys of smaller tiles, in order, takes this one's place.

        The first where it names none of them: tiles may have been added or dropped since.
        """
        step = self.stepped_down_to
        return step if step is not None and step in smaller else smaller[0]

    @property
    def artifact_bytes(self) -> int:
        """The size of its shared object."""
        expected = self.meta.get("files", {}).get(ARTIFACT)
        return int(expected["bytes"]) if expected else 0

    @contextlib.contextmanager
    def loadable(self) -> Iterator[Path]:
        """A file that the artifact can be loaded from, for as long as this lasts. Raises OSError.

        One that lies in no folder of its own is put into memory: nothing is written to a disk.
        """
        if self.in_folder:
            yield self.path / ARTIFACT
            return
        content = self.read(ARTIFACT)
        try:
            path = _memory_file(content, self.key)
        except OSError:
            with tempfile.TemporaryDirectory(prefix="flashattn_jit-") as folder:
                copy = Path(folder) / ARTIFACT
                copy.write_bytes(content)
                yield copy
            return
        yield path


def found_in_folder(entry: Entry, layer: LayerName | str, *, read_only: bool = False) -> Found:
    """An entry of a store."""

    def read(name: str) -> bytes:
        content = read_file(
            entry.path / name, entry.meta["files"][name]["bytes"], read_only=read_only
        )
        check_content(name, content, entry.meta)
        return content

    return Found(
        entry.key,
        entry.compiler_id,
        layer,
        entry.path,
        entry.meta,
        entry.head,
        read,
        in_folder=not may_be_swapped(entry.path),
    )


def found_in_memory(
    key: str,
    compiler_id: str,
    layer: LayerName,
    path: Path,
    meta: Mapping[str, Any],
    read: Callable[[str], bytes],
) -> Found:
    """A kernel whose files are read through `read`, its artifact verified now.

    `meta` was checked. Raises ValueError where the artifact is not what it says.
    """

    def checked(name: str) -> bytes:
        content = read(name)
        check_content(name, content, meta)
        return content

    head = checked(ARTIFACT)[:64] if ARTIFACT in meta["files"] else b""
    return Found(key, compiler_id, layer, path, meta, head, checked, in_folder=False)


def _memory_file(content: bytes, key: str) -> Path:
    """A file in memory that nobody can change any more, kept for the life of the process."""
    descriptor = os.memfd_create(f"flashattn_jit-{key[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        path = Path(f"/proc/self/fd/{descriptor}")
        path.stat()  # there may be no /proc
    except BaseException:
        os.close(descriptor)
        raise
    _kept_descriptors.append(descriptor)
    return path


# --- whether it runs here ------------------------------------------------------------------------

_MAGIC = b"\x7fELF"
_MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver that runs what a toolkit of this major version compiles (minor version
compatibility: CUDA Compatibility guide, table 1)."""
_MACHINES = {0x03: "x86", 0x28: "arm", 0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv"}


def unfit_target(target: str) -> str:
    """Why this machine cannot run a CPU target's code; empty where it can."""
    if target not in CPU_TARGETS or target in included(host_target()):
        return ""
    return f"it needs the instructions of {target}, and this machine runs at most {host_target()}"


def unfit_machine(head: bytes) -> str:
    """Why this machine cannot load an ELF file that begins with `head`; empty where it can."""
    own = _own_head()
    if not head.startswith(_MAGIC) or not own or _kind(head) == _kind(own):
        return ""
    return f"it is code for {machine_name(head)}, and this machine is {machine_name(own)}"


def unfit_driver(target: str, needed: object) -> str:
    """Why this machine's driver cannot run a CUDA artifact; empty where it can.

    Empty as well where there is no driver: then the artifact is emulated, or only looked at.
    """
    if not is_cuda(target) or not isinstance(needed, int):
        return ""
    version = driver_version()
    if not version or not too_old(version, needed):
        return ""
    return (
        f"it needs driver {needed} or newer, and this machine's supports CUDA "
        f"{version // 1000}.{version % 1000 // 10}"
    )


@cache
def driver_version() -> int:
    """The CUDA version that the driver supports, 12040 for 12.4; 0 where there is no driver."""
    import torch

    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    try:
        return int(ask()) if ask else 0
    except RuntimeError:
        return 0


def too_old(driver_version: int, needed: int) -> bool:
    """Whether a driver that supports CUDA `driver_version` (12040 for 12.4) is below a branch.

    Within one major version of CUDA its first driver runs what every later compiler made, as
    artifacts hold machine code and no PTX.
    """
    major = driver_version // 1000
    return major < 11 or oldest_driver(major) < needed


def oldest_driver(cuda_major: int) -> int:
    """The lowest driver branch (such as 580) that runs what CUDA `cuda_major` compiled.

    A toolkit that is newer than this table is taken to need at least the newest known branch.
    """
    return _MIN_DRIVERS.get(cuda_major, max(_MIN_DRIVERS.values()))


@cache
def _own_head() -> bytes:
    try:
        with Path("/proc/self/exe").open("rb") as file:
            head = file.read(20)
    except OSError:
        return b""
    return head if head.startswith(_MAGIC) and len(head) == 20 else b""


def _kind(head: bytes) -> tuple[bytes, bytes]:
    # Word size and byte order; the machine.
    return head[4:6], head[18:20]


def machine_name(head: bytes) -> str:
    """The machine that an ELF file is for, by its first 20 bytes or more, such as "x86_64"."""
    number = int.from_bytes(head[18:20], "big" if head[5:6] == b"\x02" else "little")
    return _MACHINES.get(number, f"machine {number}")


# --- the layers ----------------------------------------------------------------------------------


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
        if not wrong and not _has_mode(self.store.root, stat.S_ISDIR):
            return Answer(reason="there is no such folder", fault=read_only)
        others = [c for c in self.store.compilers_of(key) if c != compiler_id] if not wrong else []
        return Answer((), tuple(wrong), _reason(wrong, others, compiler_id), fault=bool(wrong))

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """See `Layer`."""
        for entry in self.store.entries():
            if entry.meta:
                yield entry.key, str(entry.path), entry.meta["document"]


@dataclass(frozen=True, slots=True)
class PackLayer:
    """A pack file, read in place. installed: by pip, see `entry.others_write`."""

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
            others = [] if found else [entry.compiler_id for entry in pack.find(key)]
            reason = "" if found else _reason(wrong, others, compiler_id)
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
        from flashattn_jit.jit.cache.installed_packs import installed_packs

        for pack in installed_packs():
            yield PackLayer(pack.path, installed=True)


def entries_of(keys: Sequence[str], places: Sequence[Layer]) -> list[Found]:
    """The newest entry of the first key, and those on the way to one that has an artifact.

    keys: of a kernel and of what may take its place, in order. Raises LookupError where an entry
    is in none of the places.
    """
    way: list[Found] = []
    key, smaller = keys[0], keys[1:]
    while True:
        answers = (layer.search(key, None).found for layer in places)
        entry = next((found[0] for found in answers if found), None)
        if entry is None:
            raise LookupError(key)
        way.append(entry)
        if entry.stepped_down_to is None:
            return way
        if not smaller:
            raise LookupError(key)
        key = entry.smaller_tile(smaller)
        smaller = keys[keys.index(key) + 1 :]


def _has_mode(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(path.stat().st_mode)
    except (OSError, ValueError):  # is_file() and is_dir() let some through
        return False


def _reason(wrong: list[CorruptEntryError], others: list[str], compiler_id: str | None) -> str:
    """Why a layer has no sound entry of a kernel. others: compilers whose entries it has."""
    if wrong:
        return f"its entry is corrupt: {wrong[0].reason}"
    if not others:
        return "it has no such kernel"
    return (
        f"it has the kernel as {', '.join(sorted(others))} made it, and this machine's compiler is "
        f"{compiler_id}; FLASHATTN_JIT_COMPILE=never takes any compiler's"
    )


# Opening a pack reads its index; a file that was replaced is opened anew.
_packs: dict[tuple[Path, bool], tuple[tuple[int, int, int], PackFile]] = {}
_packs_lock = threading.Lock()


def _open_pack(path: Path, installed: bool) -> PackFile:
    from flashattn_jit.jit.cache.pack_file import PackFile

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
