"""`fa.flex_attention` computes what FlexAttention does, for the forward cases of torch's own tests.

Mods of the registry at their shapes, by turns; then shapes, strides, GQA, block masks and outputs
with few mods, so that few kernels are compiled.
"""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    or_masks,
)

import flashattn_jit as fa
from tests.harness import rotation
from tests.ops.torch_signatures.flex_oracle import (
    check_against_oracle,
    literal_mask,
    oracle,
    randn,
    uncompiled,
)
from tests.registry.case import Case, Shape
from tests.registry.masks import MASK_CASES
from tests.registry.scores import SCORE_CASES

D = 32
SMALL = Shape(2, 4, 2, 70, 130, D, D)  # two tiles of rows and of keys, with tails


def inputs(
    shape: Shape, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, hq, hkv, sq, skv, d, dv = shape
    return (
        randn(b, hq, sq, d, dtype=dtype),
        randn(b, hkv, skv, d, dtype=dtype),
        randn(b, hkv, skv, dv, dtype=dtype),
    )


def dense(
    batch: int = 2, heads: int = 4, q_len: int = 100, kv_len: int | None = None, d: int = D,
    kv_heads: int | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    kv_len = q_len if kv_len is None else kv_len
    return inputs(Shape(batch, heads, kv_heads or heads, q_len, kv_len, d, d), dtype)


def causal(b, h, q, k):
    return q >= k


def rel_bias(score, b, h, q, k):
    return score + (q - k)


def alibi(score, b, h, q, k):
    return score + torch.exp2(-(h + 1) * 2.0) * (k - q)


# --- every mod -----------------------------------------------------------------------------------


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", rotation.chosen(SCORE_CASES, 10), ids=lambda c: c.name)
def test_score_mods(case: Case) -> None:
    shape = SMALL if case.fits(SMALL) else case.shape
    q, k, v = inputs(shape)
    mod, _ = case.build(shape)
    out, lse = fa.flex_attention(q, k, v, mod, enable_gqa=True, return_lse=True, scale=case.scale)
    if case.reaches_nan:
        gold = oracle(q, k, v, mod, None, case.scale)
        good = gold.lse.isfinite() & (gold.max_scores < 1e4)
        torch.testing.assert_close(out.double()[good], gold.out[good], rtol=1e-2, atol=1e-2)
        return
    check_against_oracle(out, q, k, v, mod, None, case.scale, lse)


# Masks alone are tested with fa.attention; these differ in how they fill a map of blocks.
BLOCKED = (
    "causal", "sliding", "document_causal", "batch_documents", "jagged", "batch_offset",
    "two_ranges", "masked_rows", "never", "everything", "head_dependent", "natten", "modular",
    "shared_prefix",
)  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "case",
    rotation.chosen([c for c in MASK_CASES if c.name.removeprefix("flex_") in BLOCKED], 3),
    ids=lambda c: c.name,
)
def test_mask_mods_through_a_block_mask(case: Case) -> None:
    shape = SMALL if case.fits(SMALL) else case.shape
    q, k, v = inputs(shape)
    mod, _ = case.build(shape)
    mask = create_block_mask(
        mod, shape.batch, shape.num_q_heads, shape.q_len, shape.kv_len, "cpu", BLOCK_SIZE=32
    )
    out, lse = fa.flex_attention(
        q, k, v, None, mask, enable_gqa=True, return_lse=True, scale=case.scale
    )
    check_against_oracle(out, q, k, v, None, mod, case.scale, lse)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mod", [None, rel_bias, alibi], ids=["plain", "rel_bias", "alibi"])
def test_half_precision(mod, dtype: torch.dtype) -> None:
    q, k, v = dense(dtype=dtype)
    check_against_oracle(fa.flex_attention(q, k, v, mod), q, k, v, mod)


def test_new_values_of_captures_reach_the_kernel() -> None:
    q, k, v = dense()

    def make(slope: float, heads: torch.Tensor):
        return lambda score, b, h, i, j: score * slope + heads[h]

    for i in range(3):
        mod = make(0.5 + i, randn(4))
        check_against_oracle(fa.flex_attention(q, k, v, mod), q, k, v, mod)


def test_a_captured_flag_chooses_the_branch() -> None:
    q, k, v = dense()

    def make(add: bool):
        return lambda score, b, h, i, j: score + (i - j) if add else score - (i - j)

    for add in (True, False, True):
        check_against_oracle(fa.flex_attention(q, k, v, make(add)), q, k, v, make(add))


def test_dynamic_captured_buffer_of_changing_head_count() -> None:
    def run(heads: int) -> None:
        scale = torch.rand(heads)
        q, k, v = dense(heads=heads)

        def mod(score, b, h, i, j):
            return score * scale[h]

        check_against_oracle(fa.flex_attention(q, k, v, mod), q, k, v, mod)

    for heads in (4, 8, 4, 16, 4):
        run(heads)


# --- lengths, heads, head dims -------------------------------------------------------------------

LENGTHS = [(1, 1), (1, 65), (3, 100), (17, 16), (64, 64), (100, 37), (131, 257), (8, 300)]


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_lengths_that_no_tile_divides(q_len: int, kv_len: int) -> None:
    q, k, v = dense(q_len=q_len, kv_len=kv_len)
    out, lse = fa.flex_attention(q, k, v, rel_bias, return_lse=True)
    check_against_oracle(out, q, k, v, rel_bias, lse=lse)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_masked_lengths_that_no_block_divides(q_len: int, kv_len: int) -> None:
    q, k, v = dense(q_len=q_len, kv_len=kv_len)
    mask = create_block_mask(causal, None, None, q_len, kv_len, "cpu", BLOCK_SIZE=64)
    out, lse = fa.flex_attention(q, k, v, rel_bias, mask, return_lse=True)
    check_against_oracle(out, q, k, v, rel_bias, causal, lse=lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (10, 2), (16, 8)])
