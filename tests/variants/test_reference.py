"""The eager reference against torch's own attention, and against the formulas of the design."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return"

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flashattn_jit.errors import InputError, ParamError, VariantError
from flashattn_jit.variants import builtins
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from flashattn_jit.variants.variant import Pointwise, Softmax, Variant, cpp, scalar, tensor, variant
from tests.ops.merge_oracle import merge_reference

F64, F8 = torch.float64, torch.float8_e4m3fn


def causal(b, h, q, k):
    return q >= k


def inputs(batch=2, heads=(4, 2), q_len=9, kv_len=9, dim=16, dim_v=16, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(batch, n, s, dim, generator=generator, dtype=F64).to(dtype)
        for n, s in zip(heads, (q_len, kv_len), strict=True)
    )
    v = torch.randn(batch, heads[1], kv_len, dim_v, generator=generator, dtype=F64).to(dtype)
    return q, k, v


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1), (10, 2)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_full_and_causal_equal_sdpa(heads, dims):
    q, k, v = inputs(heads=heads, dim=dims[0], dim_v=dims[1])
    for mod, is_causal in ((None, False), (causal, True)):
        out, _ = attention_reference(q, k, v, mod)
        wanted = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(out, wanted)


# torch warns once in a process, perhaps in a test before this one.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_on_out_and_lse():
    q, k, v = inputs(heads=(4, 4), q_len=128, kv_len=128)
    bias = torch.randn(4, 255, dtype=F64)

    def mod(s, b, h, i, j):
        return 20.0 * torch.tanh(s / 20.0) + bias[h, i - j + 127]

    mask = create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    wanted, aux = flex_attention(
        q, k, v, score_mod=mod, block_mask=mask, return_aux=AuxRequest(lse=True)
    )
    out, lse = attention_reference(q, k, v, variant(score_mod=mod, mask_mod=causal))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse.float(), aux.lse.float(), rtol=1e-5, atol=1e-5)


def test_scale_is_applied_first_and_mask_last():
    q, k, v = inputs()

    def mod(s, b, h, i, j):
        return s * s + 1

    out, lse = attention_reference(q, k, v, variant(score_mod=mod, mask_mod=causal), scale=0.3)
    s = (q @ k.repeat_interleave(2, 1).mT) * 0.3
    s = (s * s + 1).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    torch.testing.assert_close(out, s.softmax(-1) @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, s.logsumexp(-1))


def test_rows_without_keys():
    q, k, v = inputs()
    out, lse = attention_reference(q, k, v, lambda b, h, i, j: i % 2 == 0)
    assert (out[:, :, 1::2] == 0).all() and (lse[:, :, 1::2] == -math.inf).all()
    sunk = variant(mask_mod=lambda b, h, i, j: i % 2 == 0, normalizer=Softmax(sink=0.5))
    out, lse = attention_reference(q, k, v, sunk)
    assert (out[:, :, 1::2] == 0).all() and (lse[:, :, 1::2] == 0.5).all()
    out, lse = attention_reference(q, k[:, :, :0], v[:, :, :0], causal)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_empty_queries_and_batches():
    q, k, v = inputs()
    out, lse = attention_reference(q[:, :, :0], k, v, causal)
    assert out.shape == (2, 4, 0, 16) and lse.shape == (2, 4, 0)
    out, lse = attention_reference(q[:0], k[:0], v[:0], causal)
    assert out.shape == (0, 4, 9, 16) and lse.shape == (0, 4, 9)


def test_sinks_join_the_denominator():
    q, k, v = inputs(heads=(4, 4))
    sink = torch.randn(4, dtype=F64)
    out, lse = attention_reference(q, k, v, variant(normalizer=Softmax(sink=sink)))
    s = q @ k.mT / 4
    column = sink[:, None, None].expand(2, 4, 9, 1)
    torch.testing.assert_close(out, torch.cat([s, column], -1).softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, torch.cat([s, column], -1).logsumexp(-1))


def test_pointwise():
    q, k, v = inputs(heads=(4, 4))
    normalizer = Pointwise(torch.sigmoid, scale=lambda b, h, i: 1 / (i + 1.0))
    out, lse = attention_reference(q, k, v, variant(mask_mod=causal, normalizer=normalizer))
    weights = torch.sigmoid(q @ k.mT / 4).tril() / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(out, weights @ v)
    assert lse is None


def test_nan_past_kv_len_and_in_masked_keys_never_shows():
    q, k, v = inputs()
    lens = torch.tensor([4, 0])
    wanted, wanted_lse = attention_reference(q, k, v, lambda b, h, i, j: j != 2, kv_len=lens)
    k, v = k.clone(), v.clone()
    k[0, :, 4:] = v[0, :, 4:] = math.nan
    k[1] = v[1] = math.nan
    k[0, :, 2] = math.nan
    out, lse = attention_reference(q, k, v, lambda b, h, i, j: j != 2, kv_len=lens)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("offset", [3, torch.tensor([3, 3]), "end"])
def test_positions_start_at_the_offset(offset):
    q, k, v = inputs(q_len=4, kv_len=7)
    out, _ = attention_reference(q, k, v, causal, q_offset=offset)
    mask = torch.ones(4, 7).tril(3).bool()
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, wanted)


def test_the_end_follows_kv_len():
    q, k, v = inputs(q_len=2, kv_len=9)
    out, _ = attention_reference(q, k, v, causal, q_offset="end", kv_len=torch.tensor([5, 9]))
    for b, n in ((0, 5), (1, 9)):
        one, _ = attention_reference(
            q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal, q_offset=n - 2
        )
        torch.testing.assert_close(out[b : b + 1], one)
    with pytest.raises(InputError, match="'end'"):
        attention_reference(q, k, v, causal, q_offset="start")  # type: ignore[arg-type]


def test_packed_equals_each_request_alone():
    q, k, v = inputs(batch=1, q_len=12, kv_len=15)
    q_indptr, kv_indptr = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 6, 8, 15])
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    gate = torch.randn(12, 4, dtype=F64)
    key_gain = torch.rand(15, dtype=F64)

    v_ = variant(
        mask_mod=causal,
        key_mod=lambda x, b, h, j: x * key_gain[builtins.kv_slot(b, j)],
        output_mod=lambda o, lse, b, h, i: o * gate[builtins.q_row(b, i), h],
    )
    out, lse = varlen_reference(*packed, q_indptr, kv_indptr, v_)
    for b in range(3):
        rows, keys = slice(q_indptr[b], q_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        if rows.start == rows.stop:
            continue
        one, one_lse = attention_reference(
            q[:, :, rows], k[:, :, keys] * key_gain[keys, None], v[:, :, keys], causal,
            q_offset="end",
        )  # fmt: skip
        torch.testing.assert_close(out[rows], one[0].transpose(0, 1) * gate[rows, :, None])
        torch.testing.assert_close(lse[rows], one_lse[0].transpose(0, 1))


def test_row_hooks_act_on_rows_before_and_after():
    q, k, v = inputs()
    angles = torch.randn(9, 16, dtype=F64)
    made = variant(
        query_mod=lambda x, b, h, i: x * angles[i] * (h + 1),
        key_mod=lambda x, b, kv_h, j: x.flip(-1) * (kv_h + 1),
        value_mod=lambda x, b, kv_h, j: x + angles[j],
        output_mod=lambda o, lse, b, h, i: o * torch.sigmoid(lse),
    )
    out, lse = attention_reference(q, k, v, made)
    q2 = q * angles * torch.arange(1, 5)[:, None, None]
    k2 = k.flip(-1) * torch.arange(1, 3)[:, None, None]
    wanted, wanted_lse = attention_reference(q2, k2, v + angles)
    torch.testing.assert_close(out, wanted * torch.sigmoid(wanted_lse)[..., None])
    torch.testing.assert_close(lse, wanted_lse)


def test_partial_states_merge_to_the_whole():
    q, k, v = inputs(kv_len=20)
    whole, whole_lse = attention_reference(q, k, v, lambda b, h, i, j: (i + j) % 3 > 0)
    parts = []
    for lo, hi in ((0, 7), (7, 8), (8, 20)):
        mask = lambda b, h, i, j, lo=lo, hi=hi: ((i + j) % 3 > 0) & (j >= lo) & (j < hi)  # noqa: E731
        sunk = variant(mask_mod=mask, normalizer=Softmax(sink=9.0))
        parts.append(attention_reference(q, k, v, sunk, partial=True))
    out, lse = merge_reference([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype):
    q, k, v = inputs(dtype=dtype)
    out, lse = attention_reference(q, k, v, causal, dtype=dtype)
    exact, exact_lse = attention_reference(q, k, v, causal)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert exact.dtype == exact_lse.dtype == F64
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_indices_are_int64_and_wrap_and_clamp():
    q, k, v = inputs(heads=(1, 1), q_len=3, kv_len=3)
    seen = []
    table = torch.tensor([10.0, 20.0], dtype=F64)

    def mod(s, b, h, i, j):
        seen.append((i.dtype, s.dtype))
        return s * 0 + table[i - 1] + table[j + 5]

    _, lse = attention_reference(q, k, v, mod)
    torch.testing.assert_close(lse[0, 0], torch.tensor([40.0, 30.0, 40.0], dtype=F64) + math.log(3))
    assert set(seen) == {(torch.int64, F64)}


def test_half_captures_are_read_as_float32():
    q, k, v = inputs(heads=(2, 2))
    slopes = torch.tensor([0.1, 0.3]).bfloat16()
    seen = []

    def mod(s, b, h, i, j):
        bias = slopes[h] * (j - i)
        seen.append(bias.dtype)
        return s + bias

    attention_reference(q, k, v, mod)
    assert set(seen) == {torch.float32}


def doubled(s, b, h, i, j):
    x = s.half()
    x *= 2
    return s + x


def raised(s, b, h, i, j):
    x = s.bfloat16()
    x.add_(1)
    x.clamp_(max=j)
    return s + x


def filled(s, b, h, i, j):
    x = s.half()
    x[...] += j
    return s + x


def tripled(s, b, h, i, j):
    x = s.to(F8)
    x.mul_(3)
    return s + x.float()


def counted(s, b, h, i, j):
    x = j.clone()
    x += 1
    return s * x


IN_PLACE = {
    doubled: lambda s, b, h, i, j: s + (s.half() * 2).half(),
    raised: lambda s, b, h, i, j: s + (s.bfloat16() + 1).bfloat16().clamp(max=j),
    filled: lambda s, b, h, i, j: s + (s.half() + j).half(),
    tripled: lambda s, b, h, i, j: s + (s.to(F8) * 3).to(F8).float(),
    counted: lambda s, b, h, i, j: s * (j + 1),
}


@pytest.mark.parametrize("default", [torch.float32, F64])
@pytest.mark.parametrize("hook", IN_PLACE)
def test_functions_that_write_to_their_argument_are_called_once(hook, default):
    q, k, v = inputs(dtype=torch.float32)
    wanted = variant(score_mod=IN_PLACE[hook]).reference(q, k, v)
    torch.set_default_dtype(default)
    try:
        found = variant(score_mod=hook).reference(q, k, v)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


NARROW, EDGES = (torch.arange(10) * 3).to(torch.int16), torch.arange(10, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (lambda s, b, h, i, j: s + torch.searchsorted(NARROW, j + 65536),
         lambda s, b, h, i, j: s + torch.searchsorted(NARROW.long(), j + 65536)),
        (lambda s, b, h, i, j: s + torch.bucketize(j - 4, boundaries=EDGES, right=True),
         lambda s, b, h, i, j: s + torch.bucketize(j - 4, EDGES.long(), right=True)),
    ],
)  # fmt: skip
def test_integers_are_searched_in_the_wider_dtype(narrow, wide):
    q, k, v = inputs()
    found, wanted = (variant(score_mod=mod).reference(q, k, v) for mod in (narrow, wide))
    assert torch.equal(found, wanted)


class Capped(Variant):
    cap: float = scalar(5.0)
    slopes: torch.Tensor = tensor("num_q_heads", default=lambda d: torch.ones(d.num_q_heads))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.slopes[h] * (kv_idx - q_idx)


def test_params_of_the_class_form():
    q, k, v = inputs()
    out = Capped().reference(q, k, v, cap=2.0)
    plain = lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0) + (j - i)  # noqa: E731
    wanted, wanted_lse = attention_reference(q, k, v, plain)
    torch.testing.assert_close(out, wanted)
    named = (Capped(cap=2.0).named("x") & variant(mask_mod=causal)).reference(
        q, k, v, x_slopes=torch.zeros(4), return_lse=True
    )
    assert isinstance(named, tuple) and named[1].shape == wanted_lse.shape
    with pytest.raises(ParamError, match="num_q_heads=4"):
        Capped().reference(q, k, v, slopes=torch.ones(3))


def test_cpp_hooks_need_a_reference():
    q, k, v = inputs()
    with pytest.raises(VariantError, match=r"score_mod is C\+\+ text without a reference"):
        variant(score_mod=cpp("score * 2.0f")).reference(q, k, v)
    given = variant(score_mod=cpp("score * 2.0f", reference=lambda s, b, h, i, j: s * 2))
    torch.testing.assert_close(given.reference(q, k, v), attention_reference(q, k, v, scale=0.5)[0])
