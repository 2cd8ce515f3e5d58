"""The content of the kernel cache, and the sources of this process' kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import env
from ..env import format_bytes
from ..jit import module as _module
from ..jit.cache.entry import ARTIFACT, META
from ..jit.cache.remote import layers
from ..jit.module import KernelSource


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The kernel cache. `str()` gives a few lines.

    directory: the folder of compiled kernels, kernels and bytes: the entries in it. layers: where
    kernels are searched before they are compiled, each (layer, folder, pack or URL).

    The other fields are counts of this process. in_memory: kernels loaded. hits: kernels found, by
    layer: "memory", "user", "read_only", "remote"; a call whose plan is cached searches for none.
    misses: kernels that no folder had. compiles and compile_s: those that were compiled, and the
    seconds. waits and lock_wait_s: other processes' builds that were waited for, and the seconds.
    corrupt: entries that failed verification.
    """

    directory: Path
    kernels: int
    bytes: int
    layers: tuple[tuple[str, str], ...]
    in_memory: int
    hits: Mapping[str, int]
    misses: int
    compiles: int
    compile_s: float
    waits: int
    lock_wait_s: float
    corrupt: int

    @property
    def disk_hits(self) -> int:
        """Kernels found in folders and packs."""
        return self.hits["user"] + self.hits["read_only"]

    def __str__(self) -> str:
        found = ", ".join(f"{count} {name}" for name, count in self.hits.items())
        lines = [
            f"{self.directory}: {self.kernels} kernels, {format_bytes(self.bytes)}",
            *(f"then {location} ({name})" for name, location in self.layers[1:]),
            f"this process: {self.in_memory} in memory, {self.disk_hits} from disk, "
            f"{self.compiles} compiled in {self.compile_s:.1f} s",
            f"hits: {found}; {self.misses} misses, {self.waits} waits ({self.lock_wait_s:.1f} s), "
            f"{self.corrupt} corrupt",
        ]
        return "\n".join(lines)


def cache_info() -> CacheInfo:
    """The content of the kernel cache now, and this process' use of it.

    >>> print(fa.cache_info())
    """
    root = env.cache_dir()
    kernels = size = 0
    for meta in root.glob(f"v*/[!.]*/*/*/{META}"):
        # Another process may remove it meanwhile.
        with contextlib.suppress(OSError):
            files = [path.stat().st_size for path in meta.parent.iterdir() if path.is_file()]
            kernels += meta.with_name(ARTIFACT).is_file()
            size += sum(files)
    return CacheInfo(
        directory=root,
        kernels=kernels,
        bytes=size,
        layers=tuple((layer.name, layer.location) for layer in layers()),
        in_memory=_module.default.num_loaded,
        **asdict(_module.default.counters),
    )


def last_kernel_source() -> KernelSource | None:
    """The source of the most recent kernel that this process looked up; None before the first.

    "compiler", "disk" and "remote": where it was loaded from; "memory": it was loaded already. A
    call whose plan is cached looks up no kernel and changes nothing.

    >>> fa.attention(q, k, v, variant)
    >>> fa.last_kernel_source()
    'compiler'
    """
    return _module.default.last_source
