"""Kernels in use: the memory layer, and one look-up through the layers behind it.

A hit in memory is one dict look-up; threads that want one kernel look for it once. Else `Resolver`
asks the layers in their order, then the compiler. A hit there takes no lock, starts no process and
writes nothing. A miss takes the kernel's lock and looks again, as another process may have built
it; then it asks the remote layer, then the compiler. With FLASHATTN_JIT_COMPILE=never a miss is an
error, and nothing is written, locked or started: what the remote layer has is loaded from memory.

A CUDA kernel is asked for with the same kernel on smaller tiles as fallbacks. One that spills
registers is not kept; its entry says which tile took its place, and a look-up goes on there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import Request
from flashattn_jit.errors import AbiError, CacheError, CompileError, Searched, TargetError
from flashattn_jit.jit.cache.entry import ARTIFACT, CompilerIdentity, CorruptEntryError
from flashattn_jit.jit.cache.layers import (
    Counters,
    Found,
    Layer,
    found_in_folder,
    local_layers,
    unfit_driver,
    unfit_machine,
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

log = logging.getLogger(__name__)

T = TypeVar("T")

KernelSource = Literal["memory", "disk", "remote", "compiler"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel in memory: the first request that led to it, and its module."""

    request: Request
    module: _C.Module


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel that is in the cache, and not in this process.

    layer: "user", "read_only", "remote" or "compiler". place: which of the requests it became.
    path: the entry's folder, or the pack that holds it.
    """

    key: str
    layer: str
    place: int
    compile_s: float
    artifact_bytes: int
    path: Path


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
        self._asked: dict[str, Loaded] = {}
        self._origins: dict[str, Found] = {}
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self.counters = Counters()
        self.last_source: KernelSource | None = None

    def find(self, spec: str) -> _C.Module | None:
        """The module of a spec that this process loaded already."""
        return self._modules.get(spec)

    def load_stepping(self, requests: Sequence[Request]) -> tuple[int, _C.Module]:
        """The first of `requests` that does not spill registers, and its place among them.

        They are one kernel on ever smaller tiles. The last one is taken even if it spills: slow is
        better than none. Raises CompileError, MissingKernelError, CacheError, AbiError,
        TargetError; then nothing was cached.
        """
        first = requests[0].spec
        module = self._modules.get(first)
        if module is not None:
            self.counters.hits["memory"] += 1
            self.last_source = "memory"
            return self._place(requests), module
        with self._only_thread(first):
            module = self._modules.get(first)
            if module is None:
                place, obtained = self._resolver(self._open).resolve(requests)
                module = obtained.value
                self._origins[module.path] = obtained.found
                self.last_source = _source(obtained.found.layer)
                taken = requests[place].spec if place else first
                self._modules.setdefault(taken, module)
                self._taken[first] = taken
                self._asked[first] = Loaded(requests[0], module)
                self._modules[first] = module
        return self._place(requests), module

    def prepare(self, requests: Sequence[Request]) -> Prepared:
        """As `load_stepping`, but the kernel only is in the cache then; nothing is loaded.

        Its target may be one that this machine cannot run. Raises as `load_stepping` does, and
        CacheError where the cache's folder cannot be written.
        """
        with self._only_thread(f"prepare {requests[0].spec}"):
            return _prepared(*self._resolver(_check_artifact, loads=False).resolve(requests))

    def find_prepared(self, requests: Sequence[Request]) -> Prepared | None:
        """What `prepare` would find without compiling or fetching; None where that is nothing."""
        found = self._resolver(_check_artifact, loads=False).find(requests)
        return None if found is None else _prepared(*found)

    def loaded(self) -> Iterator[Loaded]:
        """What is in memory: each first request that was asked for, with the module it got."""
        return iter(tuple(self._asked.values()))

    def ptx(self, module: _C.Module) -> str:
        """The PTX of a module of a CUDA target. Raises OSError where its entry is gone."""
        origin = self._origins[module.path]
        try:
            return origin.read(PTX).decode()
        except ValueError as error:
            raise OSError(f"{PTX} of {origin.path}: {error}") from error

    def origin(self, module: _C.Module) -> Found | None:
        """Where a module of this process came from."""
        return self._origins.get(module.path)

    def min_driver(self, module: _C.Module) -> int | None:
        """The lowest driver branch, such as 580, that runs a CUDA module; None: not known."""
        origin = self.origin(module)
        value = None if origin is None else origin.meta.get("min_driver")
        return value if isinstance(value, int) else None

    def forget(self) -> None:
        """Empties the memory layer, for tests. Modules that are in use stay loaded."""
        self._modules.clear()
        self._taken.clear()
        self._asked.clear()

    def reset_after_fork(self) -> None:
        """Drops locks that threads of the parent process held."""
        self._lock = threading.Lock()
        self._building = {}

    def _resolver(self, use: Callable[[Found], T], loads: bool = True) -> Resolver[T]:
        return Resolver(use, self._build, self.counters, loads)

    def _place(self, requests: Sequence[Request]) -> int:
        first = requests[0].spec
        taken = self._taken.get(first, first)
        if taken is first:
            return 0
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
    """Stands in for loading: what was read of a layer is verified, a build is looked into."""
    if found.key.encode() not in found.read(ARTIFACT):
        raise AbiError(f"the artifact in {found.path} is of another kernel than {found.key}")


def _prepared(place: int, obtained: Obtained[None]) -> Prepared:
    found = obtained.found
    return Prepared(
        found.key, found.layer, place, obtained.compile_s, found.artifact_bytes, found.path
    )


def _source(layer: str) -> KernelSource:
    return "compiler" if layer == "compiler" else "remote" if layer == "remote" else "disk"


# --- one look-up ---------------------------------------------------------------------------------

_told: set[str] = set()


def _tell_once(warning: str) -> None:
    """Warns of what every look-up meets again."""
    if warning not in _told:
        _told.add(warning)
        log.warning("%s", warning)


_COLLECTING_S = 0.3


@dataclass(slots=True)
class Resolver(Generic[T]):
    """One look-up. `use` puts a found kernel to use; it may raise OSError, AbiError.

    With `loads` kernels that this machine cannot run are passed over; else `use` must not load
    them, and what is found is of no interest unless it is kept.
    """

    use: Callable[[Found], T]
    build: BuildFunction
    counters: Counters
    loads: bool = True
    mode: env.CompileMode = field(default_factory=env.compile_mode)
    store: Store = field(default_factory=lambda: Store(env.cache_dir()))
    compiler: Compiler | None = None
    identity: CompilerIdentity | None = None

    def resolve(self, requests: Sequence[Request]) -> tuple[int, Obtained[T]]:
        """The first of `requests` that does not step down, and its place among them.

        Raises CompileError, MissingKernelError, CacheError, AbiError, TargetError.
        """
        target = requests[0].target
        if self.mode != "never" and self.loads and (why := unfit_target(target)):
            raise TargetError(f"a kernel for {target} cannot run on this machine: {why}")
        found = self._stepping(requests, self._one)
        assert found is not None
        return found

    def find(self, requests: Sequence[Request]) -> tuple[int, Obtained[T]] | None:
        """As `resolve`, but None where a folder or pack lacks a kernel: nothing is built."""
        if self.mode == "always":
            return None
        return self._stepping(requests, self._find_one)

    def _find_one(self, wanted: Wanted) -> Obtained[T] | str | None:
        self._identify()
        return self._search(wanted, local_layers(), [])

    def _stepping(
        self, requests: Sequence[Request], one: Callable[[Wanted], Obtained[T] | str | None]
    ) -> tuple[int, Obtained[T]] | None:
        """What `one` gives of the first request, or of those that took its place."""
        if self.mode != "never":
            self.compiler = toolchain.find_compiler(requests[0].target)
            if self.compiler is not None:
                self.identity = self.store.recall_compiler(self.compiler.fingerprint)
        tiles = _keyed(requests)
        place = 0
        while True:
            obtained = one(tiles[place])
            if obtained is None:
                return None
            if isinstance(obtained, Obtained):
                return place, obtained
            place += 1 + tiles[place].smaller.index(obtained)

    def _one(self, wanted: Wanted) -> Obtained[T] | str:
        """One kernel put to use, or the key among its `smaller` that takes its place."""
        if self.mode == "always":
            self.counters.misses += 1
            with self._lock(wanted):
                return self._built(wanted)
        searched: list[Searched] = []
        # A compiler that nobody remembers is asked under the lock, by one process of many: where no
        # compiler's build is there, its identity is of no interest yet.
        is_unknown = self.compiler is not None and self.identity is None
        if not is_unknown or any(_has_any(layer, wanted) for layer in local_layers()):
            self._identify()
            found = self._search(wanted, local_layers(), searched)
            if found is not None:
                return found
        if self.mode == "never" and self.store.is_being_collected():
            # It may be aside for a moment, while somebody looks whether it is in use.
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
        """Finds out which compiler this machine has, if it has one; may start processes."""
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
            # Kernels that were brought along would have done without a compiler.
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
        """What the first layer that can serve has; adds to `searched` why the others cannot."""
        for layer in among:
            answer = layer.search(wanted.key.hex, self.identity.id if self.identity else None)
            for error in answer.corrupt:
                self._discard(layer, error)
            reason = answer.reason
            for found in answer.found:
                used = self._used(wanted, layer, found)
                if isinstance(used, Obtained):
                    self.counters.hits[layer.name] += 1
                    return used
                if isinstance(used, _Reason):
                    reason = reason or used.text
                    shown = f"{wanted.key.hex[:16]} of {wanted.request.name}"
                    log.info("kernel %s in %s: %s", shown, layer.location, used.text)
                else:
                    return used
            searched.append(Searched(layer.name, layer.location, reason, answer.fault))
            if answer.fault and self.mode != "never":
                _tell_once(f"{layer.location} is not searched for kernels: {reason}")
        return None

    def _used(self, wanted: Wanted, layer: Layer, found: Found) -> Obtained[T] | str | _Reason:
        if layer.name == "remote" and self.mode != "never":
            found = self._adopted(found)
        if found.stepped_down_to:
            if wanted.smaller:
                return found.smaller_tile(wanted.smaller)
            return _Reason("its tile was too large for its registers, and no smaller one will do")
        if self.loads and (why := self._unfit(wanted, found)):
            return _Reason(why)
        try:
            return Obtained(self.use(found), found)
        except AbiError as error:
            corrupt = CorruptEntryError(found.path, str(error))
            self._discard(layer, corrupt)
            return _Reason(f"its entry is corrupt: {corrupt.reason}")
        except OSError as error:
            return _Reason(f"its kernel cannot be loaded here: {error}")

    def _unfit(self, wanted: Wanted, found: Found) -> str:
        target = wanted.request.target
        if why := unfit_target(target) or unfit_machine(found.head):
            return why
        if self.identity is not None and found.compiler_id == self.identity.id:
            # Compiling it again would give the same; its launch says what is wrong.
            return ""
        return unfit_driver(target, found.meta.get("min_driver"))

    def _adopted(self, found: Found) -> Found:
        """A remote kernel in the user's folder; where that cannot be, as it is."""
        files = {name: found.read(name) for name in found.meta["files"]}
        try:
            entry = self.store.adopt(found.key, found.compiler_id, files, found.meta)
            return found_in_folder(entry, "remote")
        except (OSError, CacheError) as error:
            log.warning("kernel %s is not kept: %s", found.key[:16], error)
            return found

    def _discard(self, layer: Layer, error: CorruptEntryError) -> None:
        """Counts a corrupt entry, and moves it away where that is ours to do."""
        self.counters.corrupt += 1
        if layer.name != "user" or self.mode == "never":
            log.warning("%s", error)
            return
        log.warning("%s: moving it to quarantine", error)
        try:
            self.store.quarantine(error.path, error.inode)
        except OSError as reason:
            log.warning("cannot move %s: %s", error.path, reason)


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a kernel that is there does not serve."""

    text: str


def _has_any(layer: Layer, wanted: Wanted) -> bool:
    answer = layer.search(wanted.key.hex, None)
    return bool(answer.found or answer.corrupt)


def _keyed(requests: Sequence[Request]) -> list[Wanted]:
    named = [toolchain.key_of(request) for request in requests]
    return [
        Wanted(request, key, tuple(k.hex for k in named[i + 1 :]))
        for i, (request, key) in enumerate(zip(requests, named, strict=True))
    ]


default = KernelCache()
find_kernel = default.find
load_stepping = default.load_stepping
kernel_ptx = default.ptx
min_driver = default.min_driver
prepare_kernel = default.prepare
find_prepared = default.find_prepared
os.register_at_fork(after_in_child=default.reset_after_fork)
