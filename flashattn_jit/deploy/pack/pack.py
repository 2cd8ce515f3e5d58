"""`fa.pack`: cache entries in one file, to be shipped."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import env
from ...codegen.spec import AnySpec, name_of
from ...codegen.targets import called_target
from ...errors import PackError
from ...jit.cache.entry import META, Entry, sha256
from ...jit.cache.layers import Found, entries_of, found_in_folder
from ...jit.cache.pack_file import write_archive
from ...jit.cache.remote import layers
from ...jit.cache.store import Store, entry_folder
from ...jit.compilation.toolchain import key_of
from ...planner.tiles import build_requests
from ..files import checked_path, fault_of_output, replacing
from ..wanted.arguments import parse_targets
from ..wanted.specs import wanted_specs
from ..warm.report import kernel_words

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
        targets = ", ".join(f"{count} for {target}" for target, count in self.targets)
        size = f"{self.bytes / 1e6:.1f} MB in {self.wall_s:.2f} s"
        return f"{self.path}: {self.entries} kernels ({targets}), {size}"


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
    target_path = checked_path("path", path)
    check_output_path(target_path)
    chosen = chosen_entries(manifest, targets, keys, allow_cpp)
    with replacing(target_path) as file:
        write_archive(file, members(chosen, progress))
    return report_of(target_path, chosen, begin)


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


def report_of(path: Path, chosen: Sequence[Found], begin: float) -> PackReport:
    """What was written to a file, since `begin` of `time.perf_counter`."""
    targets = Counter(target_of(one.meta) for one in chosen)
    size, wall_s = path.stat().st_size, time.perf_counter() - begin
    return PackReport(str(path), len(chosen), size, tuple(sorted(targets.items())), wall_s)


def target_of(meta: Mapping[str, Any]) -> str:
    """The target of an entry."""
    return str(dict(meta["document"]).get("target", ""))


def _of_folder(targets: Sequence[str]) -> list[Found]:
    """The newest entry of each key in the user's folder."""
    newest: dict[str, Entry] = {}
    store = Store(env.cache_dir())
    for entry in sorted(store.entries(), key=lambda entry: entry.created):
        if not entry.meta:
            store.verify(entry.path)  # raises, and says why
        newest[entry.key] = entry
    chosen = [
        one
        for one in newest.values()
        if not targets or called_target(target_of(one.meta)) in targets
    ]
    return [found_in_folder(entry, "user") for entry in chosen]


def _of_specs(specs: Sequence[AnySpec]) -> list[Found]:
    """The entries that serve some specs, stepped-down ones with their ways."""
    found: dict[str, Found] = {}
    missing = []
    places = layers()
    for spec in specs:
        keys = [key_of(request).hex for request in build_requests(spec)]
        try:
            found.update((one.key, one) for one in entries_of(keys, places))
        except LookupError:
            missing.append(
                f"{name_of(spec)}: {kernel_words(json.loads(spec.document()))} for {spec.target}"
            )
    if missing:
        lines = missing[:_SHOWN]
        if more := missing[_SHOWN:]:
            lines.append(f"and {len(more)} more")
        head = (
            f"{len(missing)} of {len(specs)} kernels are in no layer of the cache; build them with "
            "flashattn-jit warm and the same manifest and targets:"
        )
        raise PackError("\n  ".join([head, *lines]))
    return list(found.values())


# --- writing -------------------------------------------------------------------------------------


def members(
    sources: Sequence[Found], progress: Callable[[int, int], object] | None = None
) -> Iterator[tuple[str, str, bytes]]:
    """What `write_archive` makes a pack of: the files of some entries.

    The same in whatever order entries come. Each file is read once and compared with the digest
    that its entry states. Raises PackError for one that differs.
    """
    chosen = {entry_folder(source.compiler_id, source.key): source for source in sources}
    for done, (folder, source) in enumerate(sorted(chosen.items()), start=1):
        meta = _meta_text(source)
        digests = {name: stated["sha256"] for name, stated in source.meta["files"].items()}
        digests[META] = sha256(meta)
        for name, digest in sorted(digests.items()):
            yield f"{folder}/{name}", digest, meta if name == META else read_file(source, name)
        if progress is not None:
            progress(done, len(chosen))


def without_files(one: Found, left_out: Container[str]) -> Found:
    """An entry as it is packed without some of its files."""
    files = {name: said for name, said in one.meta["files"].items() if name not in left_out}
    return replace(one, meta={**one.meta, "files": files})


def read_file(source: Found, name: str) -> bytes:
    """A file of an entry. Raises PackError where it is not what its digest says."""
    try:
        return source.read(name)
    except (ValueError, OSError) as error:
        raise PackError(
            f"{source.path} cannot be packed: {error}; run: flashattn-jit cache verify"
        ) from error


def _meta_text(source: Found) -> bytes:
    # As a store writes it: the same entry packed from a folder and from a pack is the same bytes.
    return (json.dumps(source.meta, indent=1, sort_keys=True) + "\n").encode()


def check_output_path(path: Path) -> None:
    """Raises PackError where no pack can be written: its folder is missing, or it is a folder."""
    if fault := fault_of_output(path):
        raise PackError(f"cannot write the pack {path}: {fault}")
