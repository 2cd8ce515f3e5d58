"""Loaded kernels: the memory layer, in front of those that `resolve.py` searches.

A hit in memory is one dict look-up. Threads that want one kernel look for it once.

A CUDA kernel is asked for with the same kernel on smaller tiles as fallbacks. One that spills
registers is not kept; its entry says which tile took its place, and a look-up goes on there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from flashattn_jit import _C
from flashattn_jit.codegen.requests import Request
from flashattn_jit.errors import AbiError
from flashattn_jit.jit import toolchain
from flashattn_jit.jit.builder import BuildFunction, Obtained
from flashattn_jit.jit.counters import Counters
from flashattn_jit.jit.entry import ARTIFACT, META
from flashattn_jit.jit.found import Found
from flashattn_jit.jit.resolve import Resolver

__all__ = ["KernelCache", "Loaded", "Prepared", "Request", "find_prepared", "prepare_kernel"]

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

        Its target may be one that this machine cannot run. Raises as `load` does, and CacheError
        where the cache's folder cannot be written.
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
        origin = self._origins.get(module.path)
        if origin is None:
            return Path(module.path).with_name(toolchain.PTX).read_text()
        try:
            return origin.read(toolchain.PTX).decode()
        except ValueError as error:
            raise OSError(f"{toolchain.PTX} of {origin.path}: {error}") from error

    def origin(self, module: _C.Module) -> Found | None:
        """Where a module of this process came from."""
        return self._origins.get(module.path)

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


def min_driver(module: _C.Module) -> int | None:
    """The lowest driver branch, such as 580, that runs a CUDA module; None where it is not kept."""
    origin = default.origin(module)
    try:
        if origin is None:
            meta = json.loads(Path(module.path).with_name(META).read_bytes())
        else:
            meta = origin.meta
        value = meta.get("min_driver")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int) else None


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


default = KernelCache()
find_kernel = default.find
load_kernel = default.load
load_stepping = default.load_stepping
kernel_ptx = default.ptx
prepare_kernel = default.prepare
find_prepared = default.find_prepared
os.register_at_fork(after_in_child=default.reset_after_fork)
