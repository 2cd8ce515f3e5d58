"""Scores with a term that is linear in the key's position, which full tiles compute by lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa

pytestmark = pytest.mark.filterwarnings("error")

STEP = 2.0**-19
"""A slope for which the rounding of a distance of 2^30 is small."""

SLOPES = torch.tensor([0.25, -0.5])

HOOKS: dict[str, Callable[..., Any]] = {
    "ALiBi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "behind": lambda s, b, h, i, j: s - (i - j + 3) / 8.0,
    "symmetric": lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j),
    "of the key alone": lambda s, b, h, i, j: 0.0625 * j + s * 2,
    "two lines": lambda s, b, h, i, j: (s + SLOPES[h] * (j - i)) - abs(j - i - 7) * 0.125 + i * 0.5,
    "beside others": lambda s, b, h, i, j: -s - 0.25 * -(j - i) + torch.where(j > i, SLOPES[h], 0),
    "inside a function": lambda s, b, h, i, j: 4 * torch.tanh((s + SLOPES[h] * (j - i)) / 4),
    "read twice": lambda s, b, h, i, j: torch.where((j - i).float() == 5.0, 3.0, s) + (j - i) * 0.1,
    "an infinite row": lambda s, b, h, i, j: (
        s + 0.25 * (j - i) - torch.where(i % 3 > 0, 0, torch.inf)
    ),
    "a hidden key": lambda s, b, h, i, j: torch.where(j % 5 > 0, s, -torch.inf) - 0.25 * abs(j - i),
}


def near(variant: Any, q_len: int, kv_len: int, **options: Any) -> None:
    """The kernel of an emulated target, against the reference in fp64."""
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, kv_len, kv_len))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out, lse = fa.attention(q, k, v, variant, target="emulated:sm_80", return_lse=True, **options)
    variant = fa.variant(score_mod=variant) if callable(variant) else variant
    expected, wanted = variant.reference(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), wanted.double(), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("q_len", [3, 70])
def test_full_and_partial_tiles_agree(hook: str, q_len: int) -> None:
    near(HOOKS[hook], q_len, 391, q_offset=130)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_scale(scale: float) -> None:
    near(HOOKS["ALiBi"], 20, 150, q_offset=9, scale=scale)


@pytest.mark.parametrize("q_offset", [2**24, 2**30, -(2**30)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_distances_that_are_rounded(symmetric: bool, q_offset: int) -> None:
    slopes = torch.tensor([STEP, -STEP])
    near(fa.ALiBi(symmetric=symmetric, slopes=slopes), 20, 150, q_offset=q_offset)


def test_distances_that_leave_int32() -> None:
    """Twice the distance wraps inside of a tile, to -2^31 where i <= j."""
    near(lambda s, b, h, i, j: s + ((j - i) + (j - i)) * 2.0**-30, 20, 330, q_offset=-(2**30))
