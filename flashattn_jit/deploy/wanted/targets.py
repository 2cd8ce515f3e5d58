"""Names of targets, and of groups of them, as `warm`, `pack` and `unpack` take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...codegen.spec import CPU_TARGETS, CUDA_TARGETS, compiled_target, default_target
from ...errors import TargetError


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Compiled targets by name: also ``host`` (this machine's), ``cpu``, ``cuda`` and ``all``.

    Raises TargetError for a name that is none.
    """
    groups = {"cpu": CPU_TARGETS, "cuda": CUDA_TARGETS, "all": (*CPU_TARGETS, *CUDA_TARGETS)}
    chosen: dict[str, None] = {}
    if targets is None or (isinstance(targets, Sequence) and not targets):
        return ()
    if not isinstance(targets, Sequence) or not all(isinstance(n, str) for n in targets):
        raise TargetError(
            f"targets must be names, in a string or a sequence, got {type(targets).__name__}"
        )
    names = targets.split(",") if isinstance(targets, str) else targets
    for name in map(str.strip, names):
        if name == "host":
            chosen.update(dict.fromkeys(_host_targets()))
            continue
        for target in groups.get(name, (compiled_target(name),)):
            if target not in groups["all"]:
                raise TargetError(
                    f"unknown target {name!r}; known: {', '.join(groups['all'])}, and host, "
                    f"{', '.join(groups)} for several"
                )
            chosen[target] = None
    return tuple(chosen)


def _host_targets() -> Iterable[str]:
    import torch

    from ...codegen.spec import device_target

    yield default_target()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield device_target(index)
