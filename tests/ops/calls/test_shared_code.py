"""Kernels against formulas written out here, where the reference shares code with the kernels.

docs/architecture.md lists what is shared; this file has the checks that no other file has.
"""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return"

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import rms

HQ, HKV, D = 4, 2, 16


def qkv(q_len: int = 9, kv_len: int = 12, heads: int = HQ, batch: int = 2) -> Any:
    return (
        torch.randn(batch, heads, q_len, D),
        torch.randn(batch, heads // 2, kv_len, D),
        torch.randn(batch, heads // 2, kv_len, D),
    )


def plain(q, k, v, score=lambda s: s, keep=None, sink=None) -> torch.Tensor:
    """Attention in fp64. score: of [B, H, Sq, Skv]. sink: broadcastable to [B, H, Sq, 1]."""
    q, k, v = (
        q.double(),
        *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)),
    )
    s = score(q @ k.mT / math.sqrt(q.shape[-1]))
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    top = s if sink is None else torch.cat([s, sink.double().expand(*s.shape[:3], 1)], -1)
    return torch.softmax(top, -1)[..., : s.shape[-1]].nan_to_num() @ v


def close(got: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=5e-6)


# --- composition ----------------------------------------------------------------------------------


DOUBLE = fa.variant(score_mod=lambda s, b, h, i, j: s * 2)
PLUS = fa.variant(score_mod=lambda s, b, h, i, j: s + 0.1 * j)
ODD = fa.variant(mask_mod=lambda b, h, i, j: (i + j) % 2 == 1)
ROW, KEY = torch.arange(9)[:, None], torch.arange(12)

SCORES = {
    "double then plus": (DOUBLE & PLUS, lambda s: 2 * s + 0.1 * KEY),
    "plus then double": (PLUS & DOUBLE, lambda s: 2 * (s + 0.1 * KEY)),
    "nested": (PLUS & (DOUBLE & PLUS), lambda s: 2 * (s + 0.1 * KEY) + 0.1 * KEY),
    "through a mask": (DOUBLE & fa.Full() & PLUS, lambda s: 2 * s + 0.1 * KEY),
}
MASKS = {
    "and": (fa.Causal() & ODD, (KEY <= ROW) & ((ROW + KEY) % 2 == 1)),
    "or": (fa.Causal() | ODD, (KEY <= ROW) | ((ROW + KEY) % 2 == 1)),
    "not": (~fa.Causal(), KEY > ROW),
    "not or": (~(fa.Causal() | ODD), (KEY > ROW) & ((ROW + KEY) % 2 == 0)),
    "or not, and": ((ODD | ~fa.Causal()) & fa.SlidingWindow(5, causal=False),
                    (((ROW + KEY) % 2 == 1) | (KEY > ROW)) & ((ROW - KEY).abs() <= 5)),
    "renamed": (fa.SlidingWindow(2).named("near") | ~fa.SlidingWindow(6).named("far"),
                ((ROW >= KEY) & (ROW - KEY < 2)) | ~((ROW >= KEY) & (ROW - KEY < 6))),
}  # fmt: skip


@pytest.mark.parametrize("name", rotation.chosen(list(SCORES), 2))
def test_scores_chain(name: str) -> None:
    variant, score = SCORES[name]
    q, k, v = qkv()
    close(fa.attention(q, k, v, variant), plain(q, k, v, score))


@pytest.mark.parametrize("name", rotation.chosen(list(MASKS), 2))
def test_masks_combine(name: str) -> None:
    variant, keep = MASKS[name]
    q, k, v = qkv()
    close(fa.attention(q, k, v, variant), plain(q, k, v, keep=keep))


def test_row_hooks_chain_left_to_right() -> None:
    def both(hook):
        args = "row, lse, b, h, i" if hook == "output_mod" else "row, b, h, i"
        twice = eval(f"lambda {args}: row * 2")  # the arity is checked
        turned = eval(f"lambda {args}: row.flip(-1) + 1")
        return fa.variant(**{hook: twice}) & fa.variant(**{hook: turned})

    def expected(x):
        return 2 * x.flip(-1) + 1

    q, k, v = qkv()
    close(fa.attention(q, k, v, both("query_mod")), plain(expected(q), k, v))
    close(fa.attention(q, k, v, both("key_mod")), plain(q, expected(k), v))
    close(fa.attention(q, k, v, both("value_mod")), plain(q, k, expected(v)))
    close(fa.attention(q, k, v, both("output_mod")), expected(plain(q, k, v)))