@pytest.mark.parametrize("q_len", [1, 33])
def test_grouped_heads(heads: int, kv_heads: int, q_len: int) -> None:
    q, k, v = dense(heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=130)
    out = fa.flex_attention(q, k, v, rel_bias, enable_gqa=True)
    check_against_oracle(out, q, k, v, rel_bias)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [3, 5])
def test_one_key_serves_the_batch(batch: int, heads: tuple[int, int]) -> None:
    q, k, v = dense(batch=batch, heads=heads[0], kv_heads=heads[1], q_len=70)
    k, v = k[:1], v[:1]
    mask = create_block_mask(causal, batch, None, 70, 70, "cpu", BLOCK_SIZE=32)
    out = fa.flex_attention(q, k, v, rel_bias, mask, enable_gqa=True)
    check_against_oracle(out, q, k, v, rel_bias, causal)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dims", [(64, 32), (32, 64), (17, 17), (121, 24)])
def test_head_dims(dims: tuple[int, int]) -> None:
    q, k, v = inputs(Shape(2, 2, 2, 70, 70, *dims))
    check_against_oracle(fa.flex_attention(q, k, v, rel_bias), q, k, v, rel_bias)


def test_scale() -> None:
    q, k, v = dense()
    out = fa.flex_attention(q, k, v, alibi, scale=0.3)
    check_against_oracle(out, q, k, v, alibi, scale=0.3)


@pytest.mark.parametrize("shape", [(2, 4, 0, 64), (2, 4, 100, 0), (0, 4, 10, 10), (2, 4, 0, 0)])
def test_empty_problems(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    q, k, v = dense(batch, heads, q_len, kv_len)
    out, lse = fa.flex_attention(q, k, v, return_lse=True)
    assert out.shape == (batch, heads, q_len, D)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


# --- strides -------------------------------------------------------------------------------------

PERMUTATIONS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3), (2, 0, 1, 3), (2, 1, 0, 3)]


@pytest.mark.parametrize("order", PERMUTATIONS)
@pytest.mark.parametrize("sizes", [(2, 4, 70, D), (3, 1, 70, D)])
def test_out_has_the_stride_order_of_q(order, sizes) -> None:
    inverse = [order.index(d) for d in range(4)]
    q = randn(*(sizes[d] for d in order)).permute(inverse)
    k, v = randn(*sizes), randn(*sizes)
    out = fa.flex_attention(q, k, v, rel_bias)
    with uncompiled(), torch.no_grad():
        theirs = torch_flex.flex_attention(q, k, v, rel_bias)
    strides = [
        [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (out, theirs)
    ]
    assert strides[0] == strides[1]
    check_against_oracle(out, q, k, v, rel_bias)


def _odd_base(x: torch.Tensor) -> torch.Tensor:
    """The same values at an odd offset of a larger allocation."""
    flat = torch.empty(x.numel() + 997)
    return flat[997:].view(x.shape).copy_(x)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 13), float("nan"))
    return wide[..., : x.shape[-1]].copy_(x)


