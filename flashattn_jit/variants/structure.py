"""A variant's structure: what decides its kernels, with what every call asks of it, once."""

from __future__ import annotations

from dataclasses import dataclass

from .bounds_simplify import RangeTableSpec, range_tables, simplify
from .ir import Graph, VariantIR


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Equal IR is one object in a process, so that structures are compared by identity.

    tables: min/max tables that follow the param tensors. tensor_names: of the param tensors, then
    of the tables. scalar_kinds: "i" or "f" a scalar. mask_slots: tensors and scalars that the mask
    reads. costed_by_mask: the mask can be costed without reading tensors, so that the schedule
    follows it; one that reads tensors is costed by length, as a plan never depends on their
    contents. schedule_reads_scalars: the schedule depends on the values of scalars.
    mask_is_contiguous: consecutive rows of a request keep one run of keys between them (causal,
    windows).
    """

    ir: VariantIR
    tables: tuple[RangeTableSpec, ...]
    tensor_names: tuple[str, ...]
    scalar_kinds: str
    pointwise: bool
    mask_slots: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    costed_by_mask: bool = False
    schedule_reads_scalars: bool = False
    mask_is_contiguous: bool = False
    mask_reads_request: bool = True


# By text: -0.0 == 0.0 and nan != nan, so that equality would not do.
_structures: dict[str, Structure] = {}


def structure_of(ir: VariantIR) -> Structure:
    """The structure of some IR."""
    text = repr(ir)
    found = _structures.get(text)
    return _structures.setdefault(text, _structure(ir)) if found is None else found


def _structure(ir: VariantIR) -> Structure:
    mask = ir.hook("mask_mod")
    names = tuple(t.name for t in ir.tensors)
    kinds = "".join("i" if s.dtype == "int64" else "f" for s in ir.scalars)
    pointwise = ir.normalizer == "pointwise"
    if mask is None:
        return Structure(ir, (), names, kinds, pointwise)
    tables = range_tables(mask)
    slots = mask.tensor_slots(), mask.scalar_slots()
    return Structure(
        ir,
        tables,
        names + tuple(f"{side} table of {names[t.slot]}" for t in tables for side in ("lo", "hi")),
        kinds,
        pointwise,
        mask_slots=slots,
        costed_by_mask=not slots[0],
        schedule_reads_scalars=not slots[0] and bool(slots[1]),
        mask_is_contiguous=_is_contiguous(mask),
        mask_reads_request=mask.uses("b"),
    )


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