def test_renamed_params_go_to_their_own_part() -> None:
    q, k, v = qkv()
    both = fa.SoftCap(5.0).named("first") & fa.SoftCap(2.0).named("then")

    def capped(first, then):
        return lambda s: then * torch.tanh(first * torch.tanh(s / first) / then)

    close(fa.attention(q, k, v, both), plain(q, k, v, capped(5.0, 2.0)))
    close(fa.attention(q, k, v, both, then_cap=1.0), plain(q, k, v, capped(5.0, 1.0)))
    close(fa.attention(q, k, v, both, first_cap=1.0), plain(q, k, v, capped(1.0, 2.0)))


# --- normalisers ----------------------------------------------------------------------------------


class NamedSink(fa.Variant):
    level: torch.Tensor = fa.tensor("num_q_heads")
    normalizer = fa.Softmax(sink="level")


PER_HEAD, PER_REQUEST = torch.randn(HQ), torch.randn(2, HQ)
SINKS = {
    "number": (fa.variant(normalizer=fa.Softmax(sink=0.75)), torch.tensor(0.75)),
    "0-dim": (fa.variant(normalizer=fa.Softmax(sink=torch.tensor(-0.5))), torch.tensor(-0.5)),
    "per head": (fa.variant(normalizer=fa.Softmax(sink=PER_HEAD)), PER_HEAD[:, None, None]),
    "per request": (fa.variant(normalizer=fa.Softmax(sink=PER_REQUEST)),
                    PER_REQUEST[:, :, None, None]),
    "named": (NamedSink(level=PER_HEAD), PER_HEAD[:, None, None]),
    "function": (fa.variant(normalizer=fa.Softmax(sink=lambda b, h: PER_HEAD[h] + b)),
                 PER_HEAD[:, None, None] + torch.arange(2)[:, None, None, None]),
    "composed": (fa.Full() & NamedSink(level=PER_HEAD), PER_HEAD[:, None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", rotation.chosen(list(SINKS), 2))
def test_sinks(name: str) -> None:
    variant, sink = SINKS[name]
    q, k, v = qkv()
    out, lse = fa.attention(q, k, v, variant, return_lse=True)
    close(out, plain(q, k, v, sink=sink))
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(D)
    wanted = torch.logaddexp(scores.logsumexp(-1), sink.double().expand(2, HQ, 9, 1)[..., 0])
    close(lse, wanted)


def test_pointwise_scales() -> None:
    q, k, v = qkv()
    s = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(D)
    weights = torch.sigmoid(s).masked_fill(KEY > ROW, 0.0)
    for scale, factor in (
        (None, 1.0), (0.25, 0.25),
        (lambda b, h, i: 1.0 / (i + h + 1.0), 1 / (ROW + torch.arange(HQ)[:, None, None] + 1.0)),
    ):  # fmt: skip
        variant = fa.Causal() & fa.variant(normalizer=fa.Pointwise(torch.sigmoid, scale=scale))
        got = fa.attention(q, k, v, variant)
        close(got, (weights * factor) @ v.double().repeat_interleave(2, 1))


# --- params, their defaults and what they are made of ---------------------------------------------


class Sizes(fa.Variant):
    """Writes the dims that its default was called with into the output."""

    told: torch.Tensor = fa.tensor(
        7, default=lambda d: torch.tensor([d.batch, d.num_q_heads, d.num_kv_heads, d.q_len,
                                           d.kv_len, d.head_dim, d.head_dim_v]).float()
    )  # fmt: skip

    def output_mod(self, row, lse, b, h, q_idx):
        return row * 0 + self.told[q_idx % 7]


def test_defaults_are_made_for_the_dims_of_their_call() -> None:
    """Two rounds: a default that is cached for one call's dims is not used for another's."""
    for q_len, kv_len, heads, batch in 2 * [
        (9, 12, 4, 2),
        (8, 12, 4, 2),
        (9, 7, 2, 1),
        (9, 12, 8, 3),
    ]:
        q, k, v = qkv(q_len, kv_len, heads, batch)
        told = torch.tensor([batch, heads, heads // 2, q_len, kv_len, D, D]).float()
        out = fa.attention(q, k, v, Sizes())
        assert torch.equal(out, told[torch.arange(q_len) % 7, None].expand_as(out))
    q, k = torch.randn(7, 4, D), torch.randn(11, 2, D)
    out = fa.varlen_attention(
        q, k, k, torch.tensor([0, 3, 7]), torch.tensor([0, 9, 11]), Sizes(), q_offset=0
    )
    told = torch.tensor([2.0, 4, 2, 4, 9, D, D])
    assert torch.equal(out, told[[0, 1, 2, 0, 1, 2, 3], None, None].expand_as(out))


class Bias(fa.Variant):
    bias: torch.Tensor = fa.tensor("batch|1", "num_q_heads|1", "kv_len")
    factor: float = fa.scalar(3.0)
    flipped: bool = fa.scalar(False)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        own = self.bias[b, h, kv_idx] * self.factor
        return score - own if self.flipped else score + own


def test_params_given_set_and_by_default() -> None:
    q, k, v = qkv()
    first, second = torch.randn(2, HQ, 12), torch.randn(1, HQ, 12)
    for variant, given, bias, factor in (
        (Bias(), {"bias": first}, first, 3.0),
        (Bias(bias=first), {}, first, 3.0),
        (Bias(bias=first, factor=2.0), {"bias": second}, second, 2.0),
        (Bias(bias=first, factor=2.0), {"factor": 1.0, "bias": first[:1, :1]}, first[:1, :1], 1.0),
        (Bias(flipped=True), {"bias": first[:, :1]}, first[:, :1], -3.0),
        (Bias(), {"bias": first.half()}, first.half(), 3.0),
    ):
        wanted = plain(q, k, v, lambda s, x=bias, f=factor: s + f * x.double()[:, :, None])
        close(fa.attention(q, k, v, variant, **given), wanted)


def test_captures_are_read_at_each_call() -> None:
    q, k, v = qkv()
    table, held = torch.randn(12), {"gain": 1.0}
    variant = fa.variant(score_mod=lambda s, b, h, i, j: s * held["gain"] + table[j])
    for gain in (1.0, -2.0):
        held["gain"] = gain
        table.neg_()
        wanted = plain(q, k, v, lambda s, g=gain: s * g + table.double())
        close(fa.attention(q, k, v, variant), wanted)


# --- lengths and slots in hooks -------------------------------------------------------------------


def test_builtins_are_those_of_the_call() -> None:
    """output_mod writes the builtins of queries into the output, value_mod those of keys."""
    q, k = torch.randn(7, 4, D), torch.randn(11, 2, D)
    indptrs = torch.tensor([0, 3, 7]), torch.tensor([0, 9, 11])

    def written(of):
        return fa.variant(output_mod=lambda row, lse, b, h, i: row * 0 + of(b, i).float())

    rows = torch.arange(7.0)
    for of, wanted in (
        (lambda b, i: fa.q_len(b), torch.tensor([3.0] * 3 + [4.0] * 4)),
        (lambda b, i: fa.kv_len(b), torch.tensor([9.0] * 3 + [2.0] * 4)),
        (fa.q_row, rows),
        (lambda b, i: i, torch.tensor([6.0, 7, 8, -2, -1, 0, 1])),
    ):
        out = fa.varlen_attention(q, k, k, *indptrs, written(of))
        assert torch.equal(out, wanted[:, None, None].expand_as(out))
    slots = fa.variant(
        value_mod=lambda row, b, h, j: row * 0 + fa.kv_slot(b, j).float(),
        mask_mod=lambda b, h, i, j: j == 1,
    )
    out = fa.varlen_attention(q, k, k, *indptrs, slots)
    assert torch.equal(out, torch.tensor([1.0] * 3 + [10.0] * 4)[:, None, None].expand_as(out))
    out = fa.attention(*qkv(), slots)
    assert torch.equal(out, torch.tensor([1.0, 13.0])[:, None, None, None].expand_as(out))


def test_indices_wrap_and_are_clamped() -> None:
    q, k, v = qkv()
    table = torch.randn(5)
    variant = fa.variant(score_mod=lambda s, b, h, i, j: s + table[j - 7])
    at = [max(0, x + 5 if x < 0 else min(x, 4)) for x in range(-7, 5)]
    close(fa.attention(q, k, v, variant), plain(q, k, v, lambda s: s + table.double()[at]))


# --- the criterion --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 70])
def test_the_eager_reference_is_as_exact_as_torchs_sdpa(dtype: torch.dtype, q_len: int) -> None:
    """Kernels may have 1.5 times its error, which is about that of torch's SDPA in each dtype."""
    q, k, v = (x.to(dtype) for x in qkv(q_len, 130))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    wanted = plain(q, k, v)
    eager, _ = attention_reference(q, k, v, dtype=dtype)
    torch_own = F.scaled_dot_product_attention(q, k, v)

    half_ulp = torch.finfo(dtype).eps / 2 * rms(wanted)
    assert rms(eager - wanted) <= 1.5 * rms(torch_own - wanted) + half_ulp


def test_dims_of_the_reference_are_those_of_the_call() -> None:
    q, k, v = qkv(5, 7)
    out, _ = attention_reference(q, k, v, Sizes())
    told = torch.tensor([2.0, HQ, HKV, 5, 7, D, D], dtype=torch.float64)
    assert torch.equal(out, told[:5, None].expand_as(out))
