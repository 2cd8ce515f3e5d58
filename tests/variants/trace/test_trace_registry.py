"""Every variant of the registry: the traced IR equals the hooks run by eager torch under vmap."""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import _Lengths, _Run
from flashattn_jit.variants.variant import as_variant
from tests.registry.case import Case, Shape
from tests.registry.library import LIBRARY_CASES
from tests.registry.masks import MASK_CASES
from tests.registry.scores import SCORE_CASES
from tests.variants.ir_eval import evaluate, grids

CASES = (*MASK_CASES, *SCORE_CASES, *LIBRARY_CASES)
SMALL = Shape(2, 4, 2, 37, 45, 16, 16)


def _shape(case: Case) -> Shape:
    return SMALL if case.fits(SMALL) else case.shape


def _lengths(shape: Shape) -> _Lengths:
    ones = torch.ones(shape.batch, dtype=torch.int64)
    starts = torch.arange(shape.batch)
    return _Lengths(
        ones * shape.q_len, ones * shape.kv_len, starts * shape.q_len, starts * shape.kv_len,
        ones * 0,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_ir_equals_eager_hooks(case: Case) -> None:
    shape = _shape(case)
    made, params = case.build(shape)
    variant = as_variant(made)
    dims = Dims(*shape)
    bound = variant.bind(dims, params)
    dtypes = (torch.float32, torch.float32)
    run = _Run(variant, dims, dtypes, params, _lengths(shape), None, torch.float32, False)
    for name, graph in bound.ir.hooks:
        group = shape.num_q_heads // shape.num_kv_heads
        inputs = grids(shape.batch, shape.num_q_heads, shape.q_len, shape.kv_len, group=group)
        generator = torch.Generator().manual_seed(1)
        full = (shape.batch, shape.num_q_heads, shape.q_len, shape.kv_len)
        inputs["score"] = torch.randn(full, generator=generator) * 3
        width = shape.head_dim_v if name in ("value_mod", "output_mod") else shape.head_dim
        inputs["row"] = torch.randn(*full[:3], 1, width, generator=generator)
        inputs["lse"] = torch.randn(*full[:3], 1, generator=generator)
        if name in ("key_mod", "value_mod"):
            inputs["row"] = torch.randn(
                shape.batch, shape.num_kv_heads, 1, shape.kv_len, width, generator=generator
            )

        def builtin(op, args):  # type: ignore[no-untyped-def]
            return run.builtin(op, [a.long() for a in args])

        got = evaluate(graph, inputs, bound.tensors, bound.scalars, builtin)
        wanted = _eager(run, name, inputs, full)
        got = got.expand(wanted.shape)
        assert got.dtype == (torch.bool if name == "mask_mod" else torch.float32)
        torch.testing.assert_close(
            got, wanted.to(got.dtype), rtol=2e-5, atol=2e-5, equal_nan=case.reaches_nan
        )


def _eager(run, name, inputs, full):  # type: ignore[no-untyped-def]
    """The hook over the whole grid by nested vmap."""
    from flashattn_jit.variants.builtins import CONTEXT
    from flashattn_jit.variants.reference import HookFunctions, _tensor

    hook = run._hooks[name]
    used = ir.HOOK_INPUTS[name]
    shapes = [inputs[n].shape[:4] for n in used]
    leading = torch.broadcast_shapes(*shapes)
    flat = []
    for n in used:
        x = inputs[n]
        x = x.expand(*leading, x.shape[-1]) if n == "row" else x.expand(leading)
        flat.append(x.flatten(0, 3))

    token = CONTEXT.set(run)
    try:
        with HookFunctions():
            out = torch.vmap(lambda *a: _tensor(hook(*a), a[0]))(*flat)
    finally:
        CONTEXT.reset(token)
    return out.view(*leading, *out.shape[1:])
