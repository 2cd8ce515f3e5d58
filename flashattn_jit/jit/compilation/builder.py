"""The build of one kernel: rendered, compiled in a staging folder, loaded, and then published.

If the cache's folder cannot be written, is full or is removed during the build, the kernel is built
in a temporary folder and used by this process only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flashattn_jit import env
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.codegen.targets import is_cuda
from flashattn_jit.errors import CacheError, CompileError
from flashattn_jit.jit.cache.entry import (
    ARTIFACT,
    STEPPED_DOWN,
    CompilerIdentity,
    CorruptEntryError,
    Entry,
    KernelKey,
    may_be_swapped,
    sources_changed,
)
from flashattn_jit.jit.cache.layers import Counters, Found, found_in_folder, oldest_driver
from flashattn_jit.jit.cache.misses import SHIP
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation import nvcc, toolchain
from flashattn_jit.jit.compilation.compile_job import BuildFailure, Compiler, SpillError
from flashattn_jit.jit.compilation.toolchain import ask_version, cxx_words
from flashattn_jit.variants.ir.ir import fitting_name

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LEAST_ROOM = 1 << 20
_NO_ROOM_WORDS = ("No space left on device", "Disk quota exceeded", "Read-only file system")


class BuildFunction(Protocol):
    """`toolchain.build`, or a stand-in."""

    def __call__(
        self, source: str, key: str, target: str, compiler: Compiler | None, staging: Path
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel that is looked up. smaller: the keys of the smaller tiles that may replace it."""

    request: BuildRequest
    key: KernelKey
    smaller: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Obtained(Generic[T]):
    """A kernel that was obtained: the result of `use`, its entry, and the time of compilation.

    tile: the index of the kernel request that it serves.
    """

    value: T
    found: Found
    compile_s: float = 0.0
    tile: int = 0


class _NoRoomError(Exception):
    """A build cannot be written to the cache's folder; the message says why."""


@dataclass(frozen=True, slots=True)
class Builder(Generic[T]):
    """Compiles kernels into a store.

    use: loads or checks a build before it is published, so that no unusable artifact enters the
    cache; it may raise OSError and AbiError. must_keep: a build that cannot be published is an
    error.
    """

    store: Store
    compiler: Compiler | None
    build: BuildFunction
    use: Callable[[Found], T]
    counters: Counters
    must_keep: bool = False

    def __call__(self, wanted: Wanted) -> Obtained[T] | str:
        """The built kernel, or the key in `wanted.smaller` that replaces it.

        Raises CompileError, AbiError, CacheError with `must_keep`, EnvironmentVariableError for a
        wrong limit of the cache's size.
        """
        env.cache_max_bytes()  # raises before any work
        try:
            return self._in_store(wanted)
        except _NoRoomError as error:
            reason = str(error)
        if self.must_keep:
            raise CacheError(
                f"kernel {wanted.key.hex[:16]} of {wanted.request.name} cannot be kept in "
                f"{self.store.root}: {reason}; set FLASHATTN_JIT_CACHE_DIR to a folder that can be "
                "written"
            )
        log.warning("kernels are not kept: cannot write to %s: %s", self.store.root, reason)
        with tempfile.TemporaryDirectory(prefix="flashattn_jit-") as folder:
            return self._build(wanted, Path(folder), can_publish=False)

    def _in_store(self, wanted: Wanted) -> Obtained[T] | str:
        with contextlib.ExitStack() as stack:
            try:
                staging = stack.enter_context(self.store.staging())
                if os.statvfs(staging).f_flag & os.ST_NOEXEC:
                    raise _NoRoomError("its file system is mounted with noexec: it runs no code")
            except OSError as error:
                raise _NoRoomError(str(error)) from error
            return self._build(wanted, staging, can_publish=True)

    def _build(self, wanted: Wanted, staging: Path, can_publish: bool) -> Obtained[T] | str:
        key, request = wanted.key, wanted.request
        meta: dict[str, Any] = {}
        source = request.render()
        try:
            compile_s = self.build(source, key.hex, request.target, self.compiler, staging)
        except SpillError as spill:
            compile_s = spill.compile_s
            if spill.spill_bytes is None or spill.spill_bytes > request.spill_bytes:
                meta["complaints"] = list(spill.complaints)
        except (BuildFailure, OSError) as failure:
            if can_publish and (reason := _no_room(failure, staging)):
                raise _NoRoomError(reason) from failure
            if isinstance(failure, OSError):
                raise
            raise _compile_error(
                self.store, key, request, staging, self.compiler, failure
            ) from failure
        self.counters.compiles += 1
        self.counters.compile_s += compile_s
        shown = f"{key.hex[:16]} of {request.name}"
        log.info("compiled kernel %s in %.2f s", shown, compile_s)
        meta["compile_s"] = round(compile_s, 3)
        steps_down = bool(wanted.smaller and "complaints" in meta)
        if steps_down:
            log.info("kernel %s takes a smaller tile: %s", shown, meta["complaints"])
            meta[STEPPED_DOWN] = {"key": wanted.smaller[0]}
            staging.joinpath(ARTIFACT).unlink()
        elif "complaints" in meta:
            log.warning("kernel %s will be slow: %s", shown, meta["complaints"])
        identity = self._complete(meta, key, request.target, request.name)
        # A file that was loaded is mapped, so it may be renamed or removed afterwards.
        own = None if steps_down else self._use_staged(wanted, identity, staging, meta)
        entry = self._publish(wanted, identity, staging, meta) if can_publish and identity else None
        if own is None:
            return wanted.smaller[0]
        kept = found_in_folder(entry, "compiler") if entry else None
        if kept is None or kept.stepped_down_to:
            if self.must_keep:
                raise CacheError(f"kernel {shown} is not kept in {self.store.root}")
            return Obtained(*own, compile_s)
        try:
            return Obtained(self.use(kept), kept, compile_s)
        except OSError as error:
            log.warning("kernel %s is kept, but cannot be loaded: %s", shown, error)
            return Obtained(*own, compile_s)

    def _use_staged(
        self,
        wanted: Wanted,
        identity: CompilerIdentity | None,
        staging: Path,
        meta: dict[str, Any],
    ) -> tuple[T, Found]:
        """Passes a staged build to `use`: as a file, and if that fails from memory."""
        # The staging folder is removed, whether or not the entry is kept.
        files = {p.name: p.read_bytes() for p in staging.iterdir() if p.is_file()}
        staged = Found(
            key=wanted.key.hex,
            compiler_id=identity.id if identity else "unknown",
            layer="compiler",
            path=staging,
            meta={**meta, "files": {ARTIFACT: {"bytes": len(files[ARTIFACT])}}},
            head=files[ARTIFACT][:64],
            read=files.__getitem__,
            in_folder=not may_be_swapped(staging),
        )
        try:
            return self.use(staged), staged
        except OSError as error:
            log.debug("%s cannot be loaded where it lies: %s", staging, error)
        staged = replace(staged, in_folder=False)
        return self.use(staged), staged

    def _complete(
        self, meta: dict[str, Any], key: KernelKey, target: str, name: str
    ) -> CompilerIdentity | None:
        """Adds document, name, time and versions to `meta`. Returns the compiler's identity.

        name: of the variant that it is built for. Other variants may have the same kernel.
        """
        meta["document"] = key.document
        meta["name"] = fitting_name(name)
        meta["created"] = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        if self.compiler is None:
            return None
        # Not the stored identity: that of a wrapper may be outdated, as its fingerprint stays equal
        # when the compiler behind it changes.
        identity = ask_version(self.compiler)
        if is_cuda(target) and (version := nvcc.cuda_version(identity.version)):
            meta["cuda_version"] = "{}.{}".format(*version)
            meta["min_driver"] = oldest_driver(version[0])
        return identity

    def _publish(
        self, wanted: Wanted, identity: CompilerIdentity, staging: Path, meta: dict[str, Any]
    ) -> Entry | None:
        """Publishes a staged build; None if that fails."""
        assert self.compiler is not None
        if sources_changed(wanted.request.template):
            log.warning("templates or headers changed since the key was made: not kept")
            return None
        store, key = self.store, wanted.key.hex
        try:
            store.remember_compiler(self.compiler.fingerprint, identity)
            entry = store.publish(staging, key, identity, meta, self._count_corrupt)
        except OSError as error:
            shown = f"{key[:16]} of {wanted.request.name}"
            log.warning("kernel %s is not kept in %s: %s", shown, store.root, error)
            return None
        _evict(store)
        return entry

    def _count_corrupt(self, _: CorruptEntryError) -> None:
        self.counters.corrupt += 1