def _broadcast_heads(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand_as(x)


def _column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [_odd_base, _transposed, _padded_rows, _broadcast_heads, _column_major]


@pytest.mark.parametrize("of_v", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("of_k", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
def test_strided_keys_and_values(of_k, of_v) -> None:
    q, k, v = dense(q_len=70, kv_len=90)
    k, v = of_k(k), of_v(v)
    check_against_oracle(fa.flex_attention(q, k, v, rel_bias), q, k, v, rel_bias)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
def test_strided_queries(layout) -> None:
    q, k, v = dense(q_len=70, kv_len=90)
    q = layout(q)
    check_against_oracle(fa.flex_attention(q, k, v, rel_bias), q, k, v, rel_bias)


@pytest.mark.parametrize("length", [16, 64])
def test_a_last_dim_that_is_not_contiguous(length: int) -> None:
    q, k, v = (_column_major(x) for x in dense(q_len=length))
    out = fa.flex_attention(q, k, v, rel_bias)
    assert out.stride(-1) == 1
    check_against_oracle(out, q, k, v, rel_bias)


def test_shared_storage_of_queries_and_keys() -> None:
    q = randn(2, 4, 70, D)
    check_against_oracle(fa.flex_attention(q, q, q, rel_bias), q, q, q, rel_bias)


# --- block masks ---------------------------------------------------------------------------------


def two_ranges(b, h, q, k):
    return (k < 40) | (k >= 160)


def masked_rows(b, h, q, k):
    return (q >= 70) & (q >= k)


def by_head(b, h, q, k):
    return q + h * 30 >= k


def by_batch(b, h, q, k):
    return q - b * 50 >= k


BLOCK_SIZES = [128, 64, 256, 96, (128, 64), (64, 256), (1, 64), (48, 40)]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("mod", [causal, two_ranges], ids=lambda f: f.__name__)
def test_block_sizes(mod, block_size) -> None:
    q, k, v = dense(q_len=200)
    mask = create_block_mask(mod, None, None, 200, 200, "cpu", BLOCK_SIZE=block_size)
    out, lse = fa.flex_attention(q, k, v, None, mask, return_lse=True)
    check_against_oracle(out, q, k, v, None, mod, lse=lse)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("mod", "dims"),
    [(by_head, (None, 4)), (by_head, (2, 4)), (by_batch, (2, None)), (by_batch, (2, 4))],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masks_that_vary_by_head_or_batch(mod, dims, kv_heads: int) -> None:
    q, k, v = dense(q_len=150, kv_heads=kv_heads)
    mask = create_block_mask(mod, *dims, 150, 150, "cpu", BLOCK_SIZE=32)
    out = fa.flex_attention(q, k, v, alibi, mask, enable_gqa=True)
    check_against_oracle(out, q, k, v, alibi, mod)


@pytest.mark.skipif(
    "separate_full_blocks" not in inspect.signature(create_block_mask).parameters,
    reason="this torch always separates full blocks",
)
@pytest.mark.parametrize("separate", [True, False])
def test_with_and_without_full_blocks(separate: bool) -> None:
    q, k, v = dense(q_len=200)
    mask = create_block_mask(
        causal, None, None, 200, 200, "cpu", BLOCK_SIZE=32, separate_full_blocks=separate
    )
    assert (mask.full_kv_num_blocks is not None) == separate
    check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, causal)


def test_fully_masked_rows_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = dense(q_len=200, kv_heads=2)
    mask = create_block_mask(masked_rows, None, None, 200, 200, "cpu", BLOCK_SIZE=32)
    out, lse = fa.flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    assert (out[:, :, :70] == 0).all()
    assert (lse[:, :, :70] == float("-inf")).all()
    check_against_oracle(out, q, k, v, None, masked_rows, lse=lse)


def test_combined_masks() -> None:
    q, k, v = dense(q_len=200)

    def window(b, h, i, j):
        return i - j < 50

    def never(b, h, i, j):
        return i < j

    for mod in (and_masks(causal, window), or_masks(causal, never), and_masks(causal, never)):
        mask = create_block_mask(mod, None, None, 200, 200, "cpu", BLOCK_SIZE=32)
        check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, mod)


def test_the_lists_decide_which_blocks_are_visited() -> None:
    """A hand-made mask whose mask_mod contradicts its lists: full blocks never ask it."""
    q, k, v = dense(q_len=128)
    partial = torch.tensor([[[[1, 0, 0, 0], [0, 3, 0, 0], [2, 0, 0, 0], [0, 1, 2, 3]]]])
    full = torch.tensor([[[[3, 2, 9, -5], [1, 9, 9, 9], [0, 0, 0, 0], [9, 9, 9, 9]]]])
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2, 1, 4]]], dtype=torch.int32), partial.int(),
        torch.tensor([[[2, 1, 0, 0]]], dtype=torch.int32), full.int(),
        BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(128, 128), compute_q_blocks=False,
    )  # fmt: skip
    out, lse = fa.flex_attention(q, k, v, rel_bias, mask, return_lse=True)
    literal = literal_mask(mask, 2, 4, 128, 128)
    check_against_oracle(out, q, k, v, rel_bias, literal, lse=lse)


