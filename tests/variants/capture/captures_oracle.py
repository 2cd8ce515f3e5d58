"""The value of a captured hook at one place, through `bind`."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import torch

from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.variants.ir_eval import evaluate, grids

DIMS = Dims(2, 3, 3, 5, 7, 16, 16)


def value(fn, **index):
    """The hook's result at one place (score 1, all indices 1 unless given), through `bind`."""
    v = as_variant(fn)
    bound = v.bind(DIMS)
    (graph,) = (g for _, g in bound.ir.hooks)
    inputs = {n: torch.tensor(index.get(n, 1), dtype=torch.int32) for n in grids(1, 1, 1, 1)}
    inputs["score"] = torch.tensor(1.0)
    return evaluate(graph, inputs, bound.tensors, bound.scalars).item()
