"""Variant structures by number, so that a torch op can name one with an int."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from ..variants.bounds_lower import RangeTableSpec, range_tables
from ..variants.ir import VariantIR


@dataclass(frozen=True, slots=True)
class Structure:
    """A variant's IR with what every call asks of it, worked out once."""

    ir: VariantIR
    name: str
    tables: tuple[RangeTableSpec, ...]  # min/max tables that follow the param tensors
    integer_scalars: tuple[bool, ...]
    # The mask can be costed without reading tensors, so the schedule follows it. A mask that reads
    # tensors is costed by length: a plan never depends on their contents; the kernel still skips.
    costed_by_mask: bool
    schedule_reads_scalars: bool  # the schedule depends on the values of scalar params


_structures: dict[int, Structure] = {}


def remember(handle: int, ir: VariantIR, name: str) -> int:
    """Make `handle` resolvable; returns it."""
    if handle not in _structures:
        mask = ir.hook("mask_mod")
        costed_by_mask = mask is not None and not mask.tensor_slots()
        _structures[handle] = Structure(
            ir,
            name,
            () if mask is None else range_tables(mask),
            tuple(s.dtype == "int64" for s in ir.scalars),
            costed_by_mask,
            costed_by_mask and mask is not None and bool(mask.scalar_slots()),
        )
    return handle


def structure(handle: int) -> Structure:
    """What is behind a handle.

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
