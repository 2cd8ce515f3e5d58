"""Which kernels are wanted: from what `warm` and `pack` are given to specs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...codegen.document import Line
from ...codegen.spec import AnySpec, KernelSpec
from ...codegen.targets import called_target
from ...errors import InputError, ManifestError
from ...planner.reachable import retarget
from ..manifest.file import STDIN, read_manifest
from .arguments import parse_dtypes, parse_head_dims, parse_targets, several


def wanted_specs(
    what: Any,
    *,
    head_dims: Any = (),
    dtypes: Any = (),
    targets: str | Sequence[str] = (),
    formats: Sequence[str] | None = None,
    heads: tuple[int, int] | None = None,
    params: Mapping[str, object] | None = None,
    kv_format: Any = None,
    v_in_k: bool = False,
    allow_cpp: bool = False,
) -> list[AnySpec]:
    """All specs that calls like these can ask for; see `warm` for the arguments.

    Raises InputError, ManifestError, ParamError, TraceError, TargetError.
    """
    recorded: list[AnySpec] = []
    variants = []
    for one in several(what):
        if isinstance(one, os.PathLike) or isinstance(one, str) and _is_manifest(one):
            lines = read_manifest(one, allow_cpp=allow_cpp)
            if not lines:
                raise ManifestError(
                    f"{one}: has no kernels; record the calls of a service with fa.record_manifest"
                )
            recorded += [line.spec for line in lines]
        elif isinstance(one, Line):
            recorded.append(one.spec)
        elif isinstance(one, AnySpec):
            recorded.append(one)
        else:
            variants.append(one)
    chosen = parse_targets(targets, to_build=True) if targets else ()
    found: list[AnySpec] = []
    for spec in recorded:
        for target in chosen or (called_target(spec.target),):
            found += retarget(spec, target)
    if not found and any(isinstance(spec, KernelSpec) for spec in recorded):
        raise InputError(
            f"none of the targets {', '.join(chosen) or 'recorded'} has kernels for the dtypes "
            "and head dims that were recorded; CUDA targets take bfloat16 and float16 (sm_75: "
            "float16, head dims up to 256)"
        )
    if variants:
        from ...formats import read_formats  # imports torch, which manifests need not
        from . import structures

        needed = {"head_dims=(64, 128)": head_dims, "dtypes='bf16'": dtypes}
        if missing := [example for example, given in needed.items() if not given]:
            names = " and ".join(example.partition("=")[0] + "=" for example in missing)
            raise InputError(f"variants need {names}, such as {', '.join(missing)}")
        if v_in_k and isinstance(head_dims, tuple) and len({*head_dims}) == len(head_dims) == 2:
            first, second = head_dims
            if isinstance(first, int) and isinstance(second, int):
                raise InputError(
                    f"head_dims=({first}, {second}) are two head dims, each of keys and values; of "
                    f"v_in_k give [({first}, {second})], or [{first}, {second}] if that is meant"
                )
        found += structures.specs_of(
            [structures.parse_variant(one) for one in variants],
            parse_head_dims(head_dims),
            parse_dtypes(dtypes),
            chosen or parse_targets("host"),
            formats,
            heads,
            params or {},
            None if kv_format is None else read_formats(kv_format),
            v_in_k,
        )
    elif head_dims or dtypes or params or heads or formats or kv_format is not None or v_in_k:
        raise InputError(
            "head_dims, dtypes, formats, num_q_heads, num_kv_heads, params, kv_format and v_in_k "
            "are for variants; a manifest says its own"
        )
    # Names do not count, nor those of params: equal documents are one kernel.
    return list({spec.document(): spec for spec in reversed(found)}.values())[::-1]


def _is_manifest(name: str) -> bool:
    return name == STDIN or os.sep in name or "." in name or Path(name).is_file()
