"""Cases of the registry through `fa.attention`, held to the error bound of docs/semantics.md.

The RMS error of a kernel against fp64 is at most 1.5 times that of the eager reference in the same
dtype, plus half an ulp of the output's dtype, plus 1.5 times the effect of the error that
approximate functions of hooks may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_target, host_targets
from flashattn_jit.inspect.verification.error import effect_of_errors
from flashattn_jit.variants.reference import Errors, attention_reference
from tests.harness import rotation
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES

HOST_TARGETS = list(
    host_targets()
    if rotation.takes_all()
    else dict.fromkeys([rotation.other_target(), host_target()])
)
"""The machine's own target, the last, and another that it runs, by turns."""
SMALL = Shape(2, 4, 2, 70, 130, 32, 32)  # two q tiles and two kv tiles, with tails
DECODE = Shape(2, 4, 2, 1, 130, 32, 32)
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Half an ulp, relative to the value."""

LIBRARY = [c for c in CASES if "library" in c.tags]


def inputs(shape: Shape, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q [B, Hq, Sq, D], k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    b, hq, hkv, sq, skv, d, dv = shape
    q = torch.randn(b, hq, sq, d, generator=generator)
    k = torch.randn(b, hkv, skv, d, generator=generator)
    v = torch.randn(b, hkv, skv, dv, generator=generator)
    return tuple(t.to(dtype) for t in (q, k, v))


def normal(seed: int, *sizes: int) -> torch.Tensor:
    """Random float32 values, equal for equal seeds."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    """The root mean square, 0 of an empty tensor."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def largest(x: Tensor) -> float:
    """The largest magnitude, 0 of an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


def effect_of_approximations(
    case: Case, exact: Sequence[Tensor], perturbed: Callable[[Errors], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """`effect_of_errors` on results of a case whose hooks use approximate functions, else zeros."""
    if "approximate" not in case.tags:
        return tuple(torch.zeros_like(x) for x in exact)
    return effect_of_errors(exact, perturbed)


def assert_close(out: Tensor, exact: Tensor, eager: Tensor, moved: Tensor | None = None) -> None:
    """The RMS error is within the bound, and NaN is exactly where the reference has NaN.

    moved: the result of `effect_of_approximations` for out.
    """
    same_nan = torch.isnan(out) == torch.isnan(exact)
    assert same_nan.all(), f"NaN in {(~same_nan).sum()} places where the reference has none"
    good = torch.isfinite(exact)
    assert torch.equal(
        out[~good & ~torch.isnan(exact)].double(), exact[~good & ~torch.isnan(exact)]
    )
    error, allowed = rms((out.double() - exact)[good]), rms((eager.double() - exact)[good])
    bound = 1.5 * allowed + EPS[out.dtype] * rms(exact[good])
    bound += 0.0 if moved is None else 1.5 * rms(moved[good])
    assert error <= bound, f"rms error {error:.3g} above the bound {bound:.3g}"


def run(case: Case, shape: Shape, dtype: torch.dtype, target: str | None = None, **options) -> None:
    """Runs a case by `fa.attention` and compares out and lse with the reference."""
    variant, params = case.build(shape)
    q, k, v = inputs(shape, dtype)
    call = {"scale": case.scale, "q_offset": case.q_offset, **options}
    pointwise = "pointwise" in case.tags
    got = fa.attention(q, k, v, variant, return_lse=not pointwise, target=target, **call, **params)
    out, lse = (got, None) if pointwise else got
    exact, exact_lse = attention_reference(q, k, v, variant, params=params, **call)
    eager, _ = attention_reference(q, k, v, variant, params=params, dtype=dtype, **call)
    assert out.dtype == dtype and out.shape == exact.shape
    moved = effect_of_approximations(
        case, [x for x in (exact, exact_lse) if x is not None],
        lambda errors: attention_reference(q, k, v, variant, params=params, errors=errors, **call),
    )  # fmt: skip
    assert_close(out, exact, eager, moved[0])
    if lse is not None:
        assert lse.dtype == torch.float32
        # Scores are summed in fp32 whatever the inputs are. Rows that a hook changed are rounded
        # to the matrix dtype first, and the scores carry that rounding.
        rounded = dtype != torch.float32 and "row" in case.tags
        tolerance = 16 * EPS[dtype] if rounded else 2e-5
        torch.testing.assert_close(
            lse.double(), exact_lse.double(), rtol=tolerance, equal_nan=True,
            atol=tolerance + 1.5 * largest(moved[1]),
        )  # fmt: skip


def fitting(case: Case, shape: Shape) -> Shape:
    """The shape, or the case's own where the case does not fit it."""
    return shape if case.fits(shape) else case.shape
