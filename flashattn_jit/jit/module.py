"""Loaded kernels: memory, then the user's folder, then the compiler.

A hit in memory is one dict look-up. A hit on disk reads and verifies one entry; it writes nothing,
renders nothing and starts no process. Threads and processes that want one kernel compile it once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, Protocol

from flashattn_jit import _C, env
from flashattn_jit.errors import AbiError, CompileError, MissingKernelError
from flashattn_jit.jit import key as keys
from flashattn_jit.jit import toolchain
from flashattn_jit.jit.compiler import (
    Compiler,
    CompilerIdentity,
    ask_version,
    find_compiler,
    identify,
)
from flashattn_jit.jit.key import KernelKey
from flashattn_jit.jit.locks import build_lock
from flashattn_jit.jit.store import ARTIFACT, CorruptEntryError, Entry, Store

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the layers below memory did in this process."""

    disk_hits: int = 0
    misses: int = 0
    compiles: int = 0
    compile_s: float = 0.0
    lock_wait_s: float = 0.0
    corrupt: int = 0


class BuildFunction(Protocol):
    """`toolchain.build`, or a stand-in."""

    def __call__(
        self, source: str, key: str, target: str, compiler: Compiler | None, staging: Path
    ) -> toolchain.BuildReport: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One kernel that is wanted: see `KernelCache.load`."""

    spec: str
    template: str
    target: str
    render: Callable[[], str]


class KernelCache:
    """All layers. The process has one, `default`; tests make their own with stand-ins."""

    def __init__(
        self,
        *,
        build: BuildFunction = toolchain.build,
        load: Callable[[str], _C.Module] = _C.Module,
    ) -> None:
        self._build = build
        self._load_artifact = load
        self._modules: dict[str, _C.Module] = {}
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self.counters = Counters()
        self.last_source: Literal["memory", "disk", "compiler"] | None = None

    def find(self, spec: str) -> _C.Module | None:
        """The module of a spec that this process loaded already."""
        return self._modules.get(spec)

    def load(self, spec: str, template: str, target: str, render: Callable[[], str]) -> _C.Module:
        """The module of a kernel spec, compiled where no layer has it.

        `spec` is the canonical JSON of the kernel spec, target included; `template` the name of its
        root template; `render` makes the source and is called on a miss only. Raises CompileError,
        MissingKernelError, CacheError, AbiError, TargetError; then nothing was cached.
        """
        module = self._modules.get(spec)
        if module is not None:
            self.last_source = "memory"
            return module
        with self._only_thread(spec):
            module = self._modules.get(spec)
            if module is None:
                module = self._load_or_build(Request(spec, template, target, render))
                self._modules[spec] = module
        return module

    def forget(self) -> None:
        """Empties the memory layer, for tests. Modules that are in use stay loaded."""
        self._modules.clear()

    def reset_after_fork(self) -> None:
        """Drops locks that threads of the parent process held."""
        self._lock = threading.Lock()
        self._building = {}

    @contextlib.contextmanager
    def _only_thread(self, spec: str) -> Iterator[None]:
        """Lets one thread at a time look for a kernel; others find it in memory afterwards."""
        with self._lock:
            lock = self._building.setdefault(spec, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._building.pop(spec, None)

    def _load_or_build(self, request: Request) -> _C.Module:
        mode = env.compile_mode()
        store = Store(env.cache_dir())
        key = keys.kernel_key(
            request.spec, request.template, request.target, toolchain.flags_for(request.target)
        )
        compiler = None if mode == "never" else find_compiler()
        identity = identify(compiler, store.recall_compiler) if compiler else None
        if mode != "always":
            module = self._from_disk(store, key, identity)
            if module is not None:
                self.counters.disk_hits += 1
                self.last_source = "disk"
                return module
        self.counters.misses += 1
        if mode == "never":
            raise MissingKernelError(
                f"kernel {key.hex} for {request.target} is not in {store.root}, and "
                "FLASHATTN_JIT_COMPILE=never forbids to compile it; compile it ahead with the same "
                "FLASHATTN_JIT_CACHE_DIR and FLASHATTN_JIT_COMPILE=missing"
            )
        with build_lock(key.hex, env.lock_wait_s()) as waited:
            self.counters.lock_wait_s += waited
            if mode != "always" and (module := self._from_disk(store, key, identity)):
                self.last_source = "disk"
                return module
            module = self._compile(store, key, request, compiler)
            self.last_source = "compiler"
            return module

    def _from_disk(
        self, store: Store, key: KernelKey, identity: CompilerIdentity | None
    ) -> _C.Module | None:
        """A sound entry's module. A corrupt entry is moved away, so that it is built again."""
        try:
            entry = store.find(key.hex, identity.id if identity else None)
            if entry is None:
                return None
            try:
                return self._open(entry.artifact, key)
            except (AbiError, OSError) as error:
                raise CorruptEntryError(entry.path, str(error)) from error
        except CorruptEntryError as error:
            self._discard(store, error)
            return None

    def _open(self, artifact: Path, key: KernelKey) -> _C.Module:
        module = self._load_artifact(str(artifact))
        try:
            described = json.loads(module.description).get("key")
        except (ValueError, AttributeError):
            described = None
        if described != key.hex:
            raise AbiError(f"artifact {artifact} says that it is kernel {described}, not {key.hex}")
        return module

    def _discard(self, store: Store, error: CorruptEntryError) -> None:
        self.counters.corrupt += 1
        log.warning("%s: moving it to quarantine", error)
        try:
            store.quarantine(error.path)
        except OSError as reason:
            log.warning("cannot move %s: %s", error.path, reason)

    def _compile(
        self, store: Store, key: KernelKey, request: Request, compiler: Compiler | None
    ) -> _C.Module:
        with _staging(store) as (staging, can_publish):
            try:
                report = self._build(request.render(), key.hex, request.target, compiler, staging)
            except toolchain.BuildFailure as failure:
                raise _compile_error(store, key, request, staging, failure) from failure
            self.counters.compiles += 1
            self.counters.compile_s += report.compile_s
            log.info("compiled kernel %s in %.2f s", key.hex[:16], report.compile_s)
            # Opened before it is published: nothing that cannot be loaded enters the cache. The
            # file is mapped by now, so it may be moved or removed.
            module = self._open(staging / ARTIFACT, key)
            if not can_publish or compiler is None:
                return module
            if keys.sources_changed(request.template):
                log.warning("templates or headers changed since the key was made: not kept")
                return module
            try:
                entry = self._publish(store, key, compiler, staging, report)
            except OSError as error:
                log.warning("kernel %s is not kept in %s: %s", key.hex[:16], store.root, error)
                return module
            return self._open(entry.artifact, key)

    def _publish(
        self,
        store: Store,
        key: KernelKey,
        compiler: Compiler,
        staging: Path,
        report: toolchain.BuildReport,
    ) -> Entry:
        # Asked anew: what was remembered may be of a wrapper whose compiler has changed since.
        identity = ask_version(compiler)
        store.remember_compiler(compiler.fingerprint, identity)
        meta = {
            "document": key.document,
            "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            "compile_s": round(report.compile_s, 3),
        }
        try:
            return store.publish(staging, key.hex, identity, meta)
        except CorruptEntryError as error:
            self._discard(store, error)
            return store.publish(staging, key.hex, identity, meta)


