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


def test_kernels_do_not_depend_on_the_default_dtype():
    def mod(s, b, h, i, j):
        return s + j / 7

    expected = fa.attention(q, k, v, mod)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(fa.attention(q, k, v, mod), expected)
    finally:
        torch.set_default_dtype(torch.float32)


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
