"""Calls on the wgmma kernels in the emulator, each with a check of its results.

The planner gets so few workers that a block computes several items. Whatever no request may read is
NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.ops.arguments.calls import KEPT_SIZE, Recent
from flashattn_jit.ops.device import cuda
from flashattn_jit.ops.launching import launches
from flashattn_jit.variants.reference import attention_reference
from tests.batch.batches import Batch
from tests.batch.oracle import Math, check
from tests.batch.runs import engine
from tests.ops.cases import EPS, assert_close, inputs
from tests.registry.case import Shape

TARGET = "emulated:sm_90"
WORKERS = 2
BF16, FP16 = torch.bfloat16, torch.float16

CAUSAL = Math(causal=True)

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Made:
    """A call that can be repeated. check: raises AssertionError for wrong results."""

    run: Callable[[], Results]
    check: Callable[[Results], object]


@pytest.fixture
def few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for `WORKERS` workers, and none of other tests is used."""
    monkeypatch.setattr(cuda, "EMULATED_SLOTS", WORKERS)
    monkeypatch.setattr(launches, "_launches", Recent(KEPT_SIZE))
    monkeypatch.setattr(launches, "_kernels", Recent(64))


def dense(
    variant: Any, shape: Shape, dtype: torch.dtype = BF16, *, broadcast: str = "",
    params: Any = None, pointwise: bool = False, **options: Any,
) -> Made:  # fmt: skip
    """`fa.attention`. broadcast: "k", "v" or "kv": their heads are one, with stride 0."""
    q, k, v = inputs(shape, dtype)
    k, v = (
        t[:, :1].expand(t.shape) if name in broadcast else t for name, t in (("k", k), ("v", v))
    )
    params = params or {}

    def run() -> Results:
        found = fa.attention(
            q, k, v, variant, target=TARGET, return_lse=not pointwise, **options, **params
        )
        return (found,) if pointwise else found

    def holds(results: Results) -> None:
        exact, exact_lse = attention_reference(q, k, v, variant, params=params, **options)
        eager, _ = attention_reference(q, k, v, variant, params=params, dtype=dtype, **options)
        assert_close(results[0], exact, eager)
        if not pointwise:
            tolerance = 16 * EPS[dtype]  # of scores of rows that a hook changed
            torch.testing.assert_close(
                results[1].double(), exact_lse, rtol=tolerance, atol=tolerance
            )

    return Made(run, holds)


def ragged(
    q_len: Sequence[int], kv_len: Sequence[int], heads: tuple[int, int] = (4, 2), dim: int = 64,
    what: Math = CAUSAL, *, dtype: torch.dtype = BF16, workers: int = WORKERS, **more: Any,
) -> Made:  # fmt: skip
    """`fa.BatchAttention` over packed keys, or over pages of more["page_size"].

    Keys of requests without rows are NaN, as are slots without a key and pages of no request.
    """
    batch = Batch(tuple(q_len), tuple(kv_len), heads, dim, dtype, **more)
    for b, rows in enumerate(q_len):
        if rows == 0:
            batch.k[batch.index(b)] = batch.v[batch.index(b)] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "EMULATED_SLOTS", workers)
        made = engine(batch, what.variant(heads[0]), target=TARGET)
        made.plan(batch.q_indptr, batch.storage)
    return Made(
        lambda: made.run(batch.q, batch.k, batch.v, return_lse=True),
        lambda results: check(batch, what, *results),
    )


class ScaledQueries(fa.Variant):
    """A hook that changes queries."""

    gain: Tensor = fa.tensor("num_q_heads")

    def query_mod(self, q, b, h, q_idx):
        return q * self.gain[h]


class SomeRequests(fa.Variant):
    """Requests see all keys or none, which a tensor says, so that no tile is proven empty."""

    sees: Tensor = fa.tensor("batch")

    def mask_mod(self, b, h, q_idx, kv_idx):
        return self.sees[b] > 0.5


def first_request_sees_nothing(b, h, q_idx, kv_idx):
    """A mask whose tiles are proven empty for the first request."""
    return b >= 1


