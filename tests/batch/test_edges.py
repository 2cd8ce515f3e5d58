"""Empty batches, rows without keys, scores at the ends of their range."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import Batch, indptr
from tests.batch.oracle import Math, check
from tests.batch.runs import attend, engine

CAUSAL = Math(causal=True)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [((), ()), ((0,), (0,)), ((0, 0), (40, 0)), ((0, 0, 0), (5, 300, 1))],
    ids=str,
)
def test_nothing_to_do(q_len, kv_len, page_size: int) -> None:
    batch = Batch(q_len, kv_len, (8, 2), 64, page_size=page_size)
    out, lse = attend(batch, fa.Causal())
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("page_size", [0, 16])
def test_queries_without_keys_are_zero(page_size: int) -> None:
    batch = Batch((3, 40, 1), (0, 0, 0), (8, 2), 64, page_size=page_size)
    out, lse = attend(batch, fa.Causal())
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("limited", [False, True])
def test_lists_without_keys(limited: bool, page_size: int) -> None:
    """Every entry of the lists is -1, and there is no page."""
    batch = Batch((3, 1), (0, 0), (8, 2), 64, page_size=page_size)
    limits = fa.Limits(max_requests=2, max_q_tokens=8, max_kv_len=64, max_pages=8)
    made = engine(batch, fa.Causal(), limits=limits if limited else None)
    nothing = fa.TokenSparse(torch.full((4, 5), -1, dtype=torch.int32))
    made.plan(batch.q_indptr, batch.storage, sparsity=nothing)
    out, lse = made.run(batch.q, batch.k, batch.v, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("page_size", [0, 16])
def test_empty_requests_among_others(page_size: int) -> None:
    batch = Batch((0, 5, 0, 70, 1, 0), (30, 0, 0, 90, 200, 0), (8, 2), 64, page_size=page_size)
    out, lse = attend(batch, CAUSAL.variant(8))
    check(batch, CAUSAL, out, lse)
    assert (out[:5] == 0).all() and (lse[:5] == -torch.inf).all()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(34, 1), (200, 3), (5, 4)])
def test_more_queries_than_keys_under_causal(q_len: int, kv_len: int, sink: bool) -> None:
    """FlashInfer's fully_masked_rows: q 34 over kv 1 leaves 33 rows without a key."""
    what = Math(causal=True, sink=sink)
    batch = Batch((q_len,), (kv_len,), (8, 2), 64, page_size=16)
    out, lse = attend(batch, what.variant(8))
    check(batch, what, out, lse)
    empty = q_len - kv_len
    assert (out[:empty] == 0).all()
    expected = torch.linspace(-2, 2, 8) if sink else torch.full((8,), -torch.inf)
    torch.testing.assert_close(lse[:empty], expected.expand(empty, 8))


def test_a_part_of_split_keys_without_any_kept_one() -> None:
    """FlashInfer's split_kv_empty_chunk, and splits whose keys a window leaves out."""
    for what, kv_len in ((CAUSAL, 129), (Math(window=40), 6000)):
        batch = Batch((2,), (kv_len,), (8, 2), 64, page_size=16)
        check(batch, what, *attend(batch, what.variant(8)))
        made = engine(batch, what.variant(8), batch_invariant=True)
        made.plan(batch.q_indptr, batch.storage)
        check(batch, what, *made.run(batch.q, batch.k, batch.v, return_lse=True))


def test_split_keys_of_which_every_other_row_sees_none() -> None:
    batch = Batch((4,), (6000,), (2, 1), 64)
    made = engine(batch, lambda b, h, q_idx, kv_idx: q_idx % 2 == 0, batch_invariant=True)
    made.plan(batch.q_indptr, batch.storage)
    out, lse = made.run(batch.q, batch.k, batch.v, return_lse=True)
    assert (out[1::2] == 0).all() and (lse[1::2] == -torch.inf).all()
    expected, expected_lse = attend(batch, fa.Full())
    torch.testing.assert_close(out[::2], expected[::2])
    torch.testing.assert_close(lse[::2], expected_lse[::2])


@pytest.mark.parametrize("q_len", [1, 40])
def test_one_valid_key_gives_its_value(q_len: int) -> None:
    """FlashInfer's one_valid_key: every other score is -524288."""
    batch = Batch((q_len, q_len), (500, 77), (8, 2), 64, page_size=16)
    chosen = torch.tensor([123, 76])

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx == chosen[b], score, -524288.0)

    out, _ = attend(batch, score_mod)
    for b in range(2):
        value = batch.keys(b)[1][chosen[b]].repeat_interleave(4, 0)
        rows = out[b * q_len : (b + 1) * q_len]
        assert torch.equal(rows, value.expand(q_len, 8, 64))


@pytest.mark.parametrize("target", [-1e4, -5e4, -5.5e4, -6e4, -1e5, -2e5, -2.45e5])
def test_scores_far_below_zero(target: float) -> None:
    batch = Batch((1, 20), (64, 64), (16, 16), 64, torch.bfloat16, page_size=5)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + target

    out, lse = attend(batch, score_mod)
    call = (batch.q, *batch.packed_keys(), batch.q_indptr, indptr(batch.kv_len), score_mod)
    # Sums near -2.45e5 are rounded to 1/64 in float32, by the eager reference as by the kernel.
    eager, eager_lse = varlen_reference(*call, dtype=torch.bfloat16)
    torch.testing.assert_close(out, eager, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, eager_lse.float(), rtol=1e-6, atol=0.05)


