"""The value of a hook with captures at one pair, through `bind`."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import torch

from flashattn_jit.variants.variant import as_variant
from tests.variants.ir_eval import evaluate, grids
from tests.variants.trace.trace_oracle import DIMS


def value(fn, **index):
    """The hook's result at one pair; the score and indices that are not given are 1."""
    v = as_variant(fn)
    bound = v.bind(DIMS)
    (graph,) = (g for _, g in bound.ir.hooks)
    inputs = {n: torch.tensor(index.get(n, 1), dtype=torch.int32) for n in grids(1, 1, 1, 1)}
    inputs["score"] = torch.tensor(1.0)
    return evaluate(graph, inputs, bound.tensors, bound.scalars).item()