@pytest.mark.parametrize("seed", range(4))
def test_random_lists(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_block, kv_block = (32, 16) if seed % 2 else (16, 64)
    q_len, kv_len, batch, heads = 100, 150, 2, (1, 4)[seed // 2]
    rows, cols = -(-q_len // q_block), -(-kv_len // kv_block)
    state = torch.randint(0, 3, (batch, heads, rows, cols), generator=generator)

    def lists(wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        hit = (state == wanted).int()
        return hit.sum(-1, dtype=torch.int32), torch.argsort(hit, -1, descending=True).int()

    mask = BlockMask.from_kv_blocks(
        *lists(1), *lists(2), BLOCK_SIZE=(q_block, kv_block), mask_mod=causal,
        seq_lengths=(q_len, kv_len), compute_q_blocks=False,
    )  # fmt: skip
    q, k, v = dense(batch, 4, q_len, kv_len)
    out, lse = fa.flex_attention(q, k, v, None, mask, return_lse=True)
    literal = literal_mask(mask, batch, 4, q_len, kv_len)
    check_against_oracle(out, q, k, v, None, literal, lse=lse)


def test_sliced_and_moved_masks() -> None:
    """A decoding step: one query block of a mask, its mask_mod shifted by the position."""
    length, position = 256, 130
    whole = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=64)
    mask = whole[:, :, position // 64]
    mask.mask_mod = lambda b, h, i, j: causal(b, h, i + position, j)
    mask.seq_lengths = (1, length)
    q, k, v = dense(q_len=1, kv_len=length, heads=8, kv_heads=2)
    out = fa.flex_attention(q, k, v, None, mask, enable_gqa=True)
    check_against_oracle(out, q, k, v, None, mask.mask_mod)


def test_a_slice_without_mask_mod_is_refused_as_torch_does() -> None:
    q, k, v = dense(q_len=128)
    mask = create_block_mask(causal, 2, 4, 128, 128, "cpu", BLOCK_SIZE=64)[:, 0:1]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        fa.flex_attention(q, k, v, None, mask)


def test_sliced_heads_with_their_mask_mod() -> None:
    q, k, v = dense(q_len=128)
    whole = create_block_mask(causal, 2, 4, 128, 128, "cpu", BLOCK_SIZE=32)
    mask = whole[0:1, 2:3]
    mask.mask_mod = whole.mask_mod
    check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, causal)


def test_an_adjusted_mask() -> None:
    mask = create_block_mask(causal, None, None, 256, 256, "cpu", BLOCK_SIZE=64)._adjust(100, 180)
    if mask.shape[-2:] != (100, 180):
        pytest.skip("this torch rounds the lengths of an adjusted mask up to whole blocks")
    q, k, v = dense(q_len=100, kv_len=180)
    check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, causal)


def test_a_mask_is_converted_once_and_again_when_its_lists_change() -> None:
    q, k, v = dense(q_len=128)
    mask = create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
    first = fa.flex_attention(q, k, v, None, mask)
    kept = mask._flashattn_jit_states
    assert torch.equal(fa.flex_attention(q, k, v, None, mask), first)
    assert mask._flashattn_jit_states is kept
    mask.kv_num_blocks.zero_()  # in place: only the full blocks are left
    literal = literal_mask(mask, 2, 4, 128, 128)
    check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, literal)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    assert (fa.flex_attention(q, k, v, None, mask) == 0).all()


def test_lists_made_under_inference_mode() -> None:
    q, k, v = dense(q_len=128)
    with torch.inference_mode():
        mask = create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
        out = fa.flex_attention(q, k, v, None, mask)
        mask.kv_num_blocks.zero_()
        mask.full_kv_num_blocks.zero_()
        assert (fa.flex_attention(q, k, v, None, mask) == 0).all()
    check_against_oracle(out.clone(), q, k, v, None, causal)


def test_partial_object_and_method_as_mask_mod() -> None:
    class Window:
        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self, b, h, q, k):
            return (q >= k) & (q - k < self.size)

        def method(self, b, h, q, k):
            return self(b, h, q, k)

    def shifted(b, h, q, k, *, by):
        return q >= k + by

    q, k, v = dense(q_len=128)
    for mod in (Window(30), Window(40).method, functools.partial(shifted, by=3)):
        mask = BlockMask.from_kv_blocks(
            torch.full((1, 1, 4), 4, dtype=torch.int32),
            torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4),
            BLOCK_SIZE=32, mask_mod=mod,
        )  # fmt: skip
        check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, mod)


