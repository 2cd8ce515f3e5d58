"""Sums over very many keys, of which one has nearly all of the weight: small weights count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.ops.batches.paged_calls import paged_attention
from tests.ops.cases import HOST_TARGETS

D, KEYS = 32, 30_000
ROWS = (1, 4, 40)
TOLERANCE = 4e-6  # of fp32 outputs and their lse: one running sum has 8e-5, or 1.3e-5 of 40 rows


def inputs(rows: int, heavy: int, score: float = 15.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: all keys but `heavy` have scores near 0 and values near 1, its value is 0.01."""
    q, k = torch.randn(1, 2, rows, D), torch.randn(1, 2, KEYS, D) * 0.02
    v = torch.randn(1, 2, KEYS, D) * 0.1 + 1
    q[..., 0], k[..., 0] = math.sqrt(D), 0
    k[:, :, heavy] = 0
    k[:, :, heavy, 0] = score
    v[:, :, heavy] = 0.01
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().mT / math.sqrt(D)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def error(x: Tensor, wanted: Tensor) -> float:
    """Relative to the root mean square of what is wanted."""
    return ((x - wanted).square().mean() / wanted.square().mean()).sqrt().item()


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("heavy", [0, KEYS // 2 + 7, KEYS - 1])
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_small_weights_of_many_keys_count(target: str, heavy: int) -> None:
    for rows in ROWS:
        q, k, v = inputs(rows, heavy)
        out, lse = fa.attention(q, k, v, target=target, return_lse=True)
        wanted, wanted_lse = expected(q, k, v)
        assert error(out, wanted) < TOLERANCE
        assert (lse - wanted_lse).abs().max() < TOLERANCE


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_lse_of_bf16(target: str) -> None:
    for rows in ROWS:
        q, k, v = (x.bfloat16() for x in inputs(rows, 0))
        out, lse = fa.attention(q, k, v, target=target, return_lse=True)
        wanted, wanted_lse = expected(q, k, v)
        assert error(out, wanted) < 4e-3
        assert (lse - wanted_lse).abs().max() < 2e-5


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_pages(target: str) -> None:
    page = 16
    for rows in ROWS:
        q, k, v = inputs(rows, 0)
        order = torch.randperm(KEYS // page)
        pages = [x[0].mT.reshape(2, D, -1, page).permute(2, 3, 0, 1)[order] for x in (k, v)]
        table = fa.Paged(
            torch.tensor([0, len(order)]), order.argsort().int(), torch.tensor([page]), page
        )
        out, lse = paged_attention(
            q[0].transpose(0, 1).contiguous(), pages[0].contiguous(), pages[1].contiguous(),
            torch.tensor([0, rows]), table, target=target, return_lse=True,
        )  # fmt: skip
        wanted, wanted_lse = expected(q, k, v)
        assert lse is not None
        assert error(out.transpose(0, 1), wanted[0]) < TOLERANCE
        assert (lse.mT - wanted_lse[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_pointwise_weights(target: str) -> None:
    weights = fa.variant(normalizer=fa.Pointwise(lambda s: (s - 15).exp()))
    for rows in ROWS:
        q, k, v = inputs(rows, 0)
        out = fa.attention(q, k, v, weights, target=target)
        scores = q.double() @ k.double().mT / math.sqrt(D)
        assert error(out, (scores - 15).exp() @ v.double()) < TOLERANCE


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("rows", [4, 40])
def test_rows_do_not_change_the_sums_of_others(target: str, dtype: torch.dtype, rows: int) -> None:
    # Each row sees a band of keys: with other rows, a tile of rows visits other tiles of keys.
    first = torch.zeros(rows, dtype=torch.int32)
    variant = fa.variant(mask_mod=lambda b, h, i, j: (j >= first[i]) & (j < first[i] + 9000))
    q, k, v = (x.to(dtype) for x in inputs(rows, 12_345, 6.0))

    def first_row(begin: int, others: Tensor) -> Tensor:
        first[0], first[1:] = begin, others
        return fa.attention(q, k, v, variant, target=target)[:, :, 0].clone()

    for begin in (3001, 8192):
        alone = first_row(begin, torch.full((rows - 1,), KEYS))
        for others in (torch.full((rows - 1,), 0), torch.arange(rows - 1) * 523):
            assert torch.equal(alone, first_row(begin, others))


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_masks_that_end_anywhere_in_levels_that_begin_anywhere(target: str) -> None:
    # Tiles of a level that begins within a tile: those that the mask keeps end where it ends.
    limits = torch.zeros(2, dtype=torch.int64)
    mask = fa.variant(mask_mod=lambda b, h, i, j: (j >= limits[0]) & (j < limits[1]))
    for rows in (1, 40):
        for shared, own, low, high in (
            (100, 1000, 128, 641),
            (37, 6000, 0, 4936),
            (128, 700, 9, 577),
        ):
            limits[0], limits[1] = low, high
            cascade = fa.CascadeAttention(
                mask, num_q_heads=2, num_kv_heads=1, head_dim=D, q_dtype=torch.float32,
                target=target,
            )  # fmt: skip
            levels = [
                fa.CascadeLevel(torch.tensor([0, 2 * rows]), fa.Ragged(torch.tensor([0, shared]))),
                fa.CascadeLevel(
                    torch.tensor([0, rows, 2 * rows]), fa.Ragged(torch.tensor([0, own, 2 * own]))
                ),
            ]
            cascade.plan(levels)
            q = torch.randn(2 * rows, 2, D)
            k, v = torch.randn(2, shared + 2 * own, 1, D)
            out = cascade.run(q, k, v)
            for b in range(2):
                mine = slice(shared + b * own, shared + (b + 1) * own)
                keys, values = (torch.cat([x[:shared], x[mine]])[low:high, 0] for x in (k, v))
                wanted, _ = expected(q[b * rows : (b + 1) * rows].transpose(0, 1), keys, values)
                got = out[b * rows : (b + 1) * rows].transpose(0, 1)
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_requests_of_a_group_have_the_bits_that_they_have_alone(target: str) -> None:
    # Shared keys are multiplied with the rows of the whole group: 2, 4 or more at once.
    keys = 100 + 3000
    shared, own = torch.randn(2, keys, 1, D), torch.randn(2, 2, 1200, 1, D)

    def run(members: list[int], rows: tuple[int, ...], queries: Tensor) -> Tensor:
        cascade = fa.CascadeAttention(
            fa.SlidingWindow(2000), num_q_heads=2, num_kv_heads=1, head_dim=D,
            q_dtype=torch.float32, target=target, batch_invariant=True,
        )  # fmt: skip
        ends = torch.tensor([0, *(rows[m] for m in members)]).cumsum(0)
        group = torch.tensor([0, int(ends[-1])])
        levels = [fa.CascadeLevel(group, fa.Ragged(torch.tensor([0, n]))) for n in (100, 3000)]
        lengths = torch.arange(len(members) + 1) * 1200
        cascade.plan([*levels, fa.CascadeLevel(ends, fa.Ragged(lengths))])
        k, v = (torch.cat([shared[i], *(own[i, m] for m in members)]) for i in range(2))
        q = torch.cat([queries[m, : rows[m]] for m in members])
        return cascade.run(q, k, v)[: rows[0]]

    for rows in ((1, 1), (2, 3), (1, 3), (40, 41)):
        q = torch.randn(2, max(rows), 2, D)
        assert torch.equal(run([0], rows, q), run([0, 1], rows, q)), rows
