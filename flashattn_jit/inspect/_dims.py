"""Sizes that a user gave in part, completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..variants.params import Dims

_NAMES = Dims._fields[:7]
DEFAULT = Dims(2, 4, 2, 77, 131, 64, 64)


def complete_dims(dims: Dims | Mapping[str, int] | Sequence[int] | None) -> Dims:
    """`dims` with every size; those left out follow from the others or are `DEFAULT`'s.

    Raises:
        InputError: an unknown name, a negative size, or head counts that do not divide.
    """
    if dims is None:
        return DEFAULT
    given: dict[str, Any] = dict(
        dims if isinstance(dims, Mapping) else zip(_NAMES, dims[: len(_NAMES)], strict=False)
    )
    if unknown := sorted(set(given) - set(_NAMES)):
        raise InputError(f"dims has unknown names {unknown}; they are {', '.join(_NAMES)}")
    given = {name: size for name, size in given.items() if size != -1}
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InputError(f"dims: {name}={size!r} must be an int, 0 or more")
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
