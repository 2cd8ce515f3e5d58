"""Calls that become part of a graph, or of which shapes alone are asked: made of one op.

A call inside of ``torch.compile``, torch.export or make_fx, or on fake tensors, reads the tensors
and numbers that its variant captures by the paths of its site (`sites`), and emits the op that
takes them as inputs. When the graph runs, the op makes the ordinary call: the same checks, the same
errors, the same kernels. So a new value of a scalar, a new captured tensor or a new length changes
an input of the graph, not the graph.

The numbers of a Variant object that was there before are read when the graph runs. A traced
function that assigns one itself (``variant.window = 9``) is not followed: Python side effects come
after the graph. Such a number is given by keyword.

Importing this file imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...variants.capture.extract import ROOT
from ...variants.variant import FULL, Variant
from . import sites
from .outline import Found, made_inside, outline
from .sites import CELL, CELLS, ITEM, Plan, Use

# Dynamo runs these as they are and takes their results for constants. It guards on the identity of
# objects and on the code of functions.
_call_site = torch.compiler.assume_constant_result(sites.call_site)
refusal = torch.compiler.assume_constant_result(sites.refusal)
exported_number = torch.compiler.assume_constant_result(sites.exported_number)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _look(value: Any) -> int:
    """Makes Dynamo guard on a function or a constant."""
    return 0


class Inputs(NamedTuple):
    """What an op is given beside q, k and v."""

    tensors: list[torch.Tensor]
    floats: torch.Tensor
    ints: list[Any]
    site: int


def inputs(
    use: Use, variant: Any, params: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Plan, Inputs]:
    """The plan of a call's site and what its op is given."""
    found = Found()
    if variant is None:
        variant = FULL
    is_live = isinstance(variant, Variant) and not (
        torch.compiler.is_dynamo_compiling() and made_inside(variant, [])[0]
    )
    if is_live:
        found.outside.append(variant)
        variant = None
    of_call = outline((variant, dict(params), dict(arguments)), found)
    counts = (len(found.tensors), len(found.floats), len(found.ints))
    if found.problem:
        plan = Plan(refusal(use, "VariantError", found.problem))
    else:
        plan = _call_site(use, of_call, counts, tuple(found.names), is_live, *found.outside)
    tensors, numbers = _read(tuple(found.outside), plan)
    floats = found.floats + [x for x in numbers if isinstance(x, (float, torch.SymFloat))]
    ints = found.ints + [x for x in numbers if not isinstance(x, (float, torch.SymFloat))]
    return plan, Inputs(found.tensors + tensors, _packed(floats), ints, plan.number)


def _read(outside: Any, plan: Plan) -> tuple[list[torch.Tensor], list[float]]:
    """The captured tensors and numbers, read where the tracer sees it."""
    values: list[Any] = []
    for base, steps in plan.paths:
        if base == CELL:
            values.append(getattr(CELLS, steps[0][1])())
            continue
        value = outside if base == ROOT else values[base]
        for kind, key in steps:
            value = value[key] if kind == ITEM else getattr(value, key)
        values.append(value)
    for i in plan.fixed:
        _look(values[i])
    for i in plan.functions:
        _look(id(values[i]))
    return [values[i] for i in plan.tensors], [values[i] for i in plan.numbers]


def _packed(floats: list[Any]) -> torch.Tensor:
    """Floats as one tensor, an input of the op: new values do not change the graph."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    # A product is what the compiler can make of a float without specialising on its value.
    values = [one * x for x in floats]
    return torch.stack(values) if values else torch.empty(0, dtype=torch.float64, device="cpu")
