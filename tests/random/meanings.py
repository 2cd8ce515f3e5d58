"""Variants, each written twice: with hooks, and in plain torch on whole matrices.

Shapes in a `Meaning`: rows of q [n, Hq, D] at positions i [n], rows of k and v [m, Hkv, D] at
positions j [m], scores [Hq, n, m] with h [Hq, 1, 1] and i [n, 1]; b is a number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a variant's tensors. positions: above every position of a query or key."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    dim: int
    dim_v: int
    positions: int


@dataclass(frozen=True)
class Meaning:
    """What a variant computes. factor: scales pointwise weights, given the number of keys."""

    query: Callable[..., Tensor] | None = None
    key: Callable[..., Tensor] | None = None
    value: Callable[..., Tensor] | None = None
    score: Callable[..., Tensor] | None = None
    keep: Callable[..., Tensor] | None = None
    sink: Tensor | None = None
    pointwise: Callable[[Tensor], Tensor] | None = None
    factor: Callable[[int], float] | None = None
    output: Callable[..., Tensor] | None = None

    def then(self, other: Meaning) -> Meaning:
        """This meaning, then `other`: the order in which rows and scores are changed."""
        joint: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            a, b = getattr(self, name), getattr(other, name)
            both = a is not None and b is not None
            joint[name] = _JOIN[name](a, b) if both else b if a is None else a
        return Meaning(**joint)


def _chain(a: Callable[..., Tensor], b: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *where: b(a(x, *where), *where)


def _and(a: Callable[..., Tensor], b: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *where: a(*where) & b(*where)


_JOIN = dict.fromkeys(("query", "key", "value", "score", "output"), _chain) | {"keep": _and}

Part = tuple[Any, Meaning]


def at(table: Tensor, index: Tensor) -> Tensor:
    """A table at indices along its last dim: negative ones wrap, others are clamped."""
    size = table.shape[-1]
    return table[..., torch.where(index < 0, index + size, index).clamp(0, size - 1).long()]


# --- masks ------------------------------------------------------------------------------------


def full(s: Sizes, r: random.Random) -> Part:
    return fa.Full(), Meaning()


def causal(s: Sizes, r: random.Random) -> Part:
    return fa.Causal(), Meaning(keep=lambda b, h, i, j: j <= i)


def window(s: Sizes, r: random.Random) -> Part:
    n = r.choice((1, 2, 16, 50, 97))
    return fa.SlidingWindow(n), Meaning(keep=lambda b, h, i, j: (j <= i) & (j > i - n))


def band(s: Sizes, r: random.Random) -> Part:
    n = r.choice((0, 3, 20, 64))
    return fa.SlidingWindow(n, causal=False), Meaning(keep=lambda b, h, i, j: (i - j).abs() <= n)


def documents(s: Sizes, r: random.Random) -> Part:
    ids = torch.tensor([[r.randrange(3) for _ in range(s.positions)] for _ in range(s.batch)])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[b, q_idx] == ids[b, kv_idx]

    return fa.variant(mask_mod=mask_mod), Meaning(
        keep=lambda b, h, i, j: at(ids[b], i) == at(ids[b], j)
    )


def dilated(s: Sizes, r: random.Random) -> Part:
    step, first = r.choice((2, 3, 7)), r.choice((0, 4))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((q_idx - kv_idx) % step == 0) | (kv_idx < first)

    return fa.variant(mask_mod=mask_mod), Meaning(
        keep=lambda b, h, i, j: (torch.remainder(i - j, step) == 0) | (j < first)
    )


def prefix(s: Sizes, r: random.Random) -> Part:
    lens = torch.tensor([r.randrange(0, 60) for _ in range(s.batch)])
    return fa.PrefixLM(prefix_len=lens), Meaning(
        keep=lambda b, h, i, j: (j <= i) | (j < int(lens[b]))
    )


def heads_limit(s: Sizes, r: random.Random) -> Part:
    limit = torch.tensor([r.randrange(0, 120) for _ in range(s.num_q_heads)])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < limit[h]

    return fa.variant(mask_mod=mask_mod), Meaning(keep=lambda b, h, i, j: j < limit[h])


def lengths(s: Sizes, r: random.Random) -> Part:
    left = r.choice((0, 1, 9))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < fa.kv_len(b) - left

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.01 * (fa.kv_len(b) - kv_idx)

    return fa.variant(score_mod=score_mod, mask_mod=mask_mod), Meaning(
        score=lambda x, b, h, i, j: x - 0.01 * (j.numel() - j).to(x.dtype),
        keep=lambda b, h, i, j: (j < j.numel() - left) & (i == i),
    )


# --- scores -----------------------------------------------------------------------------------


def softcap(s: Sizes, r: random.Random) -> Part:
    cap = r.choice((1.5, 5.0, 30.0))
    return fa.SoftCap(cap), Meaning(score=lambda x, b, h, i, j: cap * torch.tanh(x / cap))


def softcap_approx(s: Sizes, r: random.Random) -> Part:
    cap = r.choice((1.5, 5.0, 30.0))
    variant = fa.SoftCap(cap, approximate=True)
    return variant, Meaning(score=lambda x, b, h, i, j: cap * fa.tanh_approx(x / cap))


def alibi(s: Sizes, r: random.Random) -> Part:
    slopes = torch.tensor([r.uniform(0.005, 0.1) for _ in range(s.num_q_heads)])
    return fa.ALiBi(slopes=slopes, symmetric=True), Meaning(
        score=lambda x, b, h, i, j: x - slopes[h].to(x.dtype) * (i - j).abs()
    )


def table(s: Sizes, r: random.Random) -> Part:
    reach = r.choice((5, 31))
    bias = torch.randn(s.num_q_heads, 2 * reach + 1, generator=_generator(r))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, torch.clamp(kv_idx - q_idx, -reach, reach) + reach]

    return fa.variant(score_mod=score_mod), Meaning(
        score=lambda x, b, h, i, j: (
            x + bias[:, ((j - i).clamp(-reach, reach) + reach).long()].to(x.dtype)
        )
    )


def requests(s: Sizes, r: random.Random) -> Part:
    bias = torch.randn(s.batch, s.positions, generator=_generator(r))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b, kv_idx]

    return fa.variant(score_mod=score_mod), Meaning(
        score=lambda x, b, h, i, j: x + at(bias[b], j).to(x.dtype)
    )


def parity(s: Sizes, r: random.Random) -> Part:
    rate = torch.tensor([r.uniform(0.5, 2) for _ in range(s.num_q_heads)])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx + kv_idx) % 2 == 0, torch.tanh(score) * rate[h], score)

    return fa.variant(score_mod=score_mod), Meaning(
        score=lambda x, b, h, i, j: torch.where(
            torch.remainder(i + j, 2) == 0, torch.tanh(x) * rate[h].to(x.dtype), x
        )
    )


# --- rows -------------------------------------------------------------------------------------


def gains(s: Sizes, r: random.Random) -> Part:
    q_gain = 1 + 0.3 * torch.randn(s.dim, generator=_generator(r))
    k_gain = 1 + 0.3 * torch.randn(s.num_kv_heads, s.dim, generator=_generator(r))
    return fa.variant(
        query_mod=lambda row, b, h, q_idx: row * q_gain,
        key_mod=lambda row, b, kv_h, kv_idx: row * k_gain[kv_h],
    ), Meaning(
        query=lambda x, b, i: x * q_gain.to(x.dtype), key=lambda x, b, j: x * k_gain.to(x.dtype)
    )


def slots(s: Sizes, r: random.Random) -> Part:
    k_scale = torch.rand(s.positions, generator=_generator(r)) + 0.5
    v_scale = torch.rand(s.num_kv_heads, s.positions, generator=_generator(r)) + 0.5
    return fa.variant(
        key_mod=lambda row, b, kv_h, kv_idx: row * k_scale[kv_idx],
        value_mod=lambda row, b, kv_h, kv_idx: row * v_scale[kv_h, kv_idx],
    ), Meaning(
        key=lambda x, b, j: x * at(k_scale, j).to(x.dtype)[:, None, None],
        value=lambda x, b, j: x * at(v_scale, j).T.to(x.dtype)[..., None],
    )


def gate(s: Sizes, r: random.Random) -> Part:
    g = torch.rand(s.num_q_heads, generator=_generator(r)) + 0.5

    def output_mod(row: Any, lse: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return row * g[h] + 0.25

    return fa.variant(output_mod=output_mod), Meaning(
        output=lambda x, lse, b, i: x * g.to(x.dtype)[:, None] + 0.25
    )


def confident(s: Sizes, r: random.Random) -> Part:
    def output_mod(row: Any, lse: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return row * torch.sigmoid(lse - 3.0)

    return fa.variant(output_mod=output_mod), Meaning(
        output=lambda x, lse, b, i: x * torch.sigmoid(lse - 3.0).to(x.dtype)[..., None]
    )


def rope(s: Sizes, r: random.Random) -> Part:
    half = s.dim // 2

    def turned(x: Tensor, b: int, positions: Tensor) -> Tensor:
        rates = 10000.0 ** -(torch.arange(half).double() / half)
        angle = positions.double()[:, None, None] * rates
        cos, sin = (t.float().to(x.dtype) for t in (angle.cos(), angle.sin()))
        a, c = x.split(half, -1)
        return torch.cat([a * cos - c * sin, c * cos + a * sin], -1)

    return fa.RoPE(max_position=8192), Meaning(query=turned, key=turned)


# --- normalisers ------------------------------------------------------------------------------


def sink(s: Sizes, r: random.Random) -> Part:
    values = torch.tensor([r.uniform(-3, 3) for _ in range(s.num_q_heads)])
    return fa.Sink(sink=values), Meaning(sink=values)


def sigmoid(s: Sizes, r: random.Random) -> Part:
    bias = r.uniform(-4, 0)
    return fa.Sigmoid(bias=bias), Meaning(
        score=lambda x, b, h, i, j: x + bias, pointwise=torch.sigmoid
    )


def squared(s: Sizes, r: random.Random) -> Part:
    return fa.ReluSquared(), Meaning(
        pointwise=lambda x: torch.relu(x) ** 2, factor=lambda keys: 1 / max(keys, 1)
    )


def _generator(r: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.randrange(2**31))


POINTWISE = {sigmoid, squared}
READS_REQUEST = {documents, prefix, requests, lengths}

VARIANTS: tuple[tuple[Callable[[Sizes, random.Random], Part], ...], ...] = (
    (full,), (causal,), (window,), (band,), (softcap, causal), (alibi,), (alibi, window),
    (causal, sink), (sigmoid,), (sigmoid, causal), (squared, band), (table,), (documents, causal),
    (gains,), (gains, heads_limit), (slots, causal), (gate,), (confident, window), (rope, causal),
    (dilated,), (requests,), (prefix,), (parity, window), (lengths,), (softcap, gate, sink),
    (table, documents), (slots, table, sink, causal), (parity, dilated), (rope, softcap, window),
    (squared, gate), (requests, sink), (heads_limit, alibi), (softcap_approx, window),
)  # fmt: skip


def composed(parts: tuple[Callable[..., Part], ...], s: Sizes, r: random.Random) -> Part:
    """The variant composed of all parts, and its meaning."""
    made = [part(s, r) for part in parts]
    return (
        reduce(lambda a, b: a & b, (v for v, _ in made)),
        reduce(lambda a, b: a.then(b), (m for _, m in made)),
    )
