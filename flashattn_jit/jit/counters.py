"""What the kernel cache did in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerName = Literal["memory", "user", "read_only", "remote"]
LAYERS: tuple[LayerName, ...] = ("memory", "user", "read_only", "remote")


@dataclass(slots=True)
class Counters:
    """Kernels found, by layer, and what happened where none had one.

    misses: kernels that no folder had. waits: builds of other processes that were waited for,
    lock_wait_s: how long. corrupt: entries that were not what was published.
    """

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    misses: int = 0
    compiles: int = 0
    compile_s: float = 0.0
    waits: int = 0
    lock_wait_s: float = 0.0
    corrupt: int = 0

    @property
    def disk_hits(self) -> int:
        """Kernels from folders and packs."""
        return self.hits["user"] + self.hits["read_only"]
