"""The layers that are searched for a kernel before it is compiled: folders, packs, a remote folder.

    user        FLASHATTN_JIT_CACHE_DIR: the only one that is written
    read_only   each folder or pack of FLASHATTN_JIT_CACHE_PATH, in order; then the packs of
                installed wheels, by the wheels' names (`installed_packs.py`)
    remote      FLASHATTN_JIT_CACHE_REMOTE (`remote.py`)

Whether this machine can run a kernel is checked before it is loaded: one that needs other
instructions, another machine or a newer driver is a miss with a reason, and the next layer is
searched. A layer that has no usable kernel returns the reason; only an unsafe user's folder is an
error.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import host_targets
from flashattn_jit.codegen.targets import CPU_TARGETS, is_cuda
from flashattn_jit.errors import PackError, UnsafeCacheError
from flashattn_jit.jit.cache.entry import (
    ARTIFACT,
    STEPPED_DOWN,
    CorruptEntryError,
    Document,
    Entry,
    check_content,
    may_be_swapped,
    read_file,
)
from flashattn_jit.jit.cache.store import Store, check_file

if TYPE_CHECKING:
    from flashattn_jit.jit.cache.pack_file import PackFile

log = logging.getLogger(__name__)

LayerName = Literal["memory", "user", "read_only", "remote"]
LAYERS: tuple[LayerName, ...] = get_args(LayerName)


@dataclass(slots=True)
class Counters:
    """Counts of kernels found, by layer, and of misses.

    misses: kernels that no folder had. waits: builds of other processes that were waited for,
    lock_wait_s: the seconds. corrupt: entries that failed verification.
    """

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    misses: int = 0
    compiles: int = 0
    compile_s: float = 0.0
    waits: int = 0
    lock_wait_s: float = 0.0
    corrupt: int = 0


# --- what is found -------------------------------------------------------------------------------

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# Kept open for the life of the process: dlopen takes an equal path for the same library, so the
# number of a descriptor must not be used again.
_kept_descriptors: list[int] = []


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel that a layer has; its files are verified when they are read.

    path: the entry's folder, or the pack or URL that holds it. in_folder: whether its artifact is
    loaded from `path`. It is not if others could replace a folder above it between verification
    and loading. head: the artifact's first bytes.
    """

    key: str
    compiler_id: str
    layer: str
    path: Path
    meta: Mapping[str, Any] = field(repr=False)
    head: bytes = field(repr=False)
    read: Callable[[str], bytes] = field(repr=False)
    in_folder: bool = True

    @property
    def stepped_down_to(self) -> str | None:
        """The key of the kernel on a smaller tile that replaces this one."""
        step = self.meta.get(STEPPED_DOWN)
        return str(step["key"]) if step else None

    def smaller_tile(self, smaller: Sequence[str]) -> str:
        """Which of `smaller`, the keys of the smaller tiles in order, replaces this kernel.

        The first if the entry names none of them: tiles may have been added or removed since.
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
        """A file that the artifact can be loaded from inside the `with`. Raises OSError.

        An artifact that is not loaded from a folder is copied into a memory file if possible.
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


def found_in_folder(entry: Entry, layer: str, *, read_only: bool = False) -> Found:
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
    """A kernel whose files `read` returns; its artifact is verified now, by the checked `meta`.

    Raises ValueError where the artifact does not match `meta`.
    """

    def checked(name: str) -> bytes:
        content = read(name)
        check_content(name, content, meta)
        return content

    head = checked(ARTIFACT)[:64] if ARTIFACT in meta["files"] else b""
    return Found(key, compiler_id, layer, path, meta, head, checked, in_folder=False)


