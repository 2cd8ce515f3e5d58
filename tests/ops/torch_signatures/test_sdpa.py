"""`fa.scaled_dot_product_attention` computes what torch's function does."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

import flashattn_jit as fa
from tests.ops.torch_signatures.flex_oracle import assert_close, randn

D = 32


def check(q, k, v, **arguments) -> torch.Tensor:
    """Ours against torch's in fp64; the error may be a multiple of torch's in the same dtype."""
    ours = fa.scaled_dot_product_attention(q, k, v, **arguments)
    mask = arguments.get("attn_mask")
    exact = dict(arguments)
    if mask is not None and mask.dtype != torch.bool:
        exact["attn_mask"] = mask.double()
    gold = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **exact)
    theirs = F.scaled_dot_product_attention(q, k, v, **arguments)
    assert ours.dtype == q.dtype
    gold, theirs = gold.nan_to_num(), theirs.nan_to_num()
    assert_close(ours, gold, theirs)
    return ours


def test_arguments_are_those_of_torch() -> None:
    names = list(inspect.signature(fa.scaled_dot_product_attention).parameters)
    assert names == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_and_causal(dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = (randn(2, 4, 100, D, dtype=dtype) for _ in range(3))
    check(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 70), (37, 100), (100, 37), (64, 64)])
def test_causal_is_aligned_to_the_upper_left(q_len: int, kv_len: int) -> None:
    q, k, v = randn(2, 4, q_len, D), randn(2, 4, kv_len, D), randn(2, 4, kv_len, D)
    check(q, k, v, is_causal=True)


MASKS = [(70, 90), (1, 70, 90), (4, 70, 90), (2, 1, 70, 90), (2, 4, 70, 90), (2, 1, 1, 90),
         (1, 1, 70, 1), (2, 4, 1, 1)]  # fmt: skip


@pytest.mark.parametrize("sizes", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_every_broadcastable_shape(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = randn(2, 4, 70, D), randn(2, 4, 90, D), randn(2, 4, 90, D)
    mask = torch.rand(sizes) < 0.7 if dtype == torch.bool else torch.randn(sizes)
    check(q, k, v, attn_mask=mask)


def test_expanded_and_strided_masks() -> None:
    q, k, v = randn(2, 4, 70, D), randn(2, 4, 90, D), randn(2, 4, 90, D)
    keep = torch.rand(2, 1, 1, 90) < 0.7
    check(q, k, v, attn_mask=keep.expand(2, 4, 70, 90))
    check(q, k, v, attn_mask=torch.randn(90, 70).t())
    check(q, k, v, attn_mask=torch.randn(2, 4, 140, 180)[:, :, ::2, ::2])


def test_infinite_entries_mask_and_empty_rows_are_zero() -> None:
    q, k, v = randn(2, 4, 70, D), randn(2, 4, 90, D), randn(2, 4, 90, D)
    keep = torch.rand(70, 90) < 0.5
    keep[13] = False
    additive = torch.zeros(70, 90).masked_fill(~keep, float("-inf"))
    for mask in (keep, additive):
        out = fa.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert (out[:, :, 13] == 0).all()
        rows = torch.arange(70) != 13
        gold = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(out[:, :, rows], gold[:, :, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masks(dtype: torch.dtype) -> None:
    q, k, v = (randn(2, 4, 100, D, dtype=dtype) for _ in range(3))
    check(q, k, v, attn_mask=randn(100, 100, dtype=dtype))
    check(q, k, v, attn_mask=torch.rand(2, 1, 100, 100) < 0.6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("q_len", [1, 60])
def test_grouped_heads(kv_heads: int, q_len: int) -> None:
    q, k, v = randn(2, 4, q_len, D), randn(2, kv_heads, 90, D), randn(2, kv_heads, 90, D)
    check(q, k, v, enable_gqa=True)
    check(q, k, v, enable_gqa=True, attn_mask=torch.rand(2, 4, q_len, 90) < 0.7)


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (3, 2, 4), (2, 3, 2, 4)], ids=str)
def test_any_number_of_leading_dims(lead: tuple[int, ...]) -> None:
    q, k, v = randn(*lead, 70, D), randn(*lead, 90, D), randn(*lead, 90, D)
    assert check(q, k, v).shape == (*lead, 70, D)
    check(q, k, v, attn_mask=torch.rand(*lead, 70, 90) < 0.7)
    check(q, k, v, attn_mask=torch.randn(70, 90))
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("q_lead", "kv_lead"),
    [((2, 4), (1, 4)), ((2, 4), (2, 1)), ((2, 1), (2, 4)), ((3, 2, 4), (1, 2, 4)), ((2, 4), (4,)),
     ((1, 4), (3, 4))],
    ids=str,
)  # fmt: skip
def test_leading_dims_are_broadcast(q_lead, kv_lead) -> None:
    q, k, v = randn(*q_lead, 70, D), randn(*kv_lead, 90, D), randn(*kv_lead, 90, D)
    ours = fa.scaled_dot_product_attention(q, k, v)
    lead = torch.broadcast_shapes(q_lead, kv_lead)
    gold = F.scaled_dot_product_attention(
        *(t.double().expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    )
    assert ours.shape == gold.shape
    torch.testing.assert_close(ours.double(), gold, rtol=1e-5, atol=1e-5)


def test_scale_and_value_head_dim() -> None:
    q, k, v = randn(2, 4, 70, D), randn(2, 4, 90, D), randn(2, 4, 90, 32)
    assert check(q, k, v, scale=0.4).shape == (2, 4, 70, 32)


def test_strided_inputs() -> None:
    q, k, v = (randn(2, 70, 4, D).transpose(1, 2) for _ in range(3))
    check(q, k, v)
    q, k, v = (randn(2, 4, D, 70).transpose(2, 3) for _ in range(3))
    check(q, k, v)
    packed = randn(2, 70, 4, 3 * D).transpose(1, 2)
    check(*packed.split(D, dim=-1), is_causal=True)


def test_empty_problems() -> None:
    for q_len, kv_len in ((0, 9), (9, 0), (0, 0)):
        q, k, v = randn(2, 4, q_len, D), randn(2, 4, kv_len, D), randn(2, 4, kv_len, D)
        out = fa.scaled_dot_product_attention(q, k, v)
        assert out.shape == (2, 4, q_len, D)
        assert (out == 0).all()


def test_autocast() -> None:
    q, k, v = (randn(2, 4, 100, D) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16


def test_a_module_uses_it_in_place_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.TransformerEncoderLayer's attention through ours."""
    layer = torch.nn.MultiheadAttention(4 * D, 4, batch_first=True).eval()
    x = randn(2, 70, 4 * D)
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        expected, _ = layer(x, x, x, need_weights=False)
        monkeypatch.setattr(F, "scaled_dot_product_attention", fa.scaled_dot_product_attention)
        out, _ = layer(x, x, x, need_weights=False)
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# --- refusals ------------------------------------------------------------------------------------


