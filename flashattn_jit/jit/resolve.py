"""From requests to a kernel in use: the layers in their order, then the compiler.

A hit takes no lock, starts no process and writes nothing. A miss takes the kernel's lock and looks
again, as another process may have built it; then it asks the remote layer, then the compiler.

With FLASHATTN_JIT_COMPILE=never a miss is an error, and nothing is written, locked or started: what
the remote layer has is loaded from memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flashattn_jit import env
from flashattn_jit.codegen.requests import Request
from flashattn_jit.errors import AbiError, CacheError, CompileError, TargetError
from flashattn_jit.jit import key as keys
from flashattn_jit.jit import toolchain
from flashattn_jit.jit.builder import Builder, BuildFunction, Obtained, Wanted
from flashattn_jit.jit.compiler import Compiler, CompilerIdentity, find_compiler, identify
from flashattn_jit.jit.counters import Counters
from flashattn_jit.jit.entry import CorruptEntryError
from flashattn_jit.jit.fit import unfit_driver, unfit_machine, unfit_target
from flashattn_jit.jit.found import Found, found_in_folder
from flashattn_jit.jit.layers import (
    Layer,
    Searched,
    local_layers,
    nearest_in,
    remote_layers,
    user_layer,
)
from flashattn_jit.jit.locks import build_lock
from flashattn_jit.jit.misses import fault_of, missing_kernel
from flashattn_jit.jit.store import Store

log = logging.getLogger(__name__)

_told: set[str] = set()


def _tell_once(warning: str) -> None:
    """Warns of what every look-up meets again."""
    if warning not in _told:
        _told.add(warning)
        log.warning("%s", warning)


T = TypeVar("T")

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
            self.compiler = find_compiler(requests[0].target)
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
            self.identity = identify(self.compiler, self.store.recall_compiler)

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
        if step := found.stepped_down_to:
            # Tiles may have been added or dropped since: then the next one is tried.
            if step in wanted.smaller:
                return step
            if wanted.smaller:
                return wanted.smaller[0]
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
    named = [
        keys.kernel_key(r.spec, r.template, r.target, toolchain.flags_for(r.target))
        for r in requests
    ]
    return [
        Wanted(request, key, tuple(k.hex for k in named[i + 1 :]))
        for i, (request, key) in enumerate(zip(requests, named, strict=True))
    ]
