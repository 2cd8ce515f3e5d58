"""`fa.pack`: cache entries in one file, to be shipped."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import env
from ..codegen.spec import AnySpec, name_of
from ..errors import PackError
from ..jit.layers import Found, entries_of, found_in_folder
from ..jit.remote import layers
from ..jit.store import Store
from ..jit.toolchain import key_of
from ..planner.tiles import requests_of
from .pack_writer import check_place, checked_path, write_pack
from .report import kernel_words
from .targets import parse_targets
from .wanted import wanted_specs

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PackReport:
    """What `pack` wrote. targets: (target, entries) of each, sorted."""

    path: str
    entries: int
    bytes: int
    targets: tuple[tuple[str, int], ...]
    wall_s: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.entries} kernels ({_words(self.targets)}), "
            f"{self.bytes / 1e6:.1f} MB in {self.wall_s:.2f} s"
        )


def pack(
    path: str | os.PathLike[str],
    *,
    manifest: Any = None,
    targets: str | Sequence[str] = (),
    keys: Sequence[str] = (),
    allow_cpp: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> PackReport:
    """Writes kernels of the cache to one file, whole or not at all.

    Without `manifest` and `keys`, all of the user's folder is packed. Where several compilers made
    a kernel, the newest is taken. Equal entries make equal files, byte for byte.

    Args:
        path: the file to write, in a folder that is there; a file that is there is replaced.
        manifest: paths or `Line`s, as for `warm`: the kernels that they stand for, and what those
            stepped down to, from any layer.
        targets: only kernels of these; with `manifest` it is retargeted to them, as in `warm`.
        keys: only kernels of these keys or beginnings of keys.
        allow_cpp: see `read_manifest`.
        progress: called with the number of entries that are written, and of all, after each.

    Raises:
        PackError: a kernel of the manifest is in no layer, a key names none, an entry is corrupt,
            there is nothing to pack, or the folder of `path` does not exist.
        InputError: `path` is no path.
        ManifestError, TargetError, CacheError, OSError: nothing was written.

    Example:
        >>> fa.pack("kernels.pack", manifest="m.jsonl", targets=("cpu:avx2", "sm_90"))
    """
    begin = time.perf_counter()
    check_place(checked_path("path", path))
    chosen = chosen_entries(manifest, targets, keys, allow_cpp)
    return report_of(path, chosen, write_pack(path, chosen, progress), begin)


def chosen_entries(
    manifest: Any, targets: str | Sequence[str], keys: Sequence[str], allow_cpp: bool
) -> list[Found]:
    """The kernels that `pack` is asked for; raises what it does."""
    if manifest is None:
        found = _of_folder(parse_targets(targets))
    else:
        specs = wanted_specs(manifest, targets=targets, allow_cpp=allow_cpp)
        found = _of_specs(specs)
    chosen = [one for one in found if not keys or one.key.startswith(tuple(keys))]
    for key in keys:
        if not any(one.key.startswith(key) for one in chosen):
            raise PackError(f"no kernel of that choice has a key that begins with {key!r}")
    if not chosen:
        raise PackError(
            "there is nothing to pack: no such kernel is in the cache; build some with "
            "flashattn-jit warm"
        )
    return chosen


def report_of(
    path: str | os.PathLike[str], chosen: Sequence[Found], size: int, begin: float
) -> PackReport:
    """What was written, since `begin` of `time.perf_counter`."""
    return PackReport(
        os.fspath(path), len(chosen), size, _counts(chosen), time.perf_counter() - begin
    )


def targets_words(chosen: Sequence[Found]) -> str:
    """How many kernels there are of each target, as a report says it."""
    return _words(_counts(chosen))


def _counts(chosen: Sequence[Found]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(_target(one) for one in chosen).items()))


def _words(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count} for {target}" for target, count in counts) or "none"


def _of_folder(targets: Sequence[str]) -> list[Found]:
    """The newest entry of each key in the user's folder."""
    newest: dict[str, Found] = {}
    store = Store(env.cache_dir())
    for entry in store.entries():
        if not entry.meta:
            store.verify(entry.path)  # raises, and says why
        other = newest.get(entry.key)
        if other is None or entry.created > str(other.meta.get("created", "")):
            newest[entry.key] = found_in_folder(entry, "user")
    return [one for one in newest.values() if not targets or _target(one) in targets]


def _of_specs(specs: Sequence[AnySpec]) -> list[Found]:
    """The entries that serve some specs, stepped-down ones with their ways."""
    found: dict[str, Found] = {}
    missing = []
    places = layers()
    for spec in specs:
        keys = [key_of(request).hex for request in requests_of(spec)]
        try:
            found.update((one.key, one) for one in entries_of(keys, places))
        except LookupError:
            missing.append(f"{name_of(spec)}: {kernel_words(spec)} for {spec.target}")
    if missing:
        more = len(missing) - _SHOWN
        raise PackError(
            f"{len(missing)} of {len(specs)} kernels are in no layer of the cache; build them with "
            "flashattn-jit warm and the same manifest and targets:\n  "
            + "\n  ".join(missing[:_SHOWN])
            + (f"\n  and {more} more" if more > 0 else "")
        )
    return list(found.values())


def _target(found: Found) -> str:
    return str(dict(found.meta["document"]).get("target", ""))