@contextlib.contextmanager
def _staging(store: Store) -> Iterator[tuple[Path, bool]]:
    """A folder to build in, and whether it can be published: else it is a temporary one."""
    with contextlib.ExitStack() as stack:
        try:
            folder, can_publish = stack.enter_context(store.staging()), True
        except OSError as error:
            log.warning("kernels are not kept: cannot write to %s: %s", store.root, error)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashattn_jit-")))
            can_publish = False
        yield folder, can_publish


def _compile_error(
    store: Store, key: KernelKey, request: Request, staging: Path, failure: toolchain.BuildFailure
) -> CompileError:
    """The error for the user, its log and source kept where it says."""
    try:
        folder = store.keep_failure(staging, key.hex)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="flashattn_jit-failed-"))
        for path in filter(Path.is_file, staging.iterdir()):
            path.replace(folder / path.name)
    where = f"{failure.location[0]}:{failure.location[1]}: " if failure.location else ""
    log_path, source_path = str(folder / toolchain.LOG), str(folder / toolchain.SOURCE)
    return CompileError(
        f"a kernel for {request.target} does not compile: {where}{failure.first_error}\n"
        f"  log:    {log_path}\n  source: {source_path}",
        first_error=failure.first_error,
        location=failure.location,
        log_path=log_path,
        source_path=source_path,
    )


default = KernelCache()
find_kernel = default.find
load_kernel = default.load
os.register_at_fork(after_in_child=default.reset_after_fork)
