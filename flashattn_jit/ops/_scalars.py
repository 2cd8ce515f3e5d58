"""Scalar params as one CPU tensor, so that a compiled graph does not specialise on their values."""

from __future__ import annotations

from functools import lru_cache

import torch

_EMPTY = torch.empty(0, dtype=torch.float64)


@lru_cache(maxsize=4096)
def _packed(values: tuple[int | float, ...], kinds: tuple[type, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pack_scalars(values: tuple[int | float, ...]) -> torch.Tensor:
    """The values as a float64 tensor [num_scalars]; shared between calls, never written to."""
    if not values:
        return _EMPTY
    return _packed(values, tuple(map(type, values)))
