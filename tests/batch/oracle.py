"""The dense model of a batch: attention over it, computed request by request.

`Math` writes a variant a second time, in plain torch on whole matrices: nothing here goes through
hooks, planner or kernels. Of large batches some requests, heads and rows are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.ops.cases import EPS, assert_close, rms

PAIRS = 1_000_000
"""Scores that one check computes at most, about."""

PARTS = 40
"""Requests times kv heads of one check, about; each takes a millisecond or more."""

Seen = Callable[[int, int, Tensor], Tensor]
"""(request, kv head, rows) -> bool [rows, kv_len]: the pairs that a sparsity visits."""


@dataclass(frozen=True, slots=True)
class Math:
    """A variant, and its meaning. window: keys that a row keeps, its own included, causally."""

    causal: bool = False
    window: int = 0
    cap: float = 0.0
    sink: bool = False
    rope: bool = False

    PREFIX: ClassVar[str] = "batch "

    @property
    def name(self) -> str:
        """The name of its kernel: numbers are params of the call, not part of it."""
        parts = {f.name: bool(getattr(self, f.name)) for f in fields(self)}
        return self.PREFIX + "+".join(n for n, wanted in parts.items() if wanted)

    @classmethod
    def named(cls, name: str) -> Math:
        """A variant that needs the kernel of that name."""
        parts = name.removeprefix(cls.PREFIX).split("+")
        return cls(**{part: 20 if part in ("window", "cap") else True for part in parts if part})

    def variant(self, num_q_heads: int, device: str = "cpu") -> fa.Variant | None:
        """The variant for the engine."""
        parts: list[fa.Variant] = []
        if self.rope:
            parts.append(fa.RoPE(max_position=16384))
        if self.cap:
            parts.append(fa.SoftCap(self.cap))
        if self.window:
            parts.append(fa.SlidingWindow(self.window))
        elif self.causal:
            parts.append(fa.Causal())
        if self.sink:
            parts.append(fa.Sink(sink=sinks(num_q_heads).to(device)))
        return reduce(lambda a, b: a & b, parts) if parts else None

    def rotated(self, x: Tensor, at: Tensor) -> Tensor:
        """Rows [n, heads, dim] at positions [n], in x's dtype."""
        if not self.rope:
            return x
        half = x.shape[-1] // 2
        angle = at.double()[:, None, None] * 10000.0 ** -(torch.arange(half).double() / half)
        work = x.dtype if x.dtype.itemsize > 2 else torch.float32
        cos, sin = angle.cos().float().to(work), angle.sin().float().to(work)
        a, b = x.to(work).split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def keep(self, i: Tensor, j: Tensor) -> Tensor:
        """Which keys at j the queries at i see, bool [len(i), len(j)]."""
        ahead = i[:, None] - j
        if self.window:
            return (ahead >= 0) & (ahead < self.window)
        return ahead >= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Tensor, i: Tensor, keep: Tensor,
        num_q_heads: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out [rows, heads, dim_v], lse [rows, heads]) of query heads that share one kv head.

        q [rows, heads, dim] at positions i, k [keys, dim], v [keys, dim_v]; computed in q's dtype,
        scores and weights of half precision in float32, as matrix units do.
        """
        dtype = q.dtype
        work = dtype if dtype.itemsize > 2 else torch.float32
        q = self.rotated(q, i).to(work)
        k = self.rotated(k[:, None], torch.arange(len(k)))[:, 0].to(work)
        s = torch.einsum("rhd,kd->hrk", q, k) * q.shape[-1] ** -0.5
        if self.cap:
            s = self.cap * torch.tanh(s / self.cap)
        s = s.masked_fill(~keep, -math.inf)
        lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:2], -math.inf)
        if self.sink:
            lse = torch.logaddexp(lse, sinks(num_q_heads)[heads].to(lse.dtype)[:, None])
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
        out = torch.einsum("hrk,kd->rhd", weights.to(dtype), v.to(dtype))
        return out, lse.T


def sinks(num_q_heads: int) -> Tensor:
    """A sink for each head."""
    return torch.linspace(-2, 2, num_q_heads)


def sampled(batch: Batch, seed: int = 0) -> Iterator[tuple[int, int, Tensor]]:
    """(request, kv head, rows) to check: all where that is cheap, else as many as `PAIRS` allows.

    The longest request, the first and the last are always among them, with their first and last
    rows.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = [b for b, n in enumerate(batch.q_len) if n]
    if not requests:
        return
    whole = sum(batch.q_len[b] * batch.kv_len[b] for b in requests) * batch.heads[0]
    parts = len(requests) * batch.heads[1]
    if whole <= PAIRS and parts <= PARTS:
        for b in requests:
            for h in range(batch.heads[1]):
                yield b, h, torch.arange(batch.q_len[b])
        return
    longest = max(requests, key=lambda b: batch.q_len[b] * batch.kv_len[b])
    some = torch.randperm(len(requests), generator=generator)[:5].tolist()
    chosen = dict.fromkeys([longest, requests[0], requests[-1], *(requests[i] for i in some)])
    for b in chosen:
        heads = torch.randperm(batch.heads[1], generator=generator)[:2].tolist()
        budget = PAIRS // (len(chosen) * len(heads) * (batch.heads[0] // batch.heads[1]))
        room = max(8, budget // max(batch.kv_len[b], 1))
        for h in heads:
            rows = torch.arange(batch.q_len[b])
            if len(rows) > room:
                middle = torch.randperm(len(rows), generator=generator)[: room - 4]
                rows = torch.cat([rows[:2], middle, rows[-2:]]).unique()
            yield b, h, rows


class Errors(NamedTuple):
    """RMS errors against fp64 of the checked rows: ours, and the eager reference's."""

    ours: float
    eager: float


def check(
    batch: Batch,
    what: Math,
    out: Tensor,
    lse: Tensor | None,
    *,
    q_offset: Sequence[int] | None = None,
    seen: Seen | None = None,
    keys: Callable[[int], tuple[Tensor, Tensor]] | None = None,
) -> Errors:
    """Holds a result to the bound of docs/semantics.md; returns the errors of what was checked.

    out [Nq, Hq, Dv], lse [Nq, Hq]. q_offset: position of each request's first row, "end" by
    default. keys: dense (k, v) of a request, those of the batch by default.
    """
    out = out.cpu()
    assert out.shape == (sum(batch.q_len), batch.heads[0], batch.dim_v) and out.dtype == batch.dtype
    assert torch.isfinite(out).all(), "NaN or infinity came out"
    found: list[list[Tensor]] = [[], [], [], [], []]
    for b, h, rows in sampled(batch):
        parts = _one(batch, what, b, h, rows, q_offset, seen, keys)
        at, heads = batch.q_start[b] + rows, _heads(batch, h)
        got = out[at][:, heads], None if lse is None else lse.cpu()[at][:, heads]
        for kept, part in zip(found, (*parts[:2], got[0], parts[2], got[1]), strict=True):
            if part is not None:
                kept.append(part.reshape(-1, part.shape[-1]) if part.dim() == 3 else part.flatten())
    if not found[0]:
        return Errors(0.0, 0.0)
    exact, eager, ours, exact_lse = (torch.cat(x) for x in found[:4])
    assert_close(ours, exact, eager)
    if found[4]:
        tolerance = 16 * EPS[batch.dtype] if what.rope else 2e-5
        torch.testing.assert_close(
            torch.cat(found[4]).double(), exact_lse, rtol=tolerance, atol=tolerance
        )
    return Errors(rms(ours.double() - exact), rms(eager.double() - exact))


def _heads(batch: Batch, h: int) -> Tensor:
    group = batch.heads[0] // batch.heads[1]
    return torch.arange(h * group, (h + 1) * group)


def _one(
    batch: Batch, what: Math, b: int, h: int, rows: Tensor, q_offset: Sequence[int] | None,
    seen: Seen | None, keys: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out in fp64, out in the batch's dtype, lse in fp64) of some rows of one kv head."""
    k, v = (keys or batch.keys)(b)
    k, v = k[:, h].cpu(), v[:, h].cpu()
    q = batch.q[batch.q_start[b] + rows.to(batch.q.device)][:, _heads(batch, h)].cpu()
    offset = batch.kv_len[b] - batch.q_len[b] if q_offset is None else q_offset[b]
    i, j = rows + offset, torch.arange(len(k))
    keep = what.keep(i, j)
    if seen is not None:
        keep = keep & seen(b, h, rows)
    heads = _heads(batch, h)
    exact, lse = what.attend(q.double(), k.double(), v.double(), heads, i, keep, batch.heads[0])
    eager, _ = what.attend(q, k, v, heads, i, keep, batch.heads[0])
    return exact, eager.to(batch.dtype), lse
