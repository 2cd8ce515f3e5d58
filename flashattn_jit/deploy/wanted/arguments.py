"""Head dims, dtypes and targets, as users of `warm`, `pack` and the command line write them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, TypeVar

from ...codegen.spec import (
    KV_DTYPES,
    MAX_HEAD_DIM,
    Q_DTYPES,
    SHORT_DTYPES,
    default_target,
    device_target,
)
from ...codegen.targets import CPU_TARGETS, CUDA_TARGETS, compiled_here, compiled_target
from ...errors import InputError, TargetError

Dtypes = tuple[str, str, str]
HeadDims = tuple[int, int]
_T = TypeVar("_T")

_LONG = {short: name for name, short in SHORT_DTYPES.items()} | {
    "float": "float32", "half": "float16",
}  # fmt: skip
_TAKEN = (("q takes", Q_DTYPES), ("k and v take", KV_DTYPES), ("k and v take", KV_DTYPES))


def several(given: Any) -> Iterable[Any]:
    """One or several values as several. A text or a path is one."""
    one = isinstance(given, str | os.PathLike) or not isinstance(given, Iterable)
    return [given] if one else given


def head_dims_of(one: Any) -> HeadDims:
    """(head_dim, head_dim_v) of 64, "64", (576, 512) or "576/512". Raises ValueError."""
    try:
        sizes = [int(part) if isinstance(part, str) else index(part) for part in _parts(one)]
    except (TypeError, ValueError):
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise ValueError("is no head dim such as 64, nor two as 576/512")
    if max(sizes) > MAX_HEAD_DIM:
        raise ValueError(f"is not supported: head dims are 1 to {MAX_HEAD_DIM}")
    return sizes[0], sizes[-1]


def dtypes_of(one: Any) -> Dtypes:
    """Dtypes of q, k and v of torch.float16, "fp16", "bf16/int8" (k and v) or a tuple.

    Raises ValueError.
    """
    given = [str(part).removeprefix("torch.") for part in _parts(one)]
    names = [_LONG.get(name, name) for name in given]
    if len(names) not in (1, 2, 3):
        raise ValueError("is not one dtype, q/kv or q/k/v")
    for part, name, (who, allowed) in zip(given, names, _TAKEN, strict=False):
        if name not in allowed:
            known = ", ".join(SHORT_DTYPES.get(one, one) for one in allowed)
            raise ValueError(f"is not supported: {who} {known}, not {part!r}")
    return names[0], names[min(1, len(names) - 1)], names[-1]


def parse_head_dims(head_dims: Any) -> tuple[HeadDims, ...]:
    """`head_dims_of` of one or several. Raises InputError."""
    return _each("head_dims", head_dims, head_dims_of)


def parse_dtypes(dtypes: Any) -> tuple[Dtypes, ...]:
    """`dtypes_of` of one or several. Raises InputError."""
    return _each("dtypes", dtypes, dtypes_of)


def _parts(one: Any) -> Sequence[Any]:
    """What "a/b" or a tuple consists of."""
    if isinstance(one, str):
        return one.split("/")
    return one if isinstance(one, list | tuple) else (one,)


def _each(name: str, given: Any, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    found: dict[_T, None] = {}
    for one in several(given):
        try:
            found[read(one)] = None
        except ValueError as error:
            raise InputError(f"{name}: {'/'.join(map(str, _parts(one)))!r} {error}") from None
    return tuple(found)


def parse_targets(targets: str | Sequence[str], *, to_build: bool = False) -> tuple[str, ...]:
    """Compiled targets by name: also ``host`` (this machine's), ``cpu``, ``cuda`` and ``all``.

    to_build: ``cpu`` and ``all`` are without those that compilers of this machine make no code for,
    which are of machines of another architecture.

    Raises TargetError for a name that is none.
    """
    every = (*CPU_TARGETS, *CUDA_TARGETS)
    cpu = tuple(name for name in CPU_TARGETS if not to_build or compiled_here(name))
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
