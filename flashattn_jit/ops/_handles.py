"""Variant structures by number, so that a torch op can name one with an int."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from ..variants.binding import Bound
from ..variants.bounds_simplify import RangeTableSpec, range_tables, simplify
from ..variants.ir import Graph, VariantIR


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
    # Consecutive rows of a request keep one run of keys between them: causal, windows.
    mask_is_contiguous: bool = False
    mask_reads_request: bool = True
    handle: int = -1
    mask_slots: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # tensors and scalars it reads
    pointwise: bool = False
    scalar_kinds: str = ""  # "i" or "f" a scalar
    tensor_names: tuple[str, ...] = ()  # of the param tensors, then of the tables


_structures: dict[int, Structure] = {}


def structure_of(bound: Bound, name: str) -> Structure:
    """The structure that a variant of this name was bound to; its handle is resolvable from now."""
    found = _structures.get(bound.handle)
    return _remember(bound.handle, bound.ir, name) if found is None else found


def _remember(handle: int, ir: VariantIR, name: str) -> Structure:
    if handle not in _structures:
        mask = ir.hook("mask_mod")
        costed_by_mask = mask is not None and not mask.tensor_slots()
        tables = () if mask is None else range_tables(mask)
        names = tuple(t.name for t in ir.tensors)
        _structures[handle] = Structure(
            ir,
            name,
            tables,
            tuple(s.dtype == "int64" for s in ir.scalars),
            costed_by_mask,
            costed_by_mask and mask is not None and bool(mask.scalar_slots()),
            mask_is_contiguous=mask is not None and _is_contiguous(mask),
            mask_reads_request=mask is None or mask.uses("b"),
            handle=handle,
            mask_slots=((), ()) if mask is None else (mask.tensor_slots(), mask.scalar_slots()),
            pointwise=ir.normalizer == "pointwise",
            scalar_kinds="".join("i" if s.dtype == "int64" else "f" for s in ir.scalars),
            tensor_names=names
            + tuple(
                f"{side} table of {names[table.slot]}" for table in tables for side in ("lo", "hi")
            ),
        )
    return _structures[handle]


def _is_contiguous(mask: Graph) -> bool:
    """Whether the keys that consecutive rows keep between them are one run, for all heads alike.

    So where the mask is one conjunction of limits on q_idx, kv_idx and q_idx - kv_idx, the same for
    all pairs of a request: the runs of two neighbours then overlap or touch. False is always safe.
    """
    program = simplify(mask)
    # Where integers may wrap in a row, every tile of the row counts as partial: one run as well.
    if len(program.keep) != 1 or any("kv_idx" in program.inputs[n] for n, _, _ in program.guards):
        return False
    clause = program.keep[0]

    def fixed(node: int) -> bool:
        return program.inputs[node] <= {"b"}

    if clause.nested or not all(fixed(t.term) for t in clause.tests):
        return False
    indices = (program.q, program.k, program.distance)
    return all(
        (bound.value in indices and not bound.excludes or fixed(bound.value))
        and all(fixed(n) for n in (*bound.lows, *bound.highs))
        for bound in clause.bounds
    )


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
