"""Names of targets, and of groups of them, as `warm`, `pack` and `unpack` take them."""

from __future__ import annotations

from collections.abc import Sequence

from ...codegen.spec import default_target, device_target
from ...codegen.targets import CPU_TARGETS, CUDA_TARGETS, compiled_here, compiled_target
from ...errors import TargetError


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Compiled targets by name: also ``host`` (this machine's), ``cpu``, ``cuda`` and ``all``.

    ``cpu`` and ``all`` are without those of machines of another architecture.

    Raises TargetError for a name that is none.
    """
    every = (*CPU_TARGETS, *CUDA_TARGETS)
    cpu = tuple(filter(compiled_here, CPU_TARGETS))
    groups = {"cpu": cpu, "cuda": CUDA_TARGETS, "all": (*cpu, *CUDA_TARGETS)}
    if targets is None or (isinstance(targets, Sequence) and not targets):
        return ()
    if not isinstance(targets, Sequence) or not all(isinstance(n, str) for n in targets):
        raise TargetError(
            f"targets must be names, in a string or a sequence, got {type(targets).__name__}"
        )
    chosen: list[str] = []
    for name in map(str.strip, targets.split(",") if isinstance(targets, str) else targets):
        named = _host_targets() if name == "host" else groups.get(name, [compiled_target(name)])
        chosen += named
        if chosen[-1] not in every:
            raise TargetError(
                f"unknown target {name!r}; known: {', '.join(every)}, and host, "
                f"{', '.join(groups)} for several"
            )
    return tuple(dict.fromkeys(chosen))


def _host_targets() -> list[str]:
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [default_target(), *map(device_target, gpus)]
