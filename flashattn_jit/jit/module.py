"""Loaded kernels: memory, then the user's folder, then the compiler.

A hit in memory is one dict look-up. A hit on disk reads and verifies one entry; it writes nothing,
renders nothing and starts no process. Threads and processes that want one kernel compile it once.

A CUDA kernel is asked for with the same kernel on smaller tiles as fallbacks. One that spills
registers is not kept; its entry says which tile took its place, and a look-up goes on there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, Protocol

from flashattn_jit import _C, env
from flashattn_jit.codegen.requests import Request
from flashattn_jit.codegen.target import is_cuda
from flashattn_jit.errors import AbiError, CompileError, MissingKernelError
from flashattn_jit.jit import cuda_toolkit, toolchain
from flashattn_jit.jit import key as keys
from flashattn_jit.jit.compiler import (
    Compiler,
    CompilerIdentity,
    ask_version,
    find_compiler,
    identify,
)
from flashattn_jit.jit.failure import BuildFailure, SpillError
from flashattn_jit.jit.key import KernelKey
from flashattn_jit.jit.locks import build_lock
from flashattn_jit.jit.store import (
    ARTIFACT,
    META,
    STEPPED_DOWN,
    CorruptEntryError,
    Entry,
    Store,
)

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
        self._taken: dict[str, str] = {}
        self._unkept_ptx: dict[str, str] = {}
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self.counters = Counters()
        self.last_source: Literal["memory", "disk", "compiler"] | None = None

    def find(self, spec: str) -> _C.Module | None:
        """The module of a spec that this process loaded already."""
        return self._modules.get(spec)

    def load(
        self,
        spec: str,
        template: str,
        target: str,
        render: Callable[[], str],
        fallbacks: Sequence[Request] = (),
    ) -> _C.Module:
        """The module of a kernel spec, compiled where no layer has it.

        `spec` is the canonical JSON of the kernel spec, target included; `template` the name of its
        root template; `render` makes the source and is called on a miss only. `fallbacks`: see
        `load_stepping`. Raises CompileError, MissingKernelError, CacheError, AbiError, TargetError;
        then nothing was cached.
        """
        return self.load_stepping([Request(spec, template, target, render), *fallbacks])[1]

    def load_stepping(self, requests: Sequence[Request]) -> tuple[int, _C.Module]:
        """The first of `requests` that does not spill registers, and its place among them.

        They are one kernel on ever smaller tiles. The last one is taken even if it spills: slow is
        better than none. Raises as `load` does.
        """
        first = requests[0].spec
        module = self._modules.get(first)
        if module is not None:
            self.last_source = "memory"
            return self._place(requests), module
        with self._only_thread(first):
            module = self._modules.get(first)
            if module is None:
                request, module = self._load_or_build(requests)
                self._modules.setdefault(request.spec, module)
                self._taken[first] = request.spec
                self._modules[first] = module
        return self._place(requests), module

    def ptx(self, module: _C.Module) -> str:
        """The PTX of a module of a CUDA target. Raises OSError where its entry is gone."""
        kept = self._unkept_ptx.get(module.path)
        return Path(module.path).with_name(toolchain.PTX).read_text() if kept is None else kept

    def forget(self) -> None:
        """Empties the memory layer, for tests. Modules that are in use stay loaded."""
        self._modules.clear()
        self._taken.clear()

    def reset_after_fork(self) -> None:
        """Drops locks that threads of the parent process held."""
        self._lock = threading.Lock()
        self._building = {}

    def _place(self, requests: Sequence[Request]) -> int:
        taken = self._taken.get(requests[0].spec, requests[0].spec)
        return next((i for i, r in enumerate(requests) if r.spec == taken), 0)

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

    def _load_or_build(self, requests: Sequence[Request]) -> tuple[Request, _C.Module]:
        mode = env.compile_mode()
        store = Store(env.cache_dir())
        compiler = None if mode == "never" else find_compiler(requests[0].target)
        identity = identify(compiler, store.recall_compiler) if compiler else None
        tiles = [
            (r, keys.kernel_key(r.spec, r.template, r.target, toolchain.flags_for(r.target)))
            for r in requests
        ]
        place = 0
        while True:
            request, key = tiles[place]
            smaller = [k.hex for _, k in tiles[place + 1 :]]
            found = self._load_one(store, key, request, compiler, identity, smaller)
            if not isinstance(found, str):
                return request, found
            place += 1 + smaller.index(found)

    def _load_one(
        self,
        store: Store,
        key: KernelKey,
        request: Request,
        compiler: Compiler | None,
        identity: CompilerIdentity | None,
        smaller: Sequence[str],
    ) -> _C.Module | str:
        """The module of one request, or the key among `smaller` that takes its place."""
        mode = env.compile_mode()
        if mode != "always":
            found = self._from_disk(store, key, identity, smaller)
            if found is not None:
                self.counters.disk_hits += not isinstance(found, str)
                self.last_source = "disk"
                return found
        self.counters.misses += 1
        if mode == "never":
            raise MissingKernelError(
                f"kernel {key.hex} for {request.target} is not in {store.root}, and "
                "FLASHATTN_JIT_COMPILE=never forbids to compile it; compile it ahead with the same "
                "FLASHATTN_JIT_CACHE_DIR and FLASHATTN_JIT_COMPILE=missing"
            )
        with build_lock(key.hex, env.lock_wait_s()) as waited:
            self.counters.lock_wait_s += waited
            if mode != "always":
                found = self._from_disk(store, key, identity, smaller)
                if found is not None:
                    self.last_source = "disk"
                    return found
            found = self._compile(store, key, request, compiler, smaller)
            self.last_source = "compiler"
            return found

    def _from_disk(
        self,
        store: Store,
        key: KernelKey,
        identity: CompilerIdentity | None,
        smaller: Sequence[str],
    ) -> _C.Module | str | None:
        """A sound entry's module, or what its kernel stepped down to.

        A corrupt entry is moved away, so that it is built again.
        """
        try:
            entry = store.find(key.hex, identity.id if identity else None)
            if entry is None:
                return None
            if step := entry.stepped_down_to:
                # Tiles may have been added or dropped since: then the next one is tried.
                return step if step in smaller else smaller[0] if smaller else None
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
        self,
        store: Store,
        key: KernelKey,
        request: Request,
        compiler: Compiler | None,
        smaller: Sequence[str],
    ) -> _C.Module | str:
        with _staging(store) as (staging, can_publish):
            meta: dict[str, Any] = {}
            try:
                report = self._build(request.render(), key.hex, request.target, compiler, staging)
                compile_s = report.compile_s
            except SpillError as spill:
                compile_s = spill.compile_s
                meta["complaints"] = spill.complaints
            except BuildFailure as failure:
                raise _compile_error(store, key, request, staging, failure) from failure
            self.counters.compiles += 1
            self.counters.compile_s += compile_s
            log.info("compiled kernel %s in %.2f s", key.hex[:16], compile_s)
            meta["compile_s"] = round(compile_s, 3)
            steps_down = bool(smaller and "complaints" in meta)
            if steps_down:
                log.info("kernel %s takes a smaller tile: %s", key.hex[:16], meta["complaints"])
                meta[STEPPED_DOWN] = {"key": smaller[0]}
                staging.joinpath(ARTIFACT).unlink()
                module = None
            else:
                if "complaints" in meta:
                    log.warning("kernel %s will be slow: %s", key.hex[:16], meta["complaints"])
                # Opened before it is published: nothing that cannot be loaded enters the cache.
                # The file is mapped by now, so it may be moved or removed.
                module = self._open(staging / ARTIFACT, key)
                self._remember_ptx(module, staging)
            if can_publish and compiler is not None:
                module = self._keep(store, key, request, compiler, staging, meta, module)
            return smaller[0] if module is None else module

    def _keep(
        self,
        store: Store,
        key: KernelKey,
        request: Request,
        compiler: Compiler,
        staging: Path,
        meta: dict[str, Any],
        module: _C.Module | None,
    ) -> _C.Module | None:
        """Publishes a staged build. Returns the published module, or `module` where it cannot."""
        if keys.sources_changed(request.template):
            log.warning("templates or headers changed since the key was made: not kept")
            return module
        try:
            entry = self._publish(store, key, request.target, compiler, staging, meta)
        except OSError as error:
            log.warning("kernel %s is not kept in %s: %s", key.hex[:16], store.root, error)
            return module
        if module is None or entry.stepped_down_to:
            return module
        self._unkept_ptx.pop(module.path, None)
        return self._open(entry.artifact, key)

    def _remember_ptx(self, module: _C.Module, staging: Path) -> None:
        # The staging folder goes away, whether or not the entry is kept.
        ptx = staging / toolchain.PTX
        if ptx.is_file():
            self._unkept_ptx[module.path] = ptx.read_text()

    def _publish(
        self,
        store: Store,
        key: KernelKey,
        target: str,
        compiler: Compiler,
        staging: Path,
        meta: dict[str, Any],
    ) -> Entry:
        # Asked anew: what was remembered may be of a wrapper whose compiler has changed since.
        identity = ask_version(compiler)
        store.remember_compiler(compiler.fingerprint, identity)
        complete = {
            **meta,
            "document": key.document,
            "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        }
        if is_cuda(target) and (version := cuda_toolkit.cuda_version(identity.version)):
            complete["cuda_version"] = "{}.{}".format(*version)
            complete["min_driver"] = cuda_toolkit.min_driver(version[0])
        try:
            return store.publish(staging, key.hex, identity, complete)
        except CorruptEntryError as error:
            self._discard(store, error)
            return store.publish(staging, key.hex, identity, complete)


def min_driver(module: _C.Module) -> int | None:
    """The lowest driver branch, such as 580, that runs a CUDA module; None where it is not kept."""
    try:
        value = json.loads(Path(module.path).with_name(META).read_bytes()).get("min_driver")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int) else None


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
    store: Store, key: KernelKey, request: Request, staging: Path, failure: BuildFailure
) -> CompileError:
    """The error for the user, its log and source kept where it says."""
    try:
        folder = store.keep_failure(staging, key.hex)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="flashattn_jit-failed-"))
        for path in filter(Path.is_file, staging.iterdir()):
            path.replace(folder / path.name)
    where = f"{failure.location[0]}:{failure.location[1]}: " if failure.location else ""
    log_path, source_path = (
        str(folder / toolchain.LOG),
        str(folder / toolchain.source_name(request.target)),
    )
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
load_stepping = default.load_stepping
kernel_ptx = default.ptx
os.register_at_fork(after_in_child=default.reset_after_fork)
