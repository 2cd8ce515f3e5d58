"""The memory layer of the kernel cache, and the look-up in the layers behind it.

A hit in memory is one dict look-up; threads that ask for one kernel share one look-up. On a miss
`Resolver` searches the layers in order, then runs the compiler. A hit in a local layer takes no
lock, starts no process and writes nothing. A miss takes the kernel's build lock and searches again,
as another process may have built the kernel; then it asks the remote layer, then the compiler. With
FLASHATTN_JIT_COMPILE=never a miss is an error, and nothing is written, locked or started: kernels
of the remote layer are loaded from memory.

A request for a CUDA kernel comes with requests for the same kernel on smaller tiles, as fallbacks.
A kernel that spills registers is not kept: its entry names the kernel on a smaller tile that
replaces it, and the look-up continues with that one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import AbiError, CacheError, CompileError, Searched, TargetError
from flashattn_jit.jit.cache.entry import ARTIFACT, CompilerIdentity, CorruptEntryError
from flashattn_jit.jit.cache.layers import (
    Counters,
    Found,
    Layer,
    found_in_folder,
    local_layers,
    unfit,
    unfit_target,
    user_layer,
)
from flashattn_jit.jit.cache.locks import build_lock
from flashattn_jit.jit.cache.misses import fault_of, missing_kernel, nearest_in
from flashattn_jit.jit.cache.remote import remote_layers
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.builder import Builder, BuildFunction, Obtained, Wanted
from flashattn_jit.jit.compilation.compile_job import Compiler
from flashattn_jit.jit.compilation.nvcc import PTX

if TYPE_CHECKING:
    from flashattn_jit.jit.compilation.ptxas_report import Report

log = logging.getLogger(__name__)

T = TypeVar("T")

KernelSource = Literal["memory", "disk", "remote", "compiler"]
_SOURCES: dict[str, KernelSource] = {
    "user": "disk", "read_only": "disk", "remote": "remote", "compiler": "compiler",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel in memory: the first request that led to it, and its module."""

    request: BuildRequest
    module: _C.Module


