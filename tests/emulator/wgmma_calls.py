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
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import Batch, indptr
from tests.batch.oracle import Math, check
from tests.batch.runs import engine
from tests.ops.cases import EPS, assert_close, inputs, normal
from tests.ops.quantised.storage import rows_of
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


Format = fa.kv.Format | None
INT8, E4M3, INT4 = fa.kv.Format("int8"), fa.kv.Format("e4m3"), fa.kv.Format("int4", group=32)


def poison(stored: Any, at: Tensor) -> None:
    """Makes these slots of [slots, ...] NaN: codes that are NaN in e4m3, and their numbers."""
    if isinstance(stored, Tensor):
        stored[at] = torch.nan
        return
    stored.codes.view(torch.uint8)[at] = 0x7F
    for numbers in (stored.scales, stored.zeros):
        if numbers is not None and numbers.shape[0] == stored.codes.shape[0]:
            numbers[at] = torch.nan


def stored(
    q_len: Sequence[int], kv_len: Sequence[int], formats: tuple[Format, Format],
    what: Any = CAUSAL, heads: tuple[int, int] = (4, 2), dim: int = 64, *, dim_v: int = 0,
    page_size: int = 0, dtype: torch.dtype = BF16, workers: int = WORKERS, params: Any = None,
) -> Made:  # fmt: skip
    """`fa.BatchAttention` over keys and values in these formats, None: in dtype.

    Rows are packed, or in pages in any order. Keys of requests without rows, slots without a key
    and pages of no request are NaN.
    """
    variant = what.variant(heads[0]) if isinstance(what, Math) else what
    size, total = max(page_size, 1), sum(kv_len)
    pages = [-(-n // size) for n in kv_len]
    order = torch.randperm(sum(pages) + 2 * bool(page_size), generator=torch.manual_seed(1))
    used = order[: sum(pages)] if page_size else torch.arange(total)
    own = [
        (p[:, None] * size + torch.arange(size)).flatten()[:n]
        for p, n in zip(used.split(pages), kv_len, strict=True)
    ]
    slots = torch.cat(own)
    read = torch.cat([at for at, n in zip(own, q_len, strict=True) if n])
    unread = torch.ones(len(order) * size, dtype=torch.bool)
    unread[read] = False
    sides: list[Any] = []
    for i, (kv_format, d) in enumerate(zip(formats, (dim, dim_v or dim), strict=True)):
        rows = normal(i, len(order) * size, heads[1], d)
        side = kv_format.quantize(rows) if kv_format else rows.to(dtype)
        poison(side, unread)
        sides.append(side)
    q = normal(2, sum(q_len), heads[0], dim).to(dtype)
    if page_size:
        last = torch.tensor([(n - 1) % size + 1 if n else 0 for n in kv_len])
        storage: Any = fa.Paged(indptr(pages), used.int(), last, size)
        run_on = [in_pages(side, size) for side in sides]
        packed = [
            x.flatten(0, 1)[slots] if isinstance(x, Tensor) else rows_of(x, slots) for x in run_on
        ]
    else:
        storage, run_on, packed = fa.Ragged(indptr(kv_len)), sides, sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "EMULATED_SLOTS", workers)
        made = fa.BatchAttention(
            variant, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim,
            head_dim_v=dim_v or dim, q_dtype=dtype, kv_format=formats if any(formats) else None,
            target=TARGET,
        )  # fmt: skip
        made.plan(indptr(q_len), storage)

    def holds(results: Results) -> None:
        exact, eager = (
            varlen_reference(
                q, *packed, indptr(q_len), indptr(kv_len), variant, params=params, dtype=t
            )
            for t in (torch.float64, dtype)
        )
        assert_close(results[0], exact[0], eager[0])
        assert exact[1] is not None
        tolerance = 16 * EPS[dtype]  # of scores of rows that were rounded
        torch.testing.assert_close(results[1].double(), exact[1], rtol=tolerance, atol=tolerance)

    return Made(lambda: made.run(q, *run_on, return_lse=True, **(params or {})), holds)


def in_pages(x: Any, size: int) -> Any:
    """Rows [slots, heads, ...] as pages [pages, size, heads, ...]."""
    if isinstance(x, Tensor):
        return x.unflatten(0, (-1, size))
    scales, zeros = (
        n if n is None or n.shape[0] != x.codes.shape[0] else n.unflatten(0, (-1, size))
        for n in (x.scales, x.zeros)
    )
    return fa.kv.Stored(
        x.codes.unflatten(0, (-1, size)), scales, zeros, x.codebook, group=x.group,
        rotated=x.rotated,
    )  # fmt: skip


class ScaledQueries(fa.Variant):
    """A hook that changes queries."""

    gain: Tensor = fa.tensor("num_q_heads")

    def query_mod(self, q, b, h, q_idx):
        return q * self.gain[h]


class ScaledValues(fa.Variant):
    """A hook that changes values, by their positions and channels."""

    def value_mod(self, row, b, kv_h, kv_idx):
        return row * (1.0 + kv_idx * 0.001) + 0.5 * row.flip(0)


class SomeRequests(fa.Variant):
    """Requests see all keys or none, which a tensor says, so that no tile is proven empty."""

    sees: Tensor = fa.tensor("batch")

    def mask_mod(self, b, h, q_idx, kv_idx):
        return self.sees[b] > 0.5


class KeysFrom(fa.Variant):
    """Requests see keys from a position on that a tensor says: plans of dense calls do not know
    which see none, kernels find no tile for them."""

    first: Tensor = fa.tensor("batch", dtype=torch.int32)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return kv_idx >= self.first[b]


def nothing_before(formats: tuple[Format, Format], *what: Any, kv_len: int = 300) -> Made:
    """A dense call whose blocks have items without tiles before others."""
    variant: Any = KeysFrom()
    for other in what:
        variant = variant & other
    params = {"first": torch.tensor([1000, 1000, 0, 20], dtype=torch.int32)}
    rows = [normal(i, 4, h, n, 64) for i, (h, n) in enumerate(((4, 40), (2, kv_len), (2, kv_len)))]
    q = rows[0].to(BF16)
    k, v = (
        f.quantize(x, heads_dim=1) if f else x.to(BF16)
        for f, x in zip(formats, rows[1:], strict=True)
    )

    def holds(results: Results) -> None:
        exact, eager = (
            attention_reference(q, k, v, variant, params=params, dtype=t)[0]
            for t in (torch.float64, BF16)
        )
        assert_close(results[0], exact, eager)

    return Made(lambda: (fa.attention(q, k, v, variant, target=TARGET, **params),), holds)


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
    "codes": lambda: stored(**REQUESTS, formats=(INT8, INT8)),
    "codes 128": lambda: stored((70, 0, 40, 9), (300, 43, 0, 230), (E4M3, INT4), dim=128),
    "codes of floats": lambda: stored(**REQUESTS, formats=(E4M3, E4M3)),
    "codes of keys": lambda: stored(**REQUESTS, formats=(INT8, None)),
    "codes of values": lambda: stored(**REQUESTS, formats=(None, INT4), what=Math()),
    "codes in pages": lambda: stored(**REQUESTS, formats=(INT4, E4M3), page_size=16),
    "codes of no keys": lambda: stored((70, 9, 40), (0, 0, 0), (INT8, INT8)),
    "rope": lambda: stored(**REQUESTS, formats=(None, None), what=Math(causal=True, rope=True)),
    "rope, codes of values": lambda: stored(
        **REQUESTS, formats=(None, INT4), what=Math(causal=True, rope=True), page_size=64
    ),
    "value_mod": lambda: stored(**REQUESTS, formats=(None, None), what=ScaledValues()),
    "value_mod, codes of keys": lambda: stored(
        **REQUESTS, formats=(INT8, None), what=ScaledValues(), page_size=8
    ),
    "key_mod and value_mod": lambda: stored(
        **REQUESTS, formats=(None, None), what=fa.RoPE(max_position=1024) & ScaledValues()
    ),
    "value_mod of no keys": lambda: stored((70, 9), (0, 0), (None, None), ScaledValues()),
    "nothing before codes": lambda: nothing_before((INT8, INT8)),
    "nothing before codes of values": lambda: nothing_before((None, INT4)),
    "nothing before value_mod": lambda: nothing_before((None, None), ScaledValues()),
    "nothing before rope and value_mod": lambda: nothing_before(
        (None, None), fa.RoPE(max_position=512), ScaledValues(), kv_len=100
    ),
    "codes 256": lambda: stored((70, 9), (150, 90), (INT8, INT8), dim=256),
    "pages 128": lambda: ragged((70, 0, 40, 9), (600, 43, 0, 430), dim=128, page_size=16),
    "pages heads first": lambda: ragged(**REQUESTS, page_size=16, layout="heads first"),
    "pages mixed": lambda: ragged(**REQUESTS, page_size=32, layout="mixed", dim_v=128),
    **{
        f"head dims {d}, {dv}": lambda d=d, dv=dv, i=i: of_dims(d, dv, (BF16, FP16)[i % 2])
        for i, (d, dv) in enumerate(HEAD_DIMS)
    },
}  # fmt: skip
