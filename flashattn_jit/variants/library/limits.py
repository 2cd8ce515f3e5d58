"""Params of library variants that take some numbers only: sizes from 1 on, caps above 0."""

from __future__ import annotations

from typing import Any

from flashattn_jit.variants.params import MISSING, Limit
from flashattn_jit.variants.variant import scalar


def limited(
    least: int,
    remedy: str,
    default: Any = MISSING,
    *,
    above: bool = False,
    where_not: tuple[str, int] | None = None,
) -> Any:
    """A `scalar` that takes numbers from `least` on, or above it; see `Limit`."""
    param = scalar(default)
    param.limit = Limit(least, remedy, above, where_not)
    return param
