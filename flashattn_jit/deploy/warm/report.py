"""What `warm` did: a result a kernel, and their totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...codegen.spec import tile_words
from ...errors import WarmError

_SHOWN = 5  # failures that an error's message spells out


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What became of one kernel.

    key: of the kernel that was asked for. tile: which of its tiles was taken; 0, unless the first
    ones spill registers. layer: where it was ("user", "read_only", "remote"), "compiler" where it
    was built, "" where it failed. seconds: from its beginning in a worker to its end, compile_s:
    of them inside the compiler. host: the machine that built it. error, log_path: of a failure.
    """

    key: str
    name: str
    target: str
    kernel: str
    tile: int = 0
    layer: str = ""
    compiler_id: str = ""
    seconds: float = 0.0
    compile_s: float = 0.0
    artifact_bytes: int = 0
    host: str = ""
    error: str = ""
    error_type: str = ""
    log_path: str = ""

    @property
    def failed(self) -> bool:
        """Whether there is no kernel."""
        return bool(self.error)

    @property
    def built(self) -> bool:
        """Whether a compiler made it, rather than a layer had it."""
        return self.layer == "compiler"

    def __str__(self) -> str:
        where = f"{self.name}: {self.kernel} for {self.target}"
        if self.failed:
            return f"{where}: {self.error}"
        how = f"compiled in {self.compile_s:.2f} s" if self.built else f"found ({self.layer})"
        smaller = f", on a smaller tile ({self.tile})" if self.tile else ""
        return f"{where}: {how}{smaller}"


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `warm` did, in the order of the kernels' names; `str()` sums it up in a few lines.

    wall_s: from its call to its end. jobs: kernels that were compiled at a time, 0 where an
    executor decided. directory: the cache that has them now. notes: what else to know.
    """

    results: tuple[KernelResult, ...]
    jobs: int
    wall_s: float
    directory: str
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[KernelResult, ...]:
        """The kernels that are not there."""
        return tuple(r for r in self.results if r.failed)

    @property
    def built(self) -> tuple[KernelResult, ...]:
        """The kernels that were compiled."""
        return tuple(r for r in self.results if r.built)

    @property
    def compile_s(self) -> float:
        """The compilers' wall time, summed over kernels."""
        return sum(r.compile_s for r in self.results)

    def raise_for_failures(self) -> None:
        """Raises WarmError, whose `report` this is, where a kernel failed."""
        lines = [f"  {line}" for line in self._failure_lines()]
        if more := lines[_SHOWN:]:
            lines[_SHOWN:] = [f"  and {len(more)} more: see the error's `report`"]
        if lines:
            failed = f"{len(self.failures)} of {len(self.results)} kernels failed"
            head = f"{failed}, the others are in {self.directory}:"
            raise WarmError("\n".join([head, *lines]), report=self)

    def _failure_lines(self) -> list[str]:
        # A missing compiler fails all kernels of its targets with the same words: said once.
        lines = []
        for reason, count in Counter(r.error for r in self.failures).items():
            first = next(r for r in self.failures if r.error == reason)
            lines.append(str(first) if count == 1 else f"{count} kernels: {reason}")
        return lines

    def __str__(self) -> str:
        layers = Counter(r.layer for r in self.results if not r.failed)
        compiled = layers.pop("compiler", 0)
        found = ", ".join(f"{n} {layer}" for layer, n in sorted(layers.items()))
        by = f" on {self.jobs} workers" if self.jobs else ""
        lines = [
            f"{len(self.results)} kernels in {self.directory}: {compiled} compiled "
            f"({self.compile_s:.1f} s of compilers, {self.wall_s:.1f} s of wall time{by}), "
            f"{layers.total()} there before"
            + (f" ({found})" if found else "")
            + f", {len(self.failures)} failed"
        ]
        lines += [f"  failed: {line}" for line in self._failure_lines()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def kernel_words(spec: Mapping[str, Any]) -> str:
    """A spec's document in a few words: what tells it from others of its variant and target.

    Such as ``prefill 96x96 d64 fp32 block_mask``.
    """
    try:
        if "kernel" in spec:
            unit = spec["unit_bytes"]
            return f"units of {unit} bytes" if unit else "all dtypes"
        return tile_words(spec["tile"], spec["head_dims"], spec["dtypes"], spec.get("features", []))
    except (KeyError, ValueError, TypeError):
        return "unknown"
