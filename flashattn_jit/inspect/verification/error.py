"""The error criterion: the distance that a kernel's result may have from the fp64 reference.

The RMS error against fp64 is at most 1.5 times that of the eager reference in the same dtype, plus
half an ulp of the output dtype, plus 1.5 times the change by two ulps in each score. The error of a
single row is at most six times (the first two terms + half an ulp in the row + the change by two
ulps in each score of the row), so that one wrong row among thousands is detected. An lse is fp32
for any output dtype: its absolute error is the error that it adds to a merged output, so it may in
addition have a small part of the output's rounding.

Two ulps in each score: scores are fp32, so each is off by about an ulp in any implementation, with
a sign that depends on the order of a sum and on where the scale is multiplied. If two keys tie at a
score of 2e4, whose ulp is 2e-3, their weights become 0.4993 and 0.5007: the output of that row is
off by a thousandth, while that of a row with one largest key is exact. Kernels of all CPU targets
multiply the two halves of a dot product of 64 by scale * log2(e) before they add them, so keys with
equal products tie only up to that ulp. The eager reference has its errors in other scores and other
rows. Its RMS over all rows does not bound the error of a row with a tie. So where a result exceeds
the first two terms, the effect of such errors is measured (`effect_of_errors`).

The same measurement puts the error that kernels may have in `fa.tanh_approx` into each evaluation
of it: a relative error of 2^-11, with one sign everywhere in one draw, as a function has that is
too large throughout, and with signs at random in the others. It is a function of the argument's
magnitude, as that of an odd function is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...variants.functions import TANH_APPROX_ERROR
from ...variants.reference import Errors

EAGER_FACTOR = 1.5
_ROW_FACTOR = 6.0
_LSE_SHARE = 1 / 256  # of the rounding of an output near 1
_DRAWS = 4
_ULP = 2.0**-23  # of a score, at most


@dataclass(frozen=True, slots=True)
class Comparison:
    """RMS errors; `problem` says what is wrong, and is empty for a correct result."""

    error: float
    allowed: float
    problem: str


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbouring `dtype` numbers at each value, in fp64."""
    info = torch.finfo(dtype)
    magnitude = values.abs().clamp(min=info.tiny)
    return 0.5 * info.eps * torch.exp2(torch.floor(torch.log2(magnitude)))


def compare(
    got: Tensor,
    expected: Tensor,
    eager: Tensor,
    what: str = "out",
    slack: float = 0.0,
    trim: float = 0.0,
    moved: Tensor | None = None,
) -> Comparison:
    """Compare a result [batch, heads, rows, dim] with fp64 `expected`; `eager` has got's dtype.

    Where `expected` is not finite, `got` must be equal; where only `eager` is not, `got` may have
    any value. `slack` is added to the allowed RMS. `trim` is the share of rows with any error, for
    ill-conditioned inputs. `moved` is the result of `effect_of_errors` for these values, 0 by
    default.
    """
    x, y = got.double(), eager.double()
    finite = torch.isfinite(expected) & torch.isfinite(y)
    exact = expected.to(got.dtype).double()
    same = (x == exact) | (x.isnan() & exact.isnan()) | (~torch.isfinite(y) & torch.isfinite(exact))
    wrong = torch.where(finite, ~torch.isfinite(x), ~same)
    if wrong.any():
        return Comparison(float("nan"), 0.0, _at(wrong.nonzero()[0], got, expected, what))
    if not finite.any():
        return Comparison(0.0, 0.0, "")
    zero = expected.new_zeros(())
    ours, theirs = (torch.where(finite, t - expected, zero) for t in (x, y))
    ulps = torch.where(finite, half_ulp(expected, got.dtype), zero)
    moves = zero if moved is None else torch.where(finite, moved, zero)
    error = _rms(ours, trim)
    well = EAGER_FACTOR * _rms(theirs, trim) + _rms(ulps) + slack
    allowed = well + EAGER_FACTOR * _rms(moves, trim)
    if error > allowed:
        worst = _unravel(ours.abs().flatten().argmax(), got)
        return Comparison(error, allowed, _at(worst, got, expected, what))
    if trim:
        return Comparison(error, allowed, "")
    rows = _row_rms(ours)
    limits = _ROW_FACTOR * (well + _row_rms(ulps) + _row_rms(moves.expand_as(ours)))
    excess = rows - limits
    if (excess > 0).any():
        row = _unravel(excess.flatten().argmax(), excess)
        worst = ours[tuple(row)].abs().argmax()[None]
        words = _at(torch.cat([row, worst]), got, expected, what)
        at = tuple(row.tolist())
        words += f"; the RMS of that row is {rows[at]:.2e}, allowed {limits[at]:.2e}"
        return Comparison(error, allowed, words)
    return Comparison(error, allowed, "")


