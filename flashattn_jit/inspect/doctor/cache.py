"""The cache's layers, the folder of build locks and the environment variables."""

from __future__ import annotations

import difflib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ... import env
from ...codegen.document import spec_from_document
from ...codegen.spec import default_target
from ...deploy.manifest.file import check_writable
from ...env import format_bytes
from ...errors import CacheError, EnvironmentVariableError, FlashAttnJitError, ManifestError
from ...jit.cache.entry import CorruptEntryError
from ...jit.cache.installed_packs import installed_packs
from ...jit.cache.locks import candidates, not_ours
from ...jit.cache.pack_file import PackFile
from ...jit.cache.remote import public_url, unreadable
from ...jit.cache.store import REMEDIES, Store
from ...jit.compilation.toolchain import key_of
from ...planner.tiles import build_request
from .check import Check, error, named, ok, refused, warning
from .file_systems import FileSystem, file_system

_PREFIX = "FLASHATTN_JIT_"
_VERIFY_S = 0.8
_LEAST_FREE = 200 * 2**20
_LEAST_INODES = 1000
_STALE_S = 24 * 3600.0


def layers() -> Iterator[Check]:
    """Every layer: the user's folder, the read-only ones, installed wheels', the remote one."""
    yield from _layer("cache", env.cache_dir(), writable=True)
    for path in env.cache_path():
        yield from _layer("cache, read-only", path)
    yield from named("cache, installed", _installed())
    if url := env.cache_remote():
        check = ok(f"{public_url(url)}; what it holds runs as code of this user")
        if reason := unreadable(url):
            remedy = f"install what it names, or unset {_PREFIX}CACHE_REMOTE"
            check = error(f"{public_url(url)} cannot be read: {reason}", remedy)
        yield from named("cache, remote", [check])


def _layer(name: str, path: Path, *, writable: bool = False, of: str = "") -> Iterator[Check]:
    """The checks of a layer; what keeps it from being looked at is one of them.

    writable: it is the user's folder. of: the distribution whose pack it is.
    """
    try:
        is_pack = path.is_file() and not writable
        yield from named(name, _pack(path, of) if is_pack else _folder(path, writable))
    except OSError as failure:
        words = f"{path} cannot be looked at: {failure.strerror or failure}"
        yield Check(name, "error", words, "correct its name, or the modes of the folders above it")


def _installed() -> Iterator[Check]:
    """What wheels brought, and whether it is taken."""
    packs = installed_packs()
    if not env.cache_installed():
        if names := ", ".join(pack.distribution for pack in packs):
            yield ok(f"kernels of {names} are left alone: {_PREFIX}CACHE_INSTALLED=0")
        return
    for pack in packs:
        name = f"{pack.distribution} {pack.version}"
        if pack.path.is_file():
            yield from _layer("cache, installed", pack.path, of=name)
        else:
            yield error(
                f"{name} announces the pack {pack.path}, which is no file",
                f"pip install --force-reinstall --no-deps {pack.distribution}: not editable, and "
                f"not inside an archive; or pip uninstall {pack.distribution}",
            )


