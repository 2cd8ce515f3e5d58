"""Traces a bare function of (score, b, h, q_idx, kv_idx) and compares it with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn_jit.variants.capture.walk import Walk
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import HookFunctions, _tensor
from flashattn_jit.variants.variant import variant
from tests.variants.ir_eval import evaluate, grids

SIZES = (2, 3, 5, 7)
DIMS = Dims(2, 3, 3, 5, 7, 16, 16)


def scores() -> Tensor:
    """Scores of every pair: both signs, zeros, and values past every threshold."""
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(SIZES, generator=generator) * 4
    score[0, 0, 0, :3] = torch.tensor([0.0, 30.0, -30.0])
    return score


def compare(fn: Callable[..., Any], *, rtol: float = 1e-5, atol: float = 1e-6) -> Any:
    """Asserts that `fn` has equal values and dtypes traced and eager; returns what `bind` made."""
    dtypes: list[list[torch.dtype | None]] = [[], []]
    target = 0

    def spy(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        result = fn(score, b, h, q, k)
        dtypes[target].append(getattr(result, "dtype", None))
        return result

    bound = variant(score_mod=fn).bind(DIMS)
    _trace_with(spy, fn)
    inputs = grids(*SIZES)
    inputs["score"] = scores()
    got = evaluate(dict(bound.ir.hooks)["score_mod"], inputs, bound.tensors, bound.scalars)
    target = 1
    flat = [inputs[n].expand(SIZES).flatten() for n in ("score", "b", "h", "q_idx", "kv_idx")]
    flat = [flat[0], *(x.long() for x in flat[1:])]  # in torch, indices are int64
    with HookFunctions():
        wanted = torch.vmap(lambda *a: _tensor(spy(*a), a[0]))(*flat)
    assert dtypes[0][0] == dtypes[1][0], f"traced {dtypes[0][0]}, eager {dtypes[1][0]}"
    torch.testing.assert_close(
        got.expand(SIZES), wanted.view(SIZES).float(), rtol=rtol, atol=atol, equal_nan=True
    )
    return bound


def _trace_with(spy: Callable[..., Any], fn: Callable[..., Any]) -> None:
    """Trace `fn` once more inside `spy`, which sees the dtype before the final conversion."""
    from flashattn_jit.variants.trace.tracer import Tracer
    from flashattn_jit.variants.trace.values import STAND_INS

    walk = Walk(fn)
    tracer = Tracer(
        walk.tensors, walk.tensor_names, walk.numbers, walk.number_names, None, "", walk.codes
    )  # fmt: skip
    rebuilt = walk.build(tracer.captured, tracer.numbers, STAND_INS)
    found: list[torch.dtype | None] = []

    def inner(*args: Any) -> Any:
        result = rebuilt(*args)
        found.append(getattr(result, "dtype", None))
        return result

    tracer.trace("score_mod", inner)
    cells = dict(zip(spy.__code__.co_freevars, spy.__closure__ or (), strict=True))
    cells["dtypes"].cell_contents[0].append(found[0])
