"""What the kernel cache holds, and where this process' kernels came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import env
from ..jit import module as _module
from ..jit.store import ARTIFACT, META
from ._table import kib

KernelSource = Literal["memory", "disk", "compiler"]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The kernel cache. `str()` gives a few lines.

    directory: the folder of compiled kernels, kernels and bytes: the entries in it. The rest is
    of this process: kernels in memory, found on disk, compiled, and the seconds that took.
    """

    directory: Path
    kernels: int
    bytes: int
    in_memory: int
    disk_hits: int
    compiles: int
    compile_s: float

    def __str__(self) -> str:
        return (
            f"{self.directory}: {self.kernels} kernels, {kib(self.bytes)}\n"
            f"this process: {self.in_memory} in memory, {self.disk_hits} from disk, "
            f"{self.compiles} compiled in {self.compile_s:.1f} s"
        )


def cache_info() -> CacheInfo:
    """What is in the kernel cache now, and what this process took from it.

    >>> print(fa.cache_info())
    """
    root = env.cache_dir()
    entries = [p for p in root.glob(f"v*/[!.]*/*/*/{META}") if (p.parent / ARTIFACT).is_file()]
    size = sum(f.stat().st_size for p in entries for f in p.parent.iterdir() if f.is_file())
    counters = _module.default.counters
    return CacheInfo(
        root, len(entries), size, len(_module.default._modules), counters.disk_hits,
        counters.compiles, counters.compile_s,
    )  # fmt: skip


def last_kernel_source() -> KernelSource | None:
    """Where this process' most recent kernel came from; None before the first.

    "compiler" and "disk" say how it was first loaded, "memory" that a new problem found it loaded.
    A call whose plan is remembered looks for no kernel and changes nothing.

    >>> fa.attention(q, k, v, variant)
    >>> fa.last_kernel_source()
    'compiler'
    """
    return _module.default.last_source