def _folder(root: Path, writable: bool) -> Iterator[Check]:
    if not root.exists():
        if not writable:
            remedy = f"mount or unpack it there, or take it out of {_PREFIX}CACHE_PATH"
            yield warning(f"{root} does not exist", remedy)
        elif problem := _cannot_make(root):
            yield warning(
                f"{root} does not exist and cannot be made: {problem}; kernels are compiled anew "
                "in every process",
                f"set {_PREFIX}CACHE_DIR to a folder that can be written",
            )
        else:
            yield ok(f"{root}, made when the first kernel is compiled")
        return
    store = Store(root, read_only=not writable)
    try:
        store.find("0" * 64, None)
    except CacheError as refusal:
        yield refused(refusal)
        return
    system = file_system(root)
    mode = stat.S_IMODE(root.stat().st_mode)
    count, size, corrupt, unread = _contents(store)
    kind = system.kind or "unknown file system"
    yield ok(f"{root} (mode {mode:04o}, {kind}): {count} kernels, {format_bytes(size)}")
    if corrupt:
        unseen = f" ({unread} not looked at)" if unread else ""
        yield warning(
            f"{len(corrupt)} corrupt entries{unseen}; the first: {corrupt[0]}",
            f"{REMEDIES['user']}. Many of them: check the disk"
            if writable
            else REMEDIES["read_only"],
        )
    if system.noexec:
        yield error(
            f"{root} is on a file system mounted noexec: no kernel can be loaded from it",
            f"set {_PREFIX}CACHE_DIR to a folder that is not, or remount it with exec"
            if writable
            else "remount it with exec, or name a pack file instead of a folder",
        )
    if writable:
        yield from _leftovers(store, size)
        yield from _slower(root, system)


def _contents(store: Store) -> tuple[int, int, list[str], int]:
    """Entries, their bytes, the corrupt ones, and how many there was no time to verify."""
    end = time.monotonic() + _VERIFY_S
    count = size = unread = 0
    corrupt = []
    for entry in store.entries():
        count += 1
        size += entry.bytes
        if time.monotonic() > end:
            unread += 1
            continue
        try:
            store.verify(entry.path)
        except CorruptEntryError as fault:
            corrupt.append(str(fault))
        except OSError as fault:
            corrupt.append(f"{entry.path} cannot be read: {fault}")
    return count, size, corrupt, unread


def _leftovers(store: Store, size: int) -> Iterator[Check]:
    """What `cache gc` would remove."""
    cap = env.cache_max_bytes()
    if cap is not None and size > cap:
        limit = f"{format_bytes(cap)} ({_PREFIX}CACHE_MAX_BYTES)"
        yield warning(
            f"holds {format_bytes(size)}, over the limit of {limit}",
            f"flashattn-jit cache gc --max-bytes {cap}",
        )
    quarantine, staging = store.base / ".quarantine", store.base / ".staging"
    if count := len(list(quarantine.glob("*"))):
        yield warning(
            f"{count} entries that were found corrupt lie in {quarantine}",
            "look at them if they are many (a failing disk, a copy that was cut off), then delete "
            "them; flashattn-jit cache gc deletes those older than a week",
        )
    oldest = time.time() - _STALE_S
    if count := sum(path.lstat().st_mtime < oldest for path in staging.glob("*")):
        yield warning(
            f"{count} builds that were killed over a day ago lie in {staging}",
            "flashattn-jit cache gc",
        )


def _slower(root: Path, system: FileSystem) -> Iterator[Check]:
    """What the file system of the user's folder makes slower."""
    local = f"and name this one in {_PREFIX}CACHE_PATH"
    if system.read_only or not os.access(root, os.W_OK | os.X_OK):
        yield warning(
            f"{root} cannot be written: kernels that it lacks are compiled anew in every process",
            f"set {_PREFIX}CACHE_DIR to a folder that can be written, {local}",
        )
    elif system.free < _LEAST_FREE or system.free_inodes < _LEAST_INODES:
        yield warning(
            f"{format_bytes(system.free)} and {system.free_inodes} files are free where {root} is",
            "flashattn-jit cache gc --max-bytes 100M, or free space there",
        )
    if system.noatime:
        yield warning(
            f"the file system of {root} keeps no access times: gc takes the oldest kernels, not "
            "the least recently used",
            "nothing, or remount it with relatime",
        )
    if system.is_network:
        yield warning(
            f"{root} lies on a network file system ({system.kind}): kernels are found there, but "
            "machines do not wait for each other's builds, and each may compile the same",
            f"set {_PREFIX}CACHE_DIR to a local folder, {local}",
        )