def _memory_file(content: bytes, key: str) -> Path:
    """A sealed memory file with this content, kept for the life of the process."""
    descriptor = os.memfd_create(f"flashattn_jit-{key[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        path = Path(f"/proc/self/fd/{descriptor}")
        path.stat()  # fails where /proc is not mounted
    except BaseException:
        os.close(descriptor)
        raise
    _kept_descriptors.append(descriptor)
    return path


# --- whether this machine can run a kernel -------------------------------------------------------

_MAGIC = b"\x7fELF"
_MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver that runs what a toolkit of this major version compiles (minor version
compatibility: CUDA Compatibility guide, table 1)."""
_MACHINES = {0x03: "x86", 0x28: "arm", 0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv"}


def unfit(found: Found, target: str, compiler_id: str | None) -> str:
    """Why this machine cannot run a kernel for `target`; empty where it can.

    compiler_id: this machine's compiler. The driver is not checked for its own builds: compiling
    again would give the same, and the launch reports the error.
    """
    if why := unfit_target(target) or unfit_machine(found.head):
        return why
    if found.compiler_id == compiler_id:
        return ""
    return unfit_driver(target, found.meta.get("min_driver"))


def unfit_target(target: str) -> str:
    """Why this machine cannot run a CPU target's code; empty where it can."""
    if target not in CPU_TARGETS or target in host_targets():
        return ""
    most = host_targets()[-1]
    return f"it needs the instructions of {target}, and this machine runs at most {most}"


def unfit_machine(head: bytes) -> str:
    """Why this machine cannot load an ELF file that begins with `head`; empty where it can."""
    own = _own_head()
    if not head.startswith(_MAGIC) or not own or _kind(head) == _kind(own):
        return ""
    return f"it is code for {machine_name(head)}, and this machine is {machine_name(own)}"


def unfit_driver(target: str, needed: object) -> str:
    """Why this machine's driver cannot run a CUDA artifact; empty where it can.

    Also empty without a driver: then the artifact is emulated or only inspected.
    """
    if not is_cuda(target) or not isinstance(needed, int):
        return ""
    version = driver_version()
    if not version or not too_old(version, needed):
        return ""
    return (
        f"it needs driver {needed} or newer, and this machine's supports CUDA "
        f"{version_words(version)}"
    )


@cache
def driver_version() -> int:
    """The CUDA version that the driver supports, 12040 for 12.4; 0 where there is no driver."""
    return _C.driver_version()


def version_words(version: int) -> str:
    """A version of CUDA as NVIDIA writes it: 12.4 for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"


def too_old(driver_version: int, needed: int) -> bool:
    """Whether a driver that supports CUDA `driver_version` (12040 for 12.4) is below a branch.

    The first driver of a major version of CUDA runs the code of all its later compilers, as
    artifacts hold machine code and no PTX.
    """
    major = driver_version // 1000
    return major < 11 or oldest_driver(major) < needed


def oldest_driver(cuda_major: int) -> int:
    """The oldest driver branch (such as 580) that runs what CUDA `cuda_major` compiled.

    For a toolkit newer than the table: the newest known branch.
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
    """The machine of an ELF file with this `head` of 20 bytes or more, such as "x86_64"."""
    number = int.from_bytes(head[18:20], "big" if head[5:6] == b"\x02" else "little")
    return _MACHINES.get(number, f"machine {number}")


# --- the layers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A layer's entries of a kernel: valid ones, newest first; corrupt ones; why there are none.

    fault: the reason is a defect to repair, and not just that the layer lacks the kernel.
    """

    found: tuple[Found, ...] = ()
    corrupt: tuple[CorruptEntryError, ...] = ()
    reason: str = ""
    fault: bool = False


class Layer(Protocol):
    """A source of compiled kernels."""

    @property
    def name(self) -> LayerName:
        """The kind of layer."""

    @property
    def location(self) -> str:
        """Its folder, file or URL."""

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """Its entries of a key, by one compiler, or by any if None. Writes nothing."""

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """(key, location, key document) of all its entries, for the report of a miss."""


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
        found = [found_in_folder(e, self.name, read_only=read_only) for e in entries]
        if not found and not wrong and not _has_mode(self.store.root, stat.S_ISDIR):
            return Answer(reason="there is no such folder", fault=read_only)
        others = [] if found else [c for c in self.store.compilers_of(key) if c != compiler_id]
        return answer_of(found, wrong, others, compiler_id)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """See `Layer`."""
        for entry in self.store.entries():
            if entry.meta:
                yield entry.key, str(entry.path), entry.meta["document"]


_open_packs: dict[tuple[Path, bool], tuple[tuple[int, int, int], PackFile]] = {}
"""Packs whose directory was read, by (path, installed), with the version of the file.

A pack whose file was replaced is collected, and closed, when nothing found in it is left.
"""


@dataclass(frozen=True, slots=True)
class PackLayer:
    """A pack file, read in place. installed: see `entry.complaint`."""

    path: Path
    installed: bool = False
    name: LayerName = "read_only"

    @property
    def location(self) -> str:
        """The file."""
        return str(self.path)

    def pack(self) -> PackFile:
        """The open pack. Raises PackError, UnsafeCacheError, OSError."""
        status = self.path.stat()
        version = status.st_ino, status.st_size, status.st_mtime_ns
        which = self.path, self.installed
        opened, pack = _open_packs.get(which, (None, None))
        if pack is None or opened != version:
            from flashattn_jit.jit.cache.pack_file import PackFile

            check_file(self.path, installed=self.installed)
            pack = PackFile(self.path, installed=self.installed)
            _open_packs[which] = version, pack  # two threads may open it; one of them is kept
        return pack

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """See `Layer`."""
        found: list[Found] = []
        wrong: list[CorruptEntryError] = []
        try:
            pack = self.pack()
            for packed in pack.find(key, compiler_id):
                try:
                    meta, compiler = packed.meta, packed.compiler_id
                    found.append(
                        found_in_memory(key, compiler, self.name, self.path, meta, packed.read)
                    )
                except (PackError, ValueError) as error:
                    wrong.append(CorruptEntryError(self.path, str(error)))
            others = [entry.compiler_id for entry in pack.find(key)]
        except (PackError, UnsafeCacheError, OSError) as error:
            return Answer(reason=str(error), fault=True)
        return answer_of(found, wrong, others, compiler_id)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """See `Layer`."""
        try:
            for packed in self.pack().entries():
                yield packed.key, str(self.path), dict(packed.meta["document"])
        except (PackError, UnsafeCacheError, OSError, ValueError, KeyError, TypeError):
            return


def user_layer() -> FolderLayer:
    """The layer of FLASHATTN_JIT_CACHE_DIR, the only one that is written."""
    return FolderLayer("user", Store(env.cache_dir()))


def local_layers() -> Iterator[FolderLayer | PackLayer]:
    """The layers on this machine, in the order in which they are searched.

    Installed packs are looked up only after the layers before them were searched.
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


def entries_of(keys: Sequence[str], layers: Sequence[Layer]) -> list[Found]:
    """The newest entry of the first key, then of each smaller tile up to one with an artifact.

    keys: of a kernel and of its smaller tiles, in order. Raises LookupError where none of the
    layers has an entry.
    """
    entries: list[Found] = []
    index = 0
    while True:
        answers = (layer.search(keys[index], None).found for layer in layers)
        entry = next((found[0] for found in answers if found), None)
        if entry is None:
            raise LookupError(keys[index])
        entries.append(entry)
        if entry.stepped_down_to is None:
            return entries
        if index + 1 == len(keys):
            raise LookupError(keys[index])
        index = keys.index(entry.smaller_tile(keys[index + 1 :]))


def _has_mode(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(path.stat().st_mode)
    except (OSError, ValueError):  # is_file() and is_dir() let some through
        return False


def answer_of(
    found: Sequence[Found],
    wrong: Sequence[CorruptEntryError],
    others: Sequence[str] = (),
    compiler_id: str | None = None,
) -> Answer:
    """The answer of a layer with these entries. others: compilers that made other entries of it."""
    if found:
        newest_first = sorted(found, key=lambda x: str(x.meta.get("created", "")), reverse=True)
        return Answer(tuple(newest_first), tuple(wrong))
    reason = "it has no such kernel"
    if wrong:
        reason = f"its entry is corrupt: {wrong[0].reason}"
    elif others:
        reason = (
            f"it has the kernel as {', '.join(sorted(others))} made it, and this machine's "
            f"compiler is {compiler_id}; FLASHATTN_JIT_COMPILE=never takes any compiler's"
        )
    return Answer((), tuple(wrong), reason, fault=bool(wrong))
