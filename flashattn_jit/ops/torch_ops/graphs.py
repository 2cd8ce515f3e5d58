"""The inputs of a call's op while a graph is traced, or under fake tensors.

A call inside of ``torch.compile``, torch.export or make_fx, or on fake tensors, reads the tensors
and numbers that its variant captures by the paths of its site (`sites`), and emits the op with them
as inputs. When the graph runs, the op makes the ordinary call: the same checks, the same errors,
the same kernels. So a new value of a scalar, a new captured tensor or a new length changes an input
of the graph, not the graph.

The numbers of a Variant object that was made before tracing are read when the graph runs, but for
those that the traced function itself assigns before the call (``variant.window = 9``; see
`pending`): they are inputs of the graph.

Importing this file imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...variants.capture.extract import ROOT
from ...variants.variant import FULL, Variant
from . import sites
from .outline import Found, cell_content, made_inside, outline
from .paths import CELL, CELLS, CONTENT, ITEM
from .pending import changes_before_call
from .sites import SiteInfo, Use

# Dynamo runs these functions untraced and treats their results as constants. It guards on the
# identity of argument objects and on the code of argument functions.
_call_site = torch.compiler.assume_constant_result(sites.call_site)
refusal = torch.compiler.assume_constant_result(sites.refusal)
exported_number = torch.compiler.assume_constant_result(sites.exported_number)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _look(value: Any) -> int:
    """Makes Dynamo guard on a function or a constant."""
    return 0


class Inputs(NamedTuple):
    """The inputs of an op besides q, k and v."""

    tensors: list[torch.Tensor]
    floats: torch.Tensor
    ints: list[Any]
    site: int


def inputs(
    use: Use, variant: Any, params: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[SiteInfo, Inputs]:
    """The description of a call's site, and the inputs of its op."""
    found = Found()
    if variant is None:
        variant = FULL
    is_live = isinstance(variant, Variant) and not (
        torch.compiler.is_dynamo_compiling() and made_inside(variant, [])[0]
    )
    info = _site_of(use, variant, params, arguments, is_live, found)
    if info.number < 0:  # sites.NOT_LIVE
        found = Found()
        info = _site_of(use, variant, params, arguments, False, found)
    tensors, numbers = _read(tuple(found.outside), info)
    floats = found.floats + [x for x in numbers if isinstance(x, (float, torch.SymFloat))]
    ints = found.ints + [x for x in numbers if not isinstance(x, (float, torch.SymFloat))]
    return info, Inputs(found.tensors + tensors, _packed(floats), ints, info.number)


def _site_of(
    use: Use, variant: Any, params: Mapping[str, Any], arguments: Mapping[str, Any],
    is_live: bool, found: Found,
) -> SiteInfo:  # fmt: skip
    """The description of a call's site. is_live: see `sites.call_site`. found: is filled."""
    if is_live:
        found.outside.append(variant)
        variant = None
    of_call = outline((variant, dict(params), dict(arguments)), found)
    counts = (len(found.tensors), len(found.floats), len(found.ints))
    if found.problem:
        return SiteInfo(refusal(use, "VariantError", found.problem))
    names, changes = tuple(found.names), changes_before_call()
    info: SiteInfo = _call_site(use, of_call, counts, names, is_live, changes, *found.outside)
    return info


def _read(outside: Any, info: SiteInfo) -> tuple[list[torch.Tensor], list[float]]:
    """The captured tensors and numbers, read by traced code."""
    values: list[Any] = []
    for base, steps in info.paths:
        if base == CELL:
            values.append(getattr(CELLS, steps[0][1])())
            continue
        value = outside if base == ROOT else values[base]
        for kind, key in steps:
            if kind == ITEM:
                value = value[key]
            else:
                value = cell_content(value) if key == CONTENT else getattr(value, key)
        values.append(value)
    for i in info.fixed:
        _look(values[i])
    for i in info.functions:
        _look(id(values[i]))
    for i in info.keys:
        _look(tuple(values[i]))
    for i, names in info.absent:  # Dynamo guards that an object has no attribute of its own
        for name in names:
            getattr(values[i], name, None)
    return [values[i] for i in info.tensors], [values[i] for i in info.numbers]


def _packed(floats: list[Any]) -> torch.Tensor:
    """Floats as one tensor, an input of the op: new values do not change the graph."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    # A product with a tensor keeps the float symbolic: the compiler does not specialise on it.
    values = [one * x for x in floats]
    return torch.stack(values) if values else torch.empty(0, dtype=torch.float64, device="cpu")
