"""Scalar params as one CPU tensor, so that a compiled graph does not specialise on their values."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..errors import ParamError
from ..variants.modes import outside_modes

with outside_modes():
    _EMPTY = torch.empty(0, dtype=torch.float64, device="cpu")

_EXACT = 2**53  # float64 holds every integer up to here


@lru_cache(maxsize=4096)
def _packed(values: tuple[int | float, ...], kinds: tuple[type, ...]) -> torch.Tensor:
    for value in values:
        if isinstance(value, int) and abs(value) > _EXACT:
            raise ParamError(
                f"a hook captures the integer {value}; scalar params hold integers up to 2**53: "
                "capture it as a 0-dim int64 tensor"
            )
    with outside_modes():
        return torch.tensor(values, dtype=torch.float64, device="cpu")


def pack_scalars(values: tuple[int | float, ...]) -> torch.Tensor:
    """The values as a float64 tensor [num_scalars]; shared between calls, never written to.

    Raises:
        ParamError: an integer is too large to be exact.
    """
    if not values:
        return _EMPTY
    if 0.0 in values:  # 0.0 and -0.0 are one key but two values
        return _packed.__wrapped__(values, ())
    return _packed(values, tuple(map(type, values)))
