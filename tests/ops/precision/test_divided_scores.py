"""Hooks that divide scores: kernels multiply them by the reciprocal of the divisor."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashattn_jit as fa
from tests.harness.rotation import chosen
from tests.ops.cases import HOST_TARGETS

EACH = torch.tensor([[1.5, -2.5, 4.0], [3.0, 0.75, 0.5]])  # [head, element]
PER_ROW, PER_KEY = torch.rand(2, 80, generator=torch.Generator().manual_seed(3)) + 0.5
CAP = torch.tensor(2.5)

HOOKS = {
    "param": lambda s, b, h, i, j: s / CAP,
    "row": lambda s, b, h, i, j: s / PER_ROW[i],
    "key": lambda s, b, h, i, j: s / PER_KEY[j],
    "sum of a vector": lambda s, b, h, i, j: (s / EACH[h]).sum(-1),
    "element of a vector": lambda s, b, h, i, j: (s / EACH[h])[..., 1],
    "stacked": lambda s, b, h, i, j: (torch.stack([s, s * 2, s * 3]) / CAP).amax(0),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "name"),
    chosen(
        list(itertools.product([*HOST_TARGETS, "emulated:sm_80"], HOOKS)), 3, lambda case: case[0]
    ),
)
def test_scores_are_divided(target: str, name: str) -> None:
    dtype, near = (torch.float32, 1e-4) if target.startswith("cpu") else (torch.bfloat16, 2e-2)
    for q_len in (2, 40):
        q, k, v = (torch.randn(1, 2, n, 64).to(dtype) for n in (q_len, 45, 45))
        scores = (q.double() @ k.double().mT / 8)[0]
        expected = torch.empty_like(scores)
        for h in range(2):
            for i in range(q_len):
                for j in range(45):
                    expected[h, i, j] = HOOKS[name](scores[h, i, j], 0, h, i, j)
        out = fa.attention(q, k, v, fa.variant(score_mod=HOOKS[name]), target=target)
        wanted = expected.softmax(-1) @ v[0].double()
        torch.testing.assert_close(out[0].double(), wanted, atol=near, rtol=near)