def test_masked_keys_never_win() -> None:
    """FlashInfer's masked_key_never_dominates: kept scores -8, masked ones +64."""
    batch = Batch((32,), (32,), (4, 4), 64, page_size=16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx <= q_idx, -8.0, 64.0) + 0 * score

    out, lse = attend(batch, fa.variant(score_mod=score_mod) & fa.Causal())
    _, v = batch.keys(0)
    count = torch.arange(1, 33)
    means = v.cumsum(0) / count[:, None, None]
    torch.testing.assert_close(out, means, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, (count.log() - 8)[:, None].expand(32, 4))


def test_a_mask_given_as_bits_is_causal() -> None:
    """FlashInfer's custom mask == causal, and a mask that no formula gives."""
    batch = Batch((37, 17), (97, 54), (4, 4), 64, page_size=5)
    kept = torch.zeros(2, 37, 97, dtype=torch.bool)
    for b in range(2):
        q, k = batch.q_len[b], batch.kv_len[b]
        kept[b, :q, :k] = torch.ones(q, k, dtype=torch.bool).tril(k - q)
    random = kept & (torch.rand(kept.shape) < 0.4)
    for mask in (kept, random):

        def mask_mod(b, h, q_idx, kv_idx, mask=mask):
            return mask[b, q_idx - fa.kv_len(b) + fa.q_len(b), kv_idx]

        out, lse = attend(batch, mask_mod)
        seen = lambda b, h, rows, mask=mask: mask[b, rows, : batch.kv_len[b]]  # noqa: E731
        check(batch, Math(), out, lse, seen=seen)


@pytest.mark.parametrize(
    ("kv_len", "q_len", "prefix", "items"),
    [(54, 37, 17, (17, 19)), (97, 81, 16, (24, 32, 24))],
)
def test_scoring_of_several_items_behind_one_prefix(kv_len, q_len, prefix, items) -> None:
    """FlashInfer's multi-item scoring: an item sees the prefix and itself, causally."""
    batch = Batch((q_len, q_len), (kv_len, kv_len), (4, 2), 64, page_size=16)
    item = torch.zeros(kv_len, dtype=torch.int32)
    begin = prefix
    for number, length in enumerate(items):
        item[begin : begin + length] = number + 1
        begin += length
    item[begin:] = len(items) + 1

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((item[kv_idx] == 0) | (item[q_idx] == item[kv_idx]))

    def seen(b, h, rows):
        own, at = item[rows + kv_len - q_len], rows[:, None] + kv_len - q_len
        return ((item == 0) | (own[:, None] == item)) & (at >= torch.arange(kv_len))

    out, lse = attend(batch, mask_mod)
    check(batch, Math(), out, lse, seen=seen)


@pytest.mark.parametrize("page_size", [0, 16])
def test_positions_of_first_rows_are_given(page_size: int) -> None:
    batch = Batch((3, 40, 1, 5), (90, 41, 7, 20), (8, 2), 64, page_size=page_size)
    for offsets in ([100, 0, -1, 3], [0, 0, 0, 0]):
        out, lse = attend(batch, CAUSAL.variant(8), q_offset=torch.tensor(offsets))
        check(batch, CAUSAL, out, lse, q_offset=offsets)


def test_hooks_read_lengths_rows_and_slots() -> None:
    """`fa.q_row` is the packed row, `fa.kv_slot` the slot of a key in the cache."""
    batch = Batch((3, 40, 1), (90, 41, 7), (4, 2), 64, page_size=8)
    row_bias = torch.randn(sum(batch.q_len))
    slot_bias = torch.randn(batch.k.shape[0] * 8)

    def mod(score, b, h, q_idx, kv_idx):
        near = (fa.kv_len(b) - kv_idx) * 0.01 + fa.q_len(b) * 0.1
        return score + row_bias[fa.q_row(b, q_idx)] + slot_bias[fa.kv_slot(b, kv_idx)] + near

    out, lse = attend(batch, mod)
    dense = torch.cat([slot_bias[s] for s in batch.slots])

    def reference_mod(score, b, h, q_idx, kv_idx):
        near = (fa.kv_len(b) - kv_idx) * 0.01 + fa.q_len(b) * 0.1
        return score + row_bias[fa.q_row(b, q_idx)] + dense[fa.kv_slot(b, kv_idx)] + near

    exact, exact_lse = varlen_reference(
        batch.q, *batch.packed_keys(), batch.q_indptr, indptr(batch.kv_len), reference_mod
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


def test_out_is_written_in_place() -> None:
    batch = Batch((3, 40), (90, 41), (4, 2), 64, page_size=16)
    made = engine(batch, fa.Causal())
    made.plan(batch.q_indptr, batch.storage)
    wide = torch.full((43, 8, 64), 7.0)
    out = made.run(batch.q, batch.k, batch.v, out=wide[:, 2:6])
    assert torch.equal(out, made.run(batch.q, batch.k, batch.v))
    assert (wide[:, :2] == 7).all() and (wide[:, 6:] == 7).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on first use
@pytest.mark.parametrize("grad", [True, False])
def test_an_input_with_a_tangent_is_refused(grad: bool) -> None:
    q, k, v = torch.randn(3, 4, 2, 16)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=q.dtype
    )
    batch.plan(indptr((4,)), fa.Ragged(indptr((4,))))
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(fa.GradError, match="tangent"):
            batch.run(dual, k, v)