def test_documents_of_a_new_batch_need_no_new_kernel() -> None:
    q, k, v = dense(q_len=128)

    def make(ids: torch.Tensor):
        return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)

    for cut in (30, 64, 100):
        mod = make((torch.arange(128) >= cut).int())
        mask = create_block_mask(mod, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
        check_against_oracle(fa.flex_attention(q, k, v, None, mask), q, k, v, None, mod)


def test_nan_of_masked_keys_does_not_leak() -> None:
    q, k, v = dense(q_len=128)
    mask = create_block_mask(lambda b, h, i, j: j < 77, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
    clean = fa.flex_attention(q, k, v, None, mask)
    k[:, :, 77:] = float("nan")
    assert torch.equal(fa.flex_attention(q, k, v, None, mask), clean)


# --- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mod", [None, rel_bias], ids=["plain", "rel_bias"])
def test_auxiliary_outputs(mod) -> None:
    q, k, v = dense(q_len=243)
    mask = create_block_mask(masked_rows, None, None, 243, 243, "cpu", BLOCK_SIZE=64)
    out, aux = fa.flex_attention(
        q, k, v, mod, mask, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    assert type(aux) is torch_flex.AuxOutput
    assert aux.lse.dtype == aux.max_scores.dtype == torch.float32
    check_against_oracle(out, q, k, v, mod, masked_rows, None, aux.lse, aux.max_scores)


def test_only_requested_outputs_are_returned() -> None:
    q, k, v = dense()
    _, aux = fa.flex_attention(q, k, v, return_aux=AuxRequest())
    assert aux == (None, None)
    _, aux = fa.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    expected = oracle(q, k, v).max_scores
    torch.testing.assert_close(aux.max_scores.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="both return_lse and return_aux"):
        fa.flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e3])
def test_max_scores_of_any_magnitude(magnitude: float, dtype: torch.dtype) -> None:
    q, k, v = dense(q_len=70)
    q, k, v = (q * magnitude).to(dtype), k.to(dtype), v.to(dtype)
    _, aux = fa.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    expected = oracle(q, k, v).max_scores
    torch.testing.assert_close(aux.max_scores.double(), expected, rtol=2e-6, atol=1e-6 * magnitude)


def test_attention_over_disjoint_keys_merges_to_the_whole() -> None:
    q, k, v = dense(q_len=96)
    parts = []
    for half in (lambda b, h, i, j: (i >= j) & (j < 40), lambda b, h, i, j: (i >= j) & (j >= 40)):
        mask = create_block_mask(half, None, None, 96, 96, "cpu", BLOCK_SIZE=32)
        parts.append(fa.flex_attention(q, k, v, None, mask, return_lse=True))
    out, _ = fa.merge_states([p[0] for p in parts], [p[1] for p in parts])
    check_against_oracle(out, q, k, v, None, causal)


def test_kernel_options_are_ignored() -> None:
    q, k, v = dense()
    options = {"BLOCK_M": 64, "num_stages": 3, "PRESCALE_QK": True, "BACKEND": "TRITON"}
    plain = fa.flex_attention(q, k, v)
    assert torch.equal(fa.flex_attention(q, k, v, kernel_options=options), plain)


def test_autocast() -> None:
    q, k, v = dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa.flex_attention(q, k, v, rel_bias)
    assert out.dtype == torch.bfloat16
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    assert torch.equal(out, fa.flex_attention(q, k, v, rel_bias))


def test_many_small_problems() -> None:
    q, k, v = dense(batch=500, heads=2, q_len=3, kv_len=5)
    check_against_oracle(fa.flex_attention(q, k, v, rel_bias), q, k, v, rel_bias)
