"""Decoding where the kv heads of a token are adjacent: items of several heads run together.

The layout of K and V must not change a bit of the result: each head meets the same keys in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.harness import rotation
from tests.ops.cases import HOST_TARGETS

HEADS, DIM = 10, 64  # more than run together
SLOPES = torch.rand(2 * HEADS)
SPANS = torch.tensor([3, 900, 60, 150, 20] * 4)
VARIANTS: dict[str, Any] = {
    "full": fa.Full(),
    "window": fa.SlidingWindow(200),
    "documents": fa.variant(mask_mod=lambda b, h, i, j: j // 130 != 2),
    "mask of each head": fa.variant(mask_mod=lambda b, h, i, j: i - j < SPANS[h]),
    "score of each head": fa.variant(score_mod=lambda s, b, h, i, j: s * SLOPES[h] - 0.01 * j),
    "key of each head": fa.variant(key_mod=lambda k, b, h_kv, j: k * (1 + h_kv)),
    "sink": fa.Sink(torch.randn(2 * HEADS)),
}


def adjacent(x: Tensor) -> Tensor:
    """[B, H, N, D] in memory as [B, N, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.by_turns(3)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", rotation.chosen(list(VARIANTS), 2))
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_the_layout_of_heads_changes_no_bit(target: str, name: str) -> None:
    k, v = torch.randn(2, 2, HEADS, 700, DIM)
    for q_len in (1, 4):
        q = torch.randn(2, 2 * HEADS, q_len, DIM)
        call = partial(
            fa.attention, variant=VARIANTS[name], q_offset=695, target=target, return_lse=True
        )
        apart, lse = call(q, k, v)
        together, together_lse = call(q, adjacent(k), adjacent(v))
        assert torch.equal(together, apart)
        assert torch.equal(together_lse, lse)