def _evict(store: Store) -> None:
    most = env.cache_max_bytes()
    if most is None:
        return
    from flashattn_jit.jit.cache.eviction import collect

    try:
        log.info("%s", collect(store, most))
    except (OSError, CacheError) as error:
        log.warning("the kernel cache %s was not made smaller: %s", store.root, error)


def _no_room(failure: BuildFailure | OSError, staging: Path) -> str:
    """Why a build failed if its folder is the cause; empty for other failures."""
    if isinstance(failure, OSError):
        if failure.errno in _NO_ROOM:
            return str(failure)
    else:
        with contextlib.suppress(OSError):
            output = staging.joinpath(toolchain.LOG).read_text(errors="replace")
            for line in output.splitlines():
                if any(word in line for word in _NO_ROOM_WORDS):
                    return line.strip()
    try:
        disk = os.statvfs(staging)
    except OSError:
        return f"{staging} was removed"
    # A compiler that cannot write its output may not have been able to write the log either.
    is_full = disk.f_bavail * disk.f_frsize < _LEAST_ROOM or (disk.f_files and not disk.f_favail)
    return os.strerror(errno.ENOSPC) if is_full else ""


def _compile_error(
    store: Store,
    key: KernelKey,
    request: BuildRequest,
    staging: Path,
    compiler: Compiler | None,
    failure: BuildFailure,
) -> CompileError:
    """The error for the user; the log and the source that it names are kept."""
    try:
        folder = store.keep_failure(staging, key.hex)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="flashattn_jit-failed-"))
        for path in filter(Path.is_file, staging.iterdir()):
            shutil.copyfile(path, folder / path.name)
    log_path = str(folder / toolchain.LOG)
    source_path = str(folder / toolchain.source_name(request.target))
    if compiler is None:
        lines = [
            f"{request.name} needs a kernel for {request.target} that no layer of the cache has: "
            f"{failure.first_error}; or {SHIP}"
        ]
    else:
        where = "{}:{}: ".format(*failure.location) if failure.location else ""
        named = cxx_words()
        # A failure without a location in the source is one of the compiler itself.
        blame = f" ({named} compiles nothing here)" if named and not failure.location else ""
        lines = [
            f"a kernel of {request.name} for {request.target} does not compile: {where}"
            f"{failure.first_error}{blame}",
            f"  compiler: {shlex.join(compiler.command)}" + (f" ({named})" if named else ""),
        ]
    return CompileError(
        "\n".join([*lines, f"  log:    {log_path}", f"  source: {source_path}"]),
        first_error=failure.first_error,
        location=failure.location,
        log_path=log_path,
        source_path=source_path,
    )
