"""The error criterion: how far a kernel may be from the fp64 reference.

RMS against fp64 at most 1.5 times that of the eager reference in the same dtype, plus half an ulp
of the output dtype. No single row may be off by much more than that either, so that one wrong row
among thousands does not hide. An lse is fp32 whatever the output is: the error that it adds to a
merged output is its own absolute error, so it may besides have a small part of the output's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EAGER_FACTOR = 1.5
_ROW_FACTOR = 6.0
_LSE_SHARE = 1 / 256  # of the rounding of an output near 1


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
) -> Comparison:
    """Compare a result [batch, heads, rows, dim] with fp64 `expected`; `eager` has got's dtype.

    Where `expected` is not finite, `got` must be the same; where only `eager` is not, it may be
    anything. `slack` is added to the RMS that is allowed; `trim` is the share of rows that may be
    off by anything, because the input is ill-conditioned and the eager reference's are too.
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
    error = _rms(ours, trim)
    allowed = EAGER_FACTOR * _rms(theirs, trim) + _rms(ulps) + slack
    if error > allowed:
        place = ours.abs().flatten().argmax()
        return Comparison(error, allowed, _at(_unravel(place, got), got, expected, what))
    if trim:
        return Comparison(error, allowed, "")
    rows, row_ulps = _row_rms(ours), _row_rms(ulps)
    excess = rows - _ROW_FACTOR * (allowed + row_ulps)
    if (excess > 0).any():
        row = _unravel(excess.flatten().argmax(), excess)
        worst = ours[tuple(row)].abs().argmax()[None]
        return Comparison(error, allowed, _at(torch.cat([row, worst]), got, expected, what))
    return Comparison(error, allowed, "")


def compare_lse(
    got: Tensor,
    expected: Tensor,
    eager: Tensor,
    out_dtype: torch.dtype,
    trim: float = 0.0,
) -> Comparison:
    """`compare` for an lse [batch, heads, rows] that goes with an output of `out_dtype`."""
    slack = _LSE_SHARE * 0.5 * torch.finfo(out_dtype).eps
    got, expected, eager = (x[..., None] for x in (got, expected, eager))
    return compare(got, expected, eager, "lse", slack, trim)


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
