"""Scores with a term that is linear in the key's position, which full tiles compute by lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.harness.rotation import turn

pytestmark = pytest.mark.filterwarnings("error")

STEP = 2.0**-19
"""A slope for which the rounding of a distance of 2^30 is small."""

SLOPES = torch.tensor([0.25, -0.5])
HIDDEN = (torch.arange(400) % 3 == 0).float()
TIMES = 1e6 + torch.arange(400) / 8  # exact in fp32, as are their differences
LARGE = torch.tensor([1e38, 3e38])
LEAST = torch.finfo(torch.float32).min

HOOKS: dict[str, Callable[..., Any]] = {
    "ALiBi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "behind": lambda s, b, h, i, j: s - (i - j + 3) / 8.0,
    "symmetric": lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j),
    "of the key alone": lambda s, b, h, i, j: 0.0625 * j + s * 2,
    "two lines": lambda s, b, h, i, j: (s + SLOPES[h] * (j - i)) - abs(j - i - 7) * 0.125 + i * 0.5,
    "beside others": lambda s, b, h, i, j: -s - 0.25 * -(j - i) + torch.where(j > i, SLOPES[h], 0),
    "inside a function": lambda s, b, h, i, j: 4 * torch.tanh((s + SLOPES[h] * (j - i)) / 4),
    "a soft cap": lambda s, b, h, i, j: 5 * torch.tanh(s / 5),
    "a negative soft cap": lambda s, b, h, i, j: -4 * torch.tanh(s / 3) + SLOPES[h] * (j - i),
    "a soft cap of a sum": lambda s, b, h, i, j: 2 - 9 * torch.tanh((0.01 * j - s) / 7) - j * 0.5,
    "a large soft cap": lambda s, b, h, i, j: 1e6 * torch.tanh(s / 1e6),
    "an approximate soft cap": lambda s, b, h, i, j: -3 * fa.tanh_approx(-s / 3) + h * 0.5,
    "read twice": lambda s, b, h, i, j: torch.where((j - i).float() == 5.0, 3.0, s) + (j - i) * 0.1,
    "an infinite row": lambda s, b, h, i, j: (
        s + 0.25 * (j - i) - torch.where(i % 3 > 0, 0, torch.inf)
    ),
    "a penalty": lambda s, b, h, i, j: s + HIDDEN[j] * LEAST,
    "a penalty of rows": lambda s, b, h, i, j: s - LARGE[h] * (HIDDEN[j] != HIDDEN[i]).float(),
    "a penalty by distance": lambda s, b, h, i, j: s - LARGE[h] * abs(i - j),
    "large terms that cancel": lambda s, b, h, i, j: s + (TIMES[j] - TIMES[i]),
    "a hidden key": lambda s, b, h, i, j: torch.where(j % 5 > 0, s, -torch.inf) - 0.25 * abs(j - i),
}


def near(
    variant: Any, q_len: int, kv_len: int, *, lse_atol: float = 1e-2,
    target: str = "emulated:sm_80", **options: Any,
) -> None:  # fmt: skip
    """The kernel of an emulated target, against the reference in fp64."""
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, kv_len, kv_len))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out, lse = fa.attention(q, k, v, variant, target=target, return_lse=True, **options)
    variant = fa.variant(score_mod=variant) if callable(variant) else variant
    expected, wanted = variant.reference(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), wanted.double(), atol=lse_atol, rtol=1e-3)


@pytest.mark.parametrize("slope", [64.0, 2.0**20])
def test_steep_lines(slope: float) -> None:
    """The weights are exact to 2^-17 of the slope, and finite."""
    near(
        lambda s, b, h, i, j: s - abs(i - j) * slope, 20, 391, q_offset=130, lse_atol=slope / 2**15
    )


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("hook", "q_len"), [(hook, n) for i, hook in enumerate(HOOKS) for n in turn(i, (3, 70))]
)
def test_full_and_partial_tiles_agree(hook: str, q_len: int) -> None:
    near(HOOKS[hook], q_len, 391, q_offset=130)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("cap", [1e-30, 0.5, 50.0, 256.0, 257.0, 1e6, 1e30])
@pytest.mark.parametrize("target", ["emulated:sm_80", "emulated:sm_90"])
def test_soft_caps_of_any_size(cap: float, target: str) -> None:
    """Those beyond 256 take the form of partial tiles: with the short one all of the last two
    would be wrong."""
    near(fa.SoftCap(cap), 70, 391, target=target, lse_atol=3e-4)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_scale(scale: float) -> None:
    near(HOOKS["ALiBi"], 20, 150, q_offset=9, scale=scale)


@pytest.mark.parametrize("q_offset", [2**24, 2**30, -(2**30)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_distances_that_are_rounded(symmetric: bool, q_offset: int) -> None:
    slopes = torch.tensor([STEP, -STEP])
    near(fa.ALiBi(symmetric=symmetric, slopes=slopes), 20, 150, q_offset=q_offset)


def test_distances_that_leave_int32() -> None:
    """32 times the distance leaves int32 inside of a tile, where j - i is 2^26."""
    near(lambda s, b, h, i, j: s + ((j - i) * 32) * 2.0**-30, 20, 330, q_offset=150 - 2**26)


def test_another_request_of_a_cascade_does_not_change_a_bit() -> None:
    """Requests that share keys share tiles: the other one's positions decide which are full."""
    page, shared, rows = 16, 128, 24
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2 * rows, 2, 64, generator=generator).bfloat16()
    k, v = (torch.randn(10, page, 2, 64, generator=generator).bfloat16() for _ in range(2))
    variant = fa.variant(score_mod=HOOKS["ALiBi"], mask_mod=lambda b, h, i, j: j <= i)
    cascade = fa.CascadeAttention(
        variant, num_q_heads=2, num_kv_heads=2, head_dim=64, q_dtype=torch.bfloat16,
        batch_invariant=True, target="emulated:sm_80",
    )  # fmt: skip
    whole = fa.Paged(torch.tensor([0, 8]), torch.arange(8).int(), torch.tensor([page]), page)
    own = fa.Paged(
        torch.tensor([0, 1, 2]), torch.tensor([8, 9]).int(), torch.tensor([page] * 2), page
    )
    levels = [
        fa.CascadeLevel(torch.tensor([0, 2 * rows]), whole),
        fa.CascadeLevel(torch.tensor([0, rows, 2 * rows]), own),
    ]
    results = []
    for other in (300, 40, shared):
        cascade.plan(levels, q_offset=torch.tensor([300, other]))
        out, lse = cascade.run(q, k, v, return_lse=True)
        results.append((out[:rows], lse[:rows]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