def test_refusals() -> None:
    q, k, v = (randn(2, 4, 70, D) for _ in range(3))
    run = fa.scaled_dot_product_attention
    keep = torch.ones(70, 70, dtype=torch.bool)
    with pytest.raises(fa.InputError, match=r"dropout_p=0\.1"):
        run(q, k, v, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        run(q, k, v, keep, is_causal=True)
    with pytest.raises(fa.InputError, match="cannot be broadcast"):
        run(q, k, v, torch.ones(69, 70, dtype=torch.bool))
    with pytest.raises(fa.InputError, match="cannot be broadcast"):
        run(q, k, v, torch.ones(1, 2, 4, 70, 70, dtype=torch.bool))
    with pytest.raises(fa.InputError, match="must be bool"):
        run(q, k, v, keep.int())
    with pytest.raises(fa.InputError, match="same dtype"):
        run(q, k.half(), v)
    with pytest.raises(fa.InputError, match="enable_gqa=True"):
        run(q, k[:, :2], v[:, :2])
    with pytest.raises(fa.InputError, match="divide num_q_heads"):
        run(q, k[:, :3], v[:, :3], enable_gqa=True)
    with pytest.raises(fa.InputError, match="batch dims"):
        run(randn(3, 4, 70, D), k, v)
    with pytest.raises(fa.InputError, match="at least 2 dims"):
        run(q[0, 0, 0], k, v)
    with pytest.raises(fa.InputError, match="kv_len"):
        run(q, k, v[:, :, :60])
    with pytest.raises(fa.GradError):
        run(q.requires_grad_(), k, v)