PLAIN = Shape(1, 4, 2, 70, 590, 64, 64)
REQUESTS = {"q_len": (70, 0, 40, 9), "kv_len": (590, 43, 0, 420)}
PAGES = (8, 16, 24, 64, 128, 256)
HEAD_DIMS = ((64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (256, 256), (96, 64), (64, 128),
             (192, 128))  # fmt: skip


def of_dims(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> Made:
    """A causal call with these head dims."""
    return dense(fa.Causal(), Shape(1, 4, 2, 80, 420, head_dim, head_dim_v), dtype, q_offset=340)


CALLS: dict[str, Callable[[], Made]] = {
    "full": lambda: dense(None, PLAIN),
    "causal": lambda: dense(fa.Causal(), PLAIN, q_offset=520),
    "causal fp16": lambda: dense(fa.Causal(), PLAIN, FP16, q_offset=520),
    "q_offset": lambda: dense(fa.Causal(), PLAIN, q_offset=300),
    "one key": lambda: dense(None, PLAIN._replace(kv_len=1)),
    "few rows": lambda: dense(fa.Causal(), PLAIN._replace(q_len=25), q_offset=565),
    "many items": lambda: dense(fa.Causal(), Shape(1, 2, 2, 380, 400, 64, 64), q_offset=20),
    "group 1": lambda: dense(fa.Causal(), Shape(1, 2, 2, 150, 450, 64, 64), q_offset=300),
    "group 3": lambda: dense(fa.Causal(), Shape(1, 6, 2, 60, 450, 64, 64), q_offset=390),
    "group 8": lambda: dense(fa.Causal(), Shape(1, 8, 1, 40, 450, 64, 64), q_offset=410),
    "broadcast": lambda: dense(fa.Causal(), PLAIN, broadcast="kv", q_offset=520),
    "broadcast V": lambda: dense(fa.Causal(), PLAIN, broadcast="v", q_offset=520),
    "proven empty": lambda: dense(first_request_sees_nothing, Shape(2, 4, 2, 50, 420, 64, 64)),
    "unproven empty": lambda: dense(
        SomeRequests(), Shape(2, 4, 2, 50, 420, 64, 64), params={"sees": torch.tensor([0.0, 1.0])}
    ),
    "sliding": lambda: dense(fa.SlidingWindow(100), PLAIN, q_offset=520),
    "turns": lambda: dense(fa.ALiBi(), Shape(1, 2, 2, 380, 590, 64, 64), q_offset=20),
    "turns of a soft cap": lambda: dense(fa.SoftCap(3.0) & fa.Causal(), PLAIN, q_offset=520),
    "negative scale": lambda: dense(None, PLAIN, scale=-0.125),
    "steep": lambda: dense(None, PLAIN, scale=1.5),
    "query_mod": lambda: dense(
        ScaledQueries(), PLAIN, params={"gain": torch.tensor([0.5, 2.0, -1.0, 1.5])}
    ),
    "query_mod, scaled": lambda: dense(
        ScaledQueries(), PLAIN, scale=-0.125,
        params={"gain": torch.tensor([0.5, 2.0, -1.0, 1.5])},
    ),
    "sink": lambda: dense(fa.Sink() & fa.Causal(), PLAIN, q_offset=520,
                          params={"sink": torch.linspace(-2, 2, 4)}),
    "sigmoid": lambda: dense(fa.Sigmoid(), PLAIN, pointwise=True),
    "output_mod": lambda: dense(
        fa.GatedOutput(), PLAIN, params={"gate": inputs(PLAIN, torch.float32, 1)[0]}
    ),
    "partial states": lambda: ragged((60, 3), (2500, 300), (2, 1), workers=8),
    "no keys": lambda: ragged((70, 9, 40), (0, 0, 0)),
    "ragged": lambda: ragged(**REQUESTS),
    "ragged full": lambda: ragged(**REQUESTS, what=Math()),
    "ragged 128": lambda: ragged((70, 0, 40, 9), (600, 43, 0, 430), dim=128),
    **{f"pages of {n}": lambda n=n: ragged(**REQUESTS, page_size=n) for n in PAGES},
    "pages 128": lambda: ragged((70, 0, 40, 9), (600, 43, 0, 430), dim=128, page_size=16),
    "pages heads first": lambda: ragged(**REQUESTS, page_size=16, layout="heads first"),
    "pages mixed": lambda: ragged(**REQUESTS, page_size=32, layout="mixed", dim_v=128),
    **{
        f"head dims {d}, {dv}": lambda d=d, dv=dv, i=i: of_dims(d, dv, (BF16, FP16)[i % 2])
        for i, (d, dv) in enumerate(HEAD_DIMS)
    },
}  # fmt: skip