def _pack(path: Path, of: str) -> Iterator[Check]:
    try:
        with PackFile(path, installed=bool(of)) as pack:
            count, stale = len(pack), bool(of) and _is_stale(pack)
    except (CacheError, OSError) as refusal:
        yield refused(refusal, "pack it again, or copy it again")
        return
    if stale:
        yield warning(
            f"{path}: the {count} kernels of {of} are of another version of flashattn_jit, so that "
            "calls do not find them",
            "install the wheel for this version, or make it again: flashattn-jit warm, then "
            "flashattn-jit pack --wheel",
        )
    else:
        detail = f"{path}: a pack of {count} kernels, {format_bytes(path.stat().st_size)}"
        yield ok(f"{detail}, of {of}" if of else detail)


def _is_stale(pack: PackFile) -> bool:
    """Whether this version would not look for a pack's first kernel by the key that it has."""
    for entry in pack.entries():
        spec = dict(entry.meta["document"]).get("spec", "")
        try:
            return key_of(build_request(spec_from_document(spec))).hex != entry.key
        except FlashAttnJitError:
            return True
    return False


def _cannot_make(root: Path) -> str:
    """Why a folder could not be made; empty where it could."""
    for parent in root.parents:
        try:
            status = parent.stat()
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            return f"{parent} is not a folder"
        return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} cannot be written"
    return "no folder above it exists"


def locks() -> Check:
    """The folder of build locks, which must be local to the machine."""
    refusals = []
    for folder in candidates():
        try:
            problem = not_ours(folder.lstat())
            if not problem and not os.access(folder, os.W_OK | os.X_OK):
                problem = "it cannot be written"
        except OSError:
            problem = _cannot_make(folder)
        if problem:
            refusals.append(f"{folder}: {problem}")
            continue
        if folder.exists() and (system := file_system(folder)).is_network:
            return warning(
                f"{folder} lies on a network file system ({system.kind}): locks there are slow or "
                "do nothing",
                f"set {_PREFIX}LOCK_DIR to a folder on a local disk",
            )
        return ok(str(folder))
    return warning(
        f"no folder can be used ({'; '.join(refusals)}): processes that want one kernel each "
        "compile it",
        f"set {_PREFIX}LOCK_DIR to a local folder of this user, mode 0700",
    )


def environment() -> list[Check]:
    """Variables of this package: unknown names, and values that cannot be."""
    given = sorted(name for name in os.environ if name.startswith(_PREFIX))
    found = []
    for name in given:
        if name not in env.VARIABLES:
            near = difflib.get_close_matches(name, env.VARIABLES, n=1, cutoff=0.7)
            known = ", ".join(one.removeprefix(_PREFIX) for one in sorted(env.VARIABLES))
            remedy = f"did you mean {near[0]}?" if near else f"unset it; known are {known}"
            found.append(warning(f"{name} is no variable of this package: it does nothing", remedy))
    for name in env.VARIABLES:
        try:
            _reader(name.removeprefix(_PREFIX))()
        except EnvironmentVariableError as wrong:
            found.append(error(str(wrong), "correct or unset it"))
        except ManifestError as wrong:
            remedy = "name a manifest, or a file in a folder that can be written; or unset it"
            found.append(error(f"{_PREFIX}RECORD: nothing is recorded: {wrong}", remedy))
    shown = ", ".join(f"{name}={public_url(os.environ[name])}" for name in given)
    return found or [ok(shown or f"no {_PREFIX}* variable is set")]


def _check_record() -> None:
    if path := env.record_path():
        check_writable(path)


def _reader(name: str) -> Callable[[], object]:
    """What reads a variable, and refuses what it cannot be."""
    others = {
        "BUILD_JOBS": lambda: None,  # setup.py reads it
        "COMPILE": env.compile_mode,
        "LOG": env.apply_log_level,
        "RECORD": _check_record,
        "TARGET": default_target,
    }
    return others.get(name) or getattr(env, name.lower())
