"""Captured values whose change is easily missed: signs of zero, lazy views, replaced storage."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference

q = torch.randn(1, 2, 24, 16)
k, v = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)


def check(mod, keys=k, values=v):
    out = fa.attention(q, keys, values, mod)
    expected, _ = attention_reference(q, keys, values, mod)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_sign_of_zero_is_a_value():
    for c in (0.0, -0.0):

        def mod(s, b, h, i, j, c=c):
            return torch.where((1.0 / torch.where(j < 5, c, 1.0)) < 0, s * 3, s)

        check(mod)


def test_lazy_negative_views_are_resolved():
    t = torch.randn(50, dtype=torch.cfloat).conj().imag
    assert t.is_neg()
    check(lambda b, h, i, j: t[j] > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_float32_in_hooks_before_they_are_indexed_too(dtype: torch.dtype) -> None:
    """Products of these tensors overflow or round in half precision."""
    halves = [torch.linspace(0.9, 1.1, 40), torch.full((2,), 3e2), torch.linspace(-1, 1, 16)]
    halves = [x.to(dtype) for x in halves]

    def variants(t, large, weight):
        return [
            fa.variant(mask_mod=lambda b, h, i, j: (t * 3)[j] > 3.025),
            fa.variant(mask_mod=lambda b, h, i, j: (t > 1.0001)[j] | (i >= j)),
            fa.variant(score_mod=lambda s, b, h, i, j: s + (large * large)[h] * 1e-5 * (i - j)),
            fa.variant(output_mod=lambda row, lse, b, h, i: row + torch.exp(0.3 * weight)),
            fa.variant(query_mod=lambda row, b, h, i: row * (weight * weight + 0.1)),
            fa.variant(query_mod=lambda row, b, h, i: row * torch.outer(weight, weight)[3]),
        ]

    pairs = zip(variants(*halves), variants(*[x.float() for x in halves]), strict=True)
    for variant, exact in pairs:
        out = fa.attention(q, k, v, variant)
        assert torch.equal(out, fa.attention(q, k, v, exact))
        expected = [x.reference(q.double(), k.double(), v.double()) for x in (variant, exact)]
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*expected, rtol=1e-6, atol=1e-6)


class Bits(fa.Variant):
    """Reads the bits of a declared tensor, and its dtype."""

    table: torch.Tensor = fa.tensor("kv_len", dtype=(torch.float16, torch.float32))

    def score_mod(self, score, b, h, i, j):
        factor = 0.25 if self.table.dtype == torch.float16 else 0.5
        return score + factor * (self.table[:].view(torch.int16) & 7)[j]


def test_bits_of_halves() -> None:
    table = torch.randn(40).half()
    bits = (table.view(torch.int16) & 7).float()
    out = fa.attention(q, k, v, Bits(), table=table)
    expected = fa.attention(q, k, v, lambda s, b, h, i, j: s + 0.25 * bits[j])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    exact = Bits().reference(q.double(), k.double(), v.double(), table=table)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_kernels_do_not_depend_on_the_default_dtype():
    def mod(s, b, h, i, j):
        return s + j / 7

    expected = fa.attention(q, k, v, mod)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(fa.attention(q, k, v, mod), expected)
    finally:
        torch.set_default_dtype(torch.float32)


ints, flags, width = torch.arange(6000), torch.arange(6000) % 3 == 0, 7
OF_INTEGERS = {
    "a division": lambda s, b, h, i, j: s + 0.3 * (j - i) / 3,
    "a function": lambda s, b, h, i, j: s + torch.sqrt(j) * torch.exp(-torch.abs(j - i)),
    "a condition": lambda s, b, h, i, j: s + torch.where(j > i, 0.1, 0.3) * (j == 3) * 0.7,
    "a limit": lambda s, b, h, i, j: s + torch.clamp(j - i, min=0.3),
    "of captures": lambda s, b, h, i, j: s + (ints / 7)[j] + (flags * 0.3)[i] + torch.sqrt(ints)[j],
    "of a number": lambda s, b, h, i, j: (
        s + torch.log(torch.tensor(width)) * torch.pow(j + 1, -0.5)
    ),
    "a number": lambda s, b, h, i, j: 0.3,
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_floats_of_integers_are_float32_whatever_the_default_dtype(name, default):
    variant = fa.variant(score_mod=OF_INTEGERS[name])
    expected, wanted = fa.attention(q, k, v, variant), variant.reference(q, k, v)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(fa.attention(q, k, v, variant), expected)
        assert torch.equal(variant.reference(q, k, v), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(expected.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_tensor_whose_data_was_replaced():
    whole = torch.zeros(6000, dtype=torch.int64)
    whole[::3] = 1
    t = whole[:1500]
    long_k, long_v = torch.randn(1, 2, 6000, 16), torch.randn(1, 2, 6000, 16)

    def mod(b, h, i, j):
        return t[j] == 1

    check(mod, long_k[:, :, :1500], long_v[:, :, :1500])
    t.data = whole
    check(mod, long_k, long_v)


def test_attributes_named_by_a_string_are_followed():
    class Config:
        window = 3

    config = Config()

    def mod(b, h, i, j):
        return i - j <= getattr(config, "window")  # noqa: B009

    check(mod)
    config.window = 30
    check(mod)


def test_integers_too_large_to_be_exact_are_refused():
    c = 6364136223846793005
    with pytest.raises(fa.ParamError, match="0-dim int64 tensor"):
        fa.attention(q, k, v, lambda b, h, i, j: ((i * 40 + j) * c) >> 33 != 0)


@pytest.mark.parametrize("too_large", [2**63, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("hook", ["mask", "score"])
def test_integers_beyond_64_bits_are_refused_with_both_limits(too_large, hook):
    hooks = {
        "mask": lambda b, h, i, j: i - j < too_large,
        "score": lambda s, b, h, i, j: s + too_large,
    }
    with pytest.raises(fa.ParamError, match=rf"{too_large}; .*2\*\*53, .*2\*\*63 - 1: capture"):
        fa.attention(q, k, v, hooks[hook])


def test_a_prelude_over_a_tensor_whose_data_was_replaced():
    w = torch.randn(2)

    def mod(s, b, h, i, j):
        return s + (w * 2 + torch.sin(w))[h] * j

    check(mod)
    w.data = torch.randn(2) + 5
    check(mod)


@pytest.mark.parametrize("scale", [1e39, -1e300, float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_as_a_float32_is_refused(scale):
    with pytest.raises(fa.InputError, match="float32"):
        fa.attention(q, k, v, scale=scale)