class KernelCache:
    """All layers. The process has one, `default`; tests make others with a stand-in compiler."""

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
        self._asked: dict[str, Loaded] = {}
        self._origins: dict[str, Found] = {}
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self.counters = Counters()
        self.last_source: KernelSource | None = None

    def find(self, spec: str) -> _C.Module | None:
        """The module of a spec if this process has loaded it."""
        return self._modules.get(spec)

    def load_stepping(self, requests: Sequence[BuildRequest]) -> tuple[int, _C.Module]:
        """The first of `requests` that does not spill registers: its index and its module.

        requests: one kernel on tiles of decreasing size. The last one is used even if it spills.
        Raises CompileError, MissingKernelError, CacheError, AbiError, TargetError; then nothing
        was cached.
        """
        first = requests[0].spec
        module = self._modules.get(first)
        if module is not None:
            self.counters.hits["memory"] += 1
            self.last_source = "memory"
            return self._index(requests), module
        with self._only_thread(first):
            module = self._modules.get(first)
            if module is None:
                obtained = self._resolver(self._open).resolve(requests)
                module = obtained.value
                self._origins[module.path] = obtained.found
                self.last_source = _SOURCES[obtained.found.layer]
                taken = requests[obtained.tile].spec if obtained.tile else first
                self._modules.setdefault(taken, module)
                self._taken[first] = taken
                self._asked[first] = Loaded(requests[0], module)
                self._modules[first] = module
        return self._index(requests), module

    def prepare(self, requests: Sequence[BuildRequest]) -> Obtained[None]:
        """Like `load_stepping`, but only puts the kernel into the cache and loads nothing.

        This machine need not be able to run the target. Raises the errors of `load_stepping`, and
        CacheError where the cache's folder cannot be written.
        """
        with self._only_thread(f"prepare {requests[0].spec}"):
            return self._resolver(_check_artifact, loads=False).resolve(requests)

    def find_prepared(self, requests: Sequence[BuildRequest]) -> Obtained[None] | None:
        """The kernel that `prepare` would find without compiling or fetching, or None."""
        return self._resolver(_check_artifact, loads=False).find(requests)

    def loaded(self) -> Iterator[Loaded]:
        """The kernels in memory: each first request of a look-up, with the module it got."""
        return iter(tuple(self._asked.values()))

    @property
    def num_loaded(self) -> int:
        """The kernels in memory."""
        return len(set(self._modules.values()))

    def ptx(self, module: _C.Module) -> str:
        """The PTX of a module of a CUDA target. Raises OSError if its entry was removed."""
        origin = self._origins[module.path]
        try:
            return origin.read(PTX).decode()
        except ValueError as error:
            raise OSError(f"{PTX} of {origin.path}: {error}") from error

    def origin(self, module: _C.Module) -> Found | None:
        """The cache entry that a module of this process was loaded from."""
        return self._origins.get(module.path)

    def min_driver(self, module: _C.Module) -> int | None:
        """The oldest driver branch, such as 580, that runs a CUDA module; None if unknown."""
        origin = self.origin(module)
        value = None if origin is None else origin.meta.get("min_driver")
        return value if isinstance(value, int) else None

    def resources(self, module: _C.Module) -> Report | None:
        """ptxas' report on a CUDA module's kernels, from any layer; None if it cannot be read."""
        from flashattn_jit.jit.compilation.ptxas_report import parse_report  # only with a device

        origin = self.origin(module)
        try:
            return None if origin is None else parse_report(origin.read(toolchain.RESOURCES))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self) -> None:
        """Empties the memory layer, for tests. Modules that are referenced stay loaded."""
        self._modules.clear()
        self._taken.clear()
        self._asked.clear()

    def reset_after_fork(self) -> None:
        """Replaces the locks, which threads of the parent process may have held."""
        self._lock = threading.Lock()
        self._building = {}

    def _resolver(self, use: Callable[[Found], T], loads: bool = True) -> Resolver[T]:
        return Resolver(use, self._build, self.counters, loads)

    def _index(self, requests: Sequence[BuildRequest]) -> int:
        first = requests[0].spec
        taken = self._taken.get(first, first)
        if taken is first:
            return 0
        return next((i for i, r in enumerate(requests) if r.spec == taken), 0)

    @contextlib.contextmanager
    def _only_thread(self, spec: str) -> Iterator[None]:
        """Lets one thread at a time look for a kernel; the others then find it in memory."""
        with self._lock:
            lock = self._building.setdefault(spec, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._building.pop(spec, None)

    def _open(self, found: Found) -> _C.Module:
        with found.loadable() as path:
            module = self._load_artifact(str(path))
        try:
            described = json.loads(module.description).get("key")
        except (ValueError, AttributeError):
            described = None
        if described != found.key:
            raise AbiError(f"artifact {path} says that it is kernel {described}, not {found.key}")
        return module


def _check_artifact(found: Found) -> None:
    """Replaces loading for kernels that are only prepared: checks the key in the artifact."""
    if found.key.encode() not in found.read(ARTIFACT):
        raise AbiError(f"the artifact in {found.path} is of another kernel than {found.key}")


def residency_shortages(
    residency: Sequence[tuple[str, int, int]], device: int, slots: int = 0
) -> list[str]:
    """The kernels of a module of which a device holds fewer blocks than planned, in words.

    residency: of the module, from its `residency` or `probe`. slots: blocks of the first kernel,
    attention, on a multiprocessor that its work is planned for, if they are more than its tile was
    chosen for. A usual cause is another release of the compiler, which takes more registers.
    """
    found = []
    for i, (kernel, chosen, blocks) in enumerate(residency):
        planned = max(chosen, slots) if i == 0 else chosen
        if blocks < planned:
            found.append(
                f"{kernel} runs {blocks} blocks on a multiprocessor of device {device}, and is "
                f"planned for {planned}: it will be slower than it should be"
            )
    return found


# --- one look-up ---------------------------------------------------------------------------------

_COLLECTING_S = 0.3


@cache
def _warn_once(warning: str) -> None:
    """Logs a warning that every look-up would repeat."""
    log.warning("%s", warning)


class _UnusableError(Exception):
    """A kernel was found, but cannot be used; the message says why."""


@dataclass(slots=True)
class Resolver(Generic[T]):
    """One look-up. `use` loads or checks a kernel that was found; it may raise OSError, AbiError.

    loads: kernels that this machine cannot run are skipped. Without it `use` must not load them,
    and a build that cannot be kept is an error.
    """

    use: Callable[[Found], T]
    build: BuildFunction
    counters: Counters
    loads: bool = True
    mode: env.CompileMode = field(default_factory=env.compile_mode)
    store: Store = field(default_factory=lambda: Store(env.cache_dir()))
    compiler: Compiler | None = None
    identity: CompilerIdentity | None = None

    def resolve(self, requests: Sequence[BuildRequest]) -> Obtained[T]:
        """The first of `requests` that is not replaced by a smaller tile.

        Raises CompileError, MissingKernelError, CacheError, AbiError, TargetError.
        """
        target = requests[0].target
        if self.mode != "never" and self.loads and (why := unfit_target(target)):
            raise TargetError(f"a kernel for {target} cannot run on this machine: {why}")
        found = self._stepping(requests, self._one)
        assert found is not None
        return found

    def find(self, requests: Sequence[BuildRequest]) -> Obtained[T] | None:
        """Like `resolve`, but builds nothing: None if no folder or pack has the kernel."""

        def search(wanted: Wanted) -> Obtained[T] | str | None:
            self._identify()
            return self._search(wanted, local_layers(), [])

        return None if self.mode == "always" else self._stepping(requests, search)

    def _stepping(
        self, requests: Sequence[BuildRequest], obtain: Callable[[Wanted], Obtained[T] | str | None]
    ) -> Obtained[T] | None:
        """The result of `obtain` for the first request, or for the smaller tile replacing it."""
        if self.mode != "never":
            self.compiler = toolchain.find_compiler(requests[0].target)
            if self.compiler is not None:
                self.identity = self.store.recall_compiler(self.compiler.fingerprint)
        keys = [toolchain.key_of(request) for request in requests]
        index = 0
        while True:
            smaller = tuple(key.hex for key in keys[index + 1 :])
            obtained = obtain(Wanted(requests[index], keys[index], smaller))
            if obtained is None:
                return None
            if isinstance(obtained, Obtained):
                return replace(obtained, tile=index)
            index += 1 + smaller.index(obtained)

    def _one(self, wanted: Wanted) -> Obtained[T] | str:
        """The kernel, loaded or checked by `use`, or the key in `smaller` that replaces it."""
        if self.mode == "always":
            self.counters.misses += 1
            with self._lock(wanted):
                return self._built(wanted)
        searched: list[Searched] = []
        # Identifying a compiler runs it. If no layer has a build by any compiler, that can wait
        # until the lock is held, where one process of many does it.
        is_unknown = self.compiler is not None and self.identity is None
        if not is_unknown or any(_has_any(layer, wanted) for layer in local_layers()):
            self._identify()
            found = self._search(wanted, local_layers(), searched)
            if found is not None:
                return found
        if self.mode == "never" and self.store.is_being_collected():
            # An eviction moves an entry aside for a moment to check whether it is in use.
            time.sleep(_COLLECTING_S)
            found = self._search(wanted, [user_layer()], [])
            if found is not None:
                return found
        self.counters.misses += 1
        if self.mode == "never":
            found = self._search(wanted, remote_layers(), searched)
            if found is not None:
                return found
            raise missing_kernel(
                wanted.request, wanted.key, searched, nearest_in(wanted.key, local_layers())
            )
        with self._lock(wanted):
            self._identify()
            found = self._search(wanted, local_layers(), [])
            if found is None:
                found = self._search(wanted, remote_layers(), [])
            return self._built(wanted, searched) if found is None else found

    def _identify(self) -> None:
        """Sets the identity of this machine's compiler, if it has one; may start processes."""
        if self.compiler is not None and self.identity is None:
            self.identity = toolchain.identify(self.compiler, self.store.recall_compiler)

    def _built(self, wanted: Wanted, searched: Sequence[Searched] = ()) -> Obtained[T] | str:
        builder = Builder(
            self.store, self.compiler, self.build, self.use, self.counters, not self.loads
        )
        try:
            return builder(wanted)
        except CompileError as error:
            cause = fault_of(searched)
            if self.compiler is not None or not cause:
                raise
            # With the kernels of the faulty layer no compiler would be needed: name its fault.
            raise CompileError(
                f"{cause}\n{error}",
                first_error=error.first_error,
                location=error.location,
                log_path=error.log_path,
                source_path=error.source_path,
            ) from error

    @contextlib.contextmanager
    def _lock(self, wanted: Wanted) -> Iterator[None]:
        with build_lock(wanted.key.hex, env.lock_wait_s()) as waited:
            self.counters.waits += waited > 0
            self.counters.lock_wait_s += waited
            yield

    def _search(
        self, wanted: Wanted, among: Iterable[Layer], searched: list[Searched]
    ) -> Obtained[T] | str | None:
        """The kernel of the first layer that has a usable one, or the key that replaces it.

        Appends to `searched` the reason of each layer that has none.
        """
        for layer in among:
            answer = layer.search(wanted.key.hex, self.identity.id if self.identity else None)
            for error in answer.corrupt:
                self._discard(layer, error)
            reason = answer.reason
            for found in answer.found:
                try:
                    used = self._used(wanted, layer, found)
                except _UnusableError as error:
                    reason = reason or str(error)
                    shown = f"{wanted.key.hex[:16]} of {wanted.request.name}"
                    log.info("kernel %s in %s: %s", shown, layer.location, error)
                    continue
                if isinstance(used, Obtained):
                    self.counters.hits[layer.name] += 1
                return used
            searched.append(Searched(layer.name, layer.location, reason, answer.fault))
            # With a corrupt entry the layer itself is searched; `_discard` has named the entry.
            if answer.fault and not answer.corrupt and self.mode != "never":
                _warn_once(f"{layer.location} is not searched for kernels: {reason}")
        return None

    def _used(self, wanted: Wanted, layer: Layer, found: Found) -> Obtained[T] | str:
        """Passes `found` to `use`. Raises _UnusableError where it cannot be used."""
        if layer.name == "remote" and self.mode != "never":
            found = self._adopted(found)
        if found.stepped_down_to:
            if wanted.smaller:
                return found.smaller_tile(wanted.smaller)
            raise _UnusableError(
                "its tile was too large for its registers, and no smaller one will do"
            )
        compiler_id = self.identity.id if self.identity else None
        if self.loads and (why := unfit(found, wanted.request.target, compiler_id)):
            raise _UnusableError(why)
        try:
            return Obtained(self.use(found), found)
        except AbiError as error:
            self._discard(layer, CorruptEntryError(found.path, str(error)))
            raise _UnusableError(f"its entry is corrupt: {error}") from error
        except OSError as error:
            raise _UnusableError(f"its kernel cannot be loaded here: {error}") from error

    def _adopted(self, found: Found) -> Found:
        """A remote kernel, copied into the user's folder if that is possible."""
        files = {name: found.read(name) for name in found.meta["files"]}
        try:
            entry = self.store.adopt(found.key, found.compiler_id, files, found.meta)
            return found_in_folder(entry, "remote")
        except (OSError, CacheError) as error:
            log.warning("kernel %s is not kept: %s", found.key[:16], error)
            return found

    def _discard(self, layer: Layer, error: CorruptEntryError) -> None:
        """Counts a corrupt entry, and moves it to quarantine if it is in the user's folder."""
        self.counters.corrupt += 1
        if layer.name != "user" or self.mode == "never":
            log.warning("%s", error)
            return
        log.warning("%s: moving it to quarantine", error)
        try:
            self.store.quarantine(error.path, error.inode)
        except OSError as reason:
            log.warning("cannot move %s: %s", error.path, reason)


def _has_any(layer: Layer, wanted: Wanted) -> bool:
    answer = layer.search(wanted.key.hex, None)
    return bool(answer.found or answer.corrupt)


default = KernelCache()
find_kernel = default.find
load_stepping = default.load_stepping
kernel_ptx = default.ptx
min_driver = default.min_driver
resources = default.resources
prepare_kernel = default.prepare
find_prepared = default.find_prepared
os.register_at_fork(after_in_child=default.reset_after_fork)
