"""Completes the sizes of a problem that a user gave in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError, ParamError
from ..variants.params import MISSING, Dims, declared_params
from ..variants.variant import Variant

_NAMES = Dims._fields[:7]
DEFAULT = Dims(2, 4, 2, 77, 131, 64, 64)


def shapes(d: Dims) -> tuple[tuple[int, int, int, int], ...]:
    """The shapes of q, k and v."""
    return (
        (d.batch, d.num_q_heads, d.q_len, d.head_dim),
        (d.batch, d.num_kv_heads, d.kv_len, d.head_dim),
        (d.batch, d.num_kv_heads, d.kv_len, d.head_dim_v),
    )


def held_dims(variant: Variant, params: Mapping[str, object]) -> dict[str, int]:
    """The sizes of a variant's tensors, by the names of their declared dims.

    The tensors are those that the variant holds, those among `params`, and defaults. A dim of size
    1 that may be broadcast is ignored.

    Raises:
        ParamError: two tensors have different sizes for one name.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, param, owner in declared_params(variant):
        value = params.get(name, owner.__dict__.get(param.name, param.default))
        if param.kind != "tensor" or value is MISSING or not isinstance(value, torch.Tensor):
            continue
        value = param.check(name, value)
        for axis, (size, dim) in enumerate(zip(value.shape, param.dims, strict=True)):
            if isinstance(dim, int) or (dim.endswith("|1") and size == 1):
                continue
            dim = dim.removesuffix("|1")
            known, other = sizes.setdefault(dim, (size, name))
            if known != size:
                raise ParamError(
                    f"param {name!r} has {dim}={size} at dim {axis}, but {other!r} has "
                    f"{dim}={known}; pass tensors whose sizes agree"
                )
    return {dim: size for dim, (size, _) in sizes.items() if dim in _NAMES}


def complete_dims(
    dims: Dims | Mapping[str, int] | Sequence[int] | None, held: Mapping[str, int] | None = None
) -> Dims:
    """`dims` with every size. Missing ones come from `held`, the other sizes, or `DEFAULT`.

    held: sizes of the variant's tensors; see `held_dims`.

    Raises:
        InputError: dims is of another type, has an unknown name, a negative size, or head counts
            that do not divide; or it contradicts the size of a tensor of the variant.
    """
    text = isinstance(dims, str | bytes | bytearray | memoryview)  # sequences, but not of sizes
    if text or dims is not None and not isinstance(dims, Mapping | Sequence):
        raise InputError(
            f"dims must be a Dims, a mapping of its names or a sequence, got {type(dims).__name__}"
        )
    given: dict[str, Any] = dict(
        {} if dims is None else dims if isinstance(dims, Mapping)
        else zip(_NAMES, dims[: len(_NAMES)], strict=False)
    )  # fmt: skip
    if unknown := sorted({str(name) for name in given} - set(_NAMES)):
        raise InputError(f"dims has unknown names {unknown}; they are {', '.join(_NAMES)}")
    given = {name: size for name, size in given.items() if size != -1}
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InputError(f"dims: {name}={size!r} must be an int, 0 or more")
        if held and held.get(name, size) != size:
            raise InputError(
                f"dims: {name}={size}, but a tensor that the variant holds has {name}={held[name]};"
                f" leave {name} out, or make the variant with a tensor of that size"
            )
    if not given and not held:
        return DEFAULT
    given = {**(held or {}), **given}
    if "num_q_heads" in given and "num_kv_heads" not in given:
        heads = given["num_q_heads"]
        given["num_kv_heads"] = heads // 2 if heads % 2 == 0 else heads
    elif "num_kv_heads" in given and "num_q_heads" not in given:
        given["num_q_heads"] = 2 * given["num_kv_heads"]
    if "head_dim" in given:
        given.setdefault("head_dim_v", given["head_dim"])
    full = DEFAULT._replace(**given)
    if min(full.num_q_heads, full.num_kv_heads, full.head_dim, full.head_dim_v) < 1:
        raise InputError(f"dims: heads and head dims must be at least 1, got {full[:7]}")
    if full.num_q_heads % full.num_kv_heads:
        raise InputError(
            f"dims: num_kv_heads={full.num_kv_heads} does not divide num_q_heads={full.num_q_heads}"
        )
    return full
