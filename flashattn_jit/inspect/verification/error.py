"""The error criterion: how far a kernel may be from the fp64 reference.

RMS against fp64 at most 1.5 times that of the eager reference in the same dtype, plus half an ulp
of the output dtype, plus 1.5 times what an ulp in each score moves. No single row may be off by
more than six times (the first two + half an ulp in the row + what an ulp in each score moves in
it), so that one wrong row among thousands does not hide. An lse is fp32 whatever the output is: the
error that it adds to a merged output is its own absolute error, so it may besides have a small part
of the output's.

An ulp in each score: scores are fp32, so each is off by about an ulp in any implementation, and
which way depends on the order of a sum and on where the scale is multiplied in. Of two keys that
tie at a score of 2e4, whose ulp is 2e-3, the weights are then 0.4993 and 0.5007: that row's output
is off by a thousandth, while a row with one largest key is off by nothing. Kernels of all CPU
targets multiply the two halves of a dot product of 64 with scale * log2(e) before they add them, so
keys with equal products tie only up to that ulp. The eager reference loses it elsewhere, in an lse
rounded to 2e-3, and in other rows. Its RMS over all rows says nothing about the row of a tie: it is
the few ties themselves. So where a result is off by more than the first two terms, the ulp is tried
out (`score_rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...variants.reference import ScoreError

EAGER_FACTOR = 1.5
_ROW_FACTOR = 6.0
_LSE_SHARE = 1 / 256  # of the rounding of an output near 1
_DRAWS = 4
_HALF_ULP = 2.0**-24  # of a score, at most


@dataclass(frozen=True, slots=True)
class Comparison:
    """RMS errors; `problem` says what is wrong, and is empty where nothing is."""

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

    Where `expected` is not finite, `got` must be the same; where only `eager` is not, it may be
    anything. `slack` is added to the RMS that is allowed; `trim` is the share of rows that may be
    off by anything, because the input is ill-conditioned and the eager reference's are too. `moved`
    is how far `score_rounding` moves each value, nothing by default.
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
        place = ours.abs().flatten().argmax()
        return Comparison(error, allowed, _at(_unravel(place, got), got, expected, what))
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
    """`compare` for an lse [batch, heads, rows] that goes with an output of `out_dtype`."""
    slack = _LSE_SHARE * 0.5 * torch.finfo(out_dtype).eps
    got, expected, eager = (x[..., None] for x in (got, expected, eager))
    moved = None if moved is None else moved[..., None]
    return compare(got, expected, eager, "lse", slack, trim, moved)


def score_rounding(
    exact: Sequence[Tensor], perturbed: Callable[[ScoreError], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """How far each value of `exact` moves when each score is off by up to an ulp of fp32.

    perturbed: the results in fp64 with a `score_error`, which is half an ulp before score_mod and
    as much after it. The largest of a few draws, the same ones every time.
    """
    moved = tuple(torch.zeros_like(x) for x in exact)
    for draw in range(_DRAWS):
        results = perturbed(_off_by_half_an_ulp(draw))
        for most, x, y in zip(moved, results, exact, strict=True):
            torch.maximum(most, (x - y).abs().nan_to_num(0.0, 0.0, 0.0), out=most)
    return moved


def _off_by_half_an_ulp(draw: int) -> ScoreError:
    generator = torch.Generator("cpu").manual_seed(draw)

    def score_error(score: Tensor) -> Tensor:
        random = torch.rand(score.shape, generator=generator, dtype=score.dtype, device="cpu")
        return score * (1 + _HALF_ULP * (2 * random.to(score.device) - 1))

    return score_error


def _rms(x: Tensor, trim: float = 0.0) -> float:
    """Root of the mean square, without the `trim` worst rows."""
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
    place = tuple(index.tolist())
    labels = ("b", "h", "row", "dim")[: 3 if what == "lse" else 4]
    names = ", ".join(f"{n}={i}" for n, i in zip(labels, place, strict=False))
    return f"{what} at {names} is {got[place].item():.7g}, not {expected[place].item():.7g}"
