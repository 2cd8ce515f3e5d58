"""The `tanh` of soft caps in full tiles: its bound, for the largest errors of the instructions.

`hooks/soft_cap.h` is repeated here in numpy's fp32, where the errors of `ex2.approx` and
`rcp.approx` are chosen; `tests/codegen/test_cuda_hooks.py` runs the header itself.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.env import include_dir
from flashattn_jit.variants.lower.hooks import lower_hooks

STEP = 14983  # of the floats that are tried
RATE = np.float32(-2.88539008)
EX2, RCP = 2.0**-22, 2.0**-23
"""The largest relative errors of the two instructions (PTX ISA)."""

BOUND = 2.0**-21
f32 = np.float32


def denominator(x: np.ndarray, error: float) -> np.ndarray:
    y = np.minimum(x * RATE, f32(60))
    e = np.exp2(y.astype(np.float64)) * (1 + error * EX2)
    return f32(1) + np.where(e < 2.0**-126, 0, e).astype(f32)


def halves(x: np.ndarray, other: np.ndarray, errors: tuple[int, int, int]) -> np.ndarray:
    """`half_tanh` of x, whose reciprocal is shared with `other`."""
    a, b = denominator(x, errors[0]), denominator(other, errors[1])
    r = (1 / (a * b).astype(np.float64) * (1 + errors[2] * RCP)).astype(f32)
    return r * b


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("errors", list(itertools.product((-1, 1), repeat=3)))
def test_bound_over_all_floats(errors):
    x = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(f32)
    x = np.concatenate([x[~np.isnan(x)], np.linspace(-12, 12, 100_001, dtype=f32)])
    exact = np.tanh(x.astype(np.float64)) / 2
    for other in (x[::-1], np.full_like(x, -np.inf), np.full_like(x, np.inf), x):
        error = np.abs(halves(x, other, errors).astype(np.float64) - 0.5 - exact)
        assert error.max() <= BOUND, x[error.argmax()]


def test_the_header_has_these_constants():
    text = Path(include_dir(), "fajit/cuda/hooks/soft_cap.h").read_text()
    for part in ("kTanhRate = -2.88539008f", "half_tanh(float& x, float& y)", "60.0f", "<= 0x1p8f"):
        assert part in text


def hooks(score_mod) -> str:
    ir = fa.variant(score_mod=score_mod).explain(dims={"num_q_heads": 2}).ir
    return lower_hooks(ir, "Case", "cuda")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("score_mod", "capped"),
    [
        (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), True),
        (lambda s, b, h, i, j: s.tanh() * -7 + h * 0.5 - 0.25 * (i - j), True),
        (lambda s, b, h, i, j: -torch.tanh((s + 0.1 * j) / 4) / 3, True),
        (lambda s, b, h, i, j: torch.tanh(s), False),  # known to be small, but not by the host
        (lambda s, b, h, i, j: 30 * torch.tanh(s / 30) + s, False),
        (lambda s, b, h, i, j: (h + 1) * torch.tanh(s / 30), False),
        (lambda s, b, h, i, j: torch.exp(30 * torch.tanh(s / 30)), False),
        (lambda s, b, h, i, j: 30 * fa.tanh_approx(s / 30), False),
    ],
)
def test_which_hooks_are_soft_caps(score_mod, capped):
    assert ("kSoftCap = true" in hooks(score_mod)) == capped
