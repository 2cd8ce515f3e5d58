"""Variant structures by number, so that a torch op can name one with an int."""

from __future__ import annotations

from ..errors import InputError
from ..variants.ir import VariantIR

_structures: dict[int, tuple[VariantIR, str]] = {}


def remember(handle: int, ir: VariantIR, name: str) -> int:
    """Make `handle` resolvable; returns it."""
    if handle not in _structures:
        _structures[handle] = (ir, name)
    return handle


def structure(handle: int) -> tuple[VariantIR, str]:
    """The IR and the variant's name behind a handle.

    Raises:
        InputError: no variant of this process has the handle.
    """
    try:
        return _structures[handle]
    except KeyError:
        raise InputError(
            f"handle {handle} names no variant of this process; handles are not portable, bind the "
            "variant again"
        ) from None
