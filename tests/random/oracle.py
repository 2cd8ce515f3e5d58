"""Attention of one request by its formula, on whole matrices, without code of the package."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.random.meanings import Meaning


class Answer(NamedTuple):
    """out [n, Hq, Dv]; lse [n, Hq]; size [n, Hq, Dv] of the terms that out is a sum of."""

    out: Tensor
    lse: Tensor
    size: Tensor


def answer(
    what: Meaning, b: int, q: Tensor, k: Tensor, v: Tensor, i: Tensor, scale: float | None,
    visited: Tensor | None, partial: bool, dtype: torch.dtype,
) -> Answer:  # fmt: skip
    """q [n, Hq, D] at positions i, k [m, Hkv, D], v [m, Hkv, Dv], visited [1 or Hkv, n, m].

    dtype: float32 and float64 compute in it; float16 and bfloat16 as matrix units do: scores and
    softmax in float32, rows and weights rounded to dtype.
    """
    work = dtype if dtype.itemsize > 2 else torch.float32
    q, k, v = (x.to(work) for x in (q, k, v))
    j = torch.arange(len(k))
    q = what.query(q, b, i).to(dtype).to(work) if what.query else q
    k = what.key(k, b, j).to(dtype).to(work) if what.key else k
    v = what.value(v, b, j).to(dtype).to(work) if what.value else v
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    heads = torch.arange(q.shape[1])[:, None, None]
    s = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if what.score:
        s = what.score(s, b, heads, i[:, None], j)
    keep = torch.ones(s.shape, dtype=torch.bool)
    if what.keep:
        keep = what.keep(b, heads, i[:, None], j).expand(s.shape)
    if visited is not None:
        keep = keep & visited.repeat_interleave(len(heads) // len(visited), 0)
    lse = s.new_full(s.shape[:2], -math.inf)
    if what.pointwise:
        weights = what.pointwise(s).masked_fill(~keep, 0)
        if what.factor:
            weights = weights * what.factor(len(k))
    else:
        s = s.masked_fill(~keep, -math.inf)
        if len(k):
            lse = s.logsumexp(-1)
        if what.sink is not None and not partial:
            lse = torch.logaddexp(lse, what.sink.to(work)[:, None])
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
    lse = lse.T
    weights = weights.to(dtype).to(work)
    out = torch.einsum("hnm,mhd->nhd", weights, v)
    size = torch.einsum("hnm,mhd->nhd", weights.abs(), v.abs())
    if what.output and not partial:
        out, size = what.output(out, lse, b, i), size + 0.25
    return Answer(out if partial else out.to(dtype), lse, size)
