"""Sinks and pointwise normalisers of the library against sums written out."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_jit.variants.library as lib
from flashattn_jit.errors import ParamError, VariantError
from flashattn_jit.variants.reference import attention_reference
from tests.variants.library.library_tools import bound, normal, weights


def scores(q_len: int = 7, kv_len: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and their scores."""
    q, k = normal(1, 2, 4, q_len, 8), normal(2, 2, 2, kv_len, 8)
    return q, k, q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)


def test_sink_is_a_column_of_the_softmax_that_is_dropped() -> None:
    """As gpt-oss computes it: concatenate the sink, take the softmax, drop the column."""
    q, k, s = scores()
    sink = normal(3, 4)
    column = sink.view(1, 4, 1, 1).expand(2, 4, 7, 1)
    expected = torch.softmax(torch.cat((s, column), -1), -1)[..., :-1]
    torch.testing.assert_close(weights(lib.Sink(), q, k, sink=sink), expected)
    torch.testing.assert_close(weights(lib.Sink(sink), q, k), expected)


def test_sink_joins_lse_and_rows_without_keys() -> None:
    q, k, s = scores()
    sink = normal(3, 4)
    v = normal(4, 2, 2, 13, 5)
    variant = lib.Sink() & lib.SlidingWindow(2)
    out, lse = attention_reference(q, k, v, variant, params={"sink": sink}, q_offset=10)
    i, j = torch.arange(7)[:, None] + 10, torch.arange(13)
    kept = torch.where((j <= i) & (i - j < 2), s, -math.inf)
    total = kept.exp().sum(-1) + sink.exp().view(1, 4, 1)
    assert lse is not None
    torch.testing.assert_close(lse, total.log())
    assert (out[:, :, 5:] == 0).all()  # rows 15 and on see nothing
    torch.testing.assert_close(lse[:, :, 5:], sink.view(1, 4, 1).expand(2, 4, 2))


def test_softmax_off_by_one() -> None:
    q, k, s = scores()
    expected = s.exp() / (1 + s.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(weights(lib.SoftmaxOffByOne(), q, k), expected)


def test_sigmoid_has_a_bias_of_minus_log_of_the_keys() -> None:
    q, k, s = scores()
    expected = 1 / (1 + torch.exp(-(s - math.log(13))))
    torch.testing.assert_close(weights(lib.Sigmoid(), q, k), expected, rtol=1e-6, atol=1e-8)
    expected = torch.sigmoid(s - 2.5)
    torch.testing.assert_close(weights(lib.Sigmoid(bias=-2.5), q, k), expected)
    assert bound(lib.Sigmoid(bias=-1.0)).ir == bound(lib.Sigmoid(bias=-7.0)).ir


def test_sigmoid_counts_the_keys_of_each_request() -> None:
    q, k, s = scores()
    kv_len = torch.tensor([13, 4])
    v = normal(4, 2, 2, 13, 5)
    out, lse = attention_reference(q, k, v, lib.Sigmoid(), kv_len=kv_len)
    assert lse is None
    w = torch.sigmoid(s[1, :, :, :4] - math.log(4))
    torch.testing.assert_close(
        out[1], w @ v[1, :, :4].repeat_interleave(2, 0), rtol=1e-6, atol=1e-8
    )


def test_relu_squared_divides_by_the_keys() -> None:
    q, k, s = scores()
    torch.testing.assert_close(weights(lib.ReluSquared(), q, k), s.clamp(min=0) ** 2 / 13)


@pytest.mark.parametrize("make", [lib.Sigmoid, lib.ReluSquared])
def test_pointwise_rows_and_requests_without_keys_are_zero(make: type) -> None:
    q, k, _ = scores()
    v = normal(4, 2, 2, 13, 5)
    masked, _ = attention_reference(q, k, v, make() & lib.SlidingWindow(2), q_offset=100)
    assert (masked == 0).all()
    empty, _ = attention_reference(q, k[:, :, :0], v[:, :, :0], make())
    assert empty.shape == (2, 4, 7, 5) and (empty == 0).all()


def test_masked_pairs_add_nothing_to_pointwise_sums() -> None:
    q, k, s = scores()
    i, j = torch.arange(7)[:, None] + 6, torch.arange(13)
    expected = torch.where(j <= i, torch.sigmoid(s - math.log(13)), 0.0)
    got = weights(lib.Causal() & lib.Sigmoid(), q, k, "end")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def test_a_variant_has_one_normalizer() -> None:
    with pytest.raises(VariantError, match="normalizer"):
        lib.Sink() & lib.Sigmoid()


@pytest.mark.parametrize("params", [{}, {"sink": torch.zeros(3)}, {"sink": 0.0}])
def test_wrong_sinks_are_errors(params: dict[str, object]) -> None:
    with pytest.raises(ParamError):
        bound(lib.Sink(), num_q_heads=2, **params)