def compare_lse(
    got: Tensor,
    expected: Tensor,
    eager: Tensor,
    out_dtype: torch.dtype,
    trim: float = 0.0,
    moved: Tensor | None = None,
) -> Comparison:
    """`compare` for the lse [batch, heads, rows] of an output of `out_dtype`."""
    slack = _LSE_SHARE * 0.5 * torch.finfo(out_dtype).eps
    got, expected, eager = (x[..., None] for x in (got, expected, eager))
    moved = None if moved is None else moved[..., None]
    return compare(got, expected, eager, "lse", slack, trim, moved)


def effect_of_errors(
    exact: Sequence[Tensor], perturbed: Callable[[Errors], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """The change of each value of `exact` by the errors that any kernel may have.

    Each score is off by up to two ulps of fp32, one before score_mod and one after it, and each
    `fa.tanh_approx` by its error. perturbed: computes the results in fp64 with these `Errors`.
    Returns the largest change of a few draws with fixed seeds.
    """
    moved = tuple(torch.zeros_like(x) for x in exact)
    for draw in range(_DRAWS):
        results = perturbed(errors_of_draw(draw))
        for most, x, y in zip(moved, results, exact, strict=True):
            torch.maximum(most, (x - y).abs().nan_to_num(0.0, 0.0, 0.0), out=most)
    return moved


def errors_of_draw(draw: int) -> Errors:
    """Errors of scores and of approximations at random; those of draw 0 have one sign in all
    approximations."""
    generator = torch.Generator("cpu").manual_seed(draw)

    def score(score: Tensor) -> Tensor:
        random = torch.rand(score.shape, generator=generator, dtype=score.dtype, device="cpu")
        return score * (1 + _ULP * (2 * random.to(score.device) - 1))

    def approximation(x: Tensor) -> Tensor | float:
        if draw == 0:
            return TANH_APPROX_ERROR
        # Hooks run under vmap, where there are no random numbers: digits that look random.
        digits = (torch.sin(x.abs() * 12.9898 + draw) * 43758.5453).nan_to_num()
        return torch.where(digits - digits.floor() < 0.5, TANH_APPROX_ERROR, -TANH_APPROX_ERROR)

    return Errors(score, approximation)


def _rms(x: Tensor, trim: float = 0.0) -> float:
    """The root mean square without the share `trim` of the worst rows."""
    if not x.numel():
        return 0.0
    squares = x.square()
    if trim:
        rows = squares.mean(-1).flatten().sort().values
        squares = rows[: max(1, math.ceil(len(rows) * (1 - trim)))]
    return float(squares.mean().sqrt())


def _row_rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _unravel(index: Tensor, x: Tensor) -> Tensor:
    return torch.stack(torch.unravel_index(index, x.shape))


def _at(index: Tensor, got: Tensor, expected: Tensor, what: str) -> str:
    at = tuple(index.tolist())
    labels = ("b", "h", "row", "dim")[: 3 if what == "lse" else 4]
    names = ", ".join(f"{n}={i}" for n, i in zip(labels, at, strict=False))
    return f"{what} at {names} is {got[at].item():.7g}, not {expected[at].item():.7g}"
