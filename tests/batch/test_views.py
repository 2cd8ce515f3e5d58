"""q, k and v as views: of one packed QKV tensor, of pages in any layout, of wider rows.

FlashInfer's test_non_contiguous_prefill.py and test_non_contiguous_decode.py at full size, and
unequal strides of K and V as in its tests.
"""

from __future__ import annotations

import pytest
import torch

from tests.batch.batches import LAYOUTS, Batch
from tests.batch.lists import DTYPES
from tests.batch.oracle import Math, check
from tests.batch.runs import attend

PACKED = (
    (1, 1, 1, 4, 64, True), (1, 7, 4, 8, 128, False), (1, 127, 8, 32, 256, True),
    (1, 999, 1, 32, 64, False), (1, 3579, 4, 4, 128, True), (19, 1, 8, 8, 64, True),
    (99, 7, 4, 32, 128, True), (19, 127, 1, 4, 256, True), (19, 257, 8, 32, 64, False),
    (99, 257, 4, 4, 128, True),
)  # fmt: skip
"""(requests, length, kv heads, q heads, head dim, causal)."""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("count", "length", "kv_heads", "q_heads", "dim", "causal"), PACKED)
def test_views_of_one_packed_tensor(count, length, kv_heads, q_heads, dim, causal) -> None:
    lengths, what = (length,) * count, Math(causal=causal)
    batch = Batch(lengths, lengths, (q_heads, kv_heads), dim, DTYPES[dim], 0)
    expected = attend(batch, what.variant(q_heads))
    packed = torch.cat([batch.q, batch.k, batch.v], 1)
    batch.q, batch.k, batch.v = packed.split((q_heads, kv_heads, kv_heads), 1)
    assert count * length == 1 or not batch.k.is_contiguous()
    out, lse = attend(batch, what.variant(q_heads))
    check(batch, what, out, lse)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("q_len", [17, 65])
def test_pages_in_every_layout(layout: str, page_size: int, q_len: int) -> None:
    lengths = ((q_len, 1, q_len), (97, 300, q_len))
    batch = Batch(*lengths, (8, 4), 64, page_size=page_size, layout=layout)
    plain = Batch(*lengths, (8, 4), 64, page_size=page_size)
    what = Math(causal=True)
    out, lse = attend(batch, what.variant(8))
    check(batch, what, out, lse)
    expected = attend(plain, what.variant(8))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("page_size", [1, 5])
def test_paged_keys_of_one_tensor_with_strided_queries(page_size: int) -> None:
    batch = Batch((7, 1, 127), (127, 999, 257), (32, 4), 128, torch.bfloat16, page_size, "halves")
    wide = torch.full((sum(batch.q_len), 64, 128), torch.nan, dtype=torch.bfloat16)
    wide[:, 16:48] = batch.q
    batch.q = wide[:, 16:48]
    what = Math(causal=True)
    check(batch, what, *attend(batch, what.variant(32)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_are_not_copied(layout: str) -> None:
    """A hundred million pages in the memory of a few: a copy would take terabytes."""
    b = Batch((17, 1), (97, 300), (8, 4), 64, page_size=16, layout=layout)
    variant = Math(causal=True).variant(8)
    b.k, b.v = (
        x.as_strided((10**8, *x.shape[1:]), (0, *x.stride()[1:]), x.storage_offset() + x.stride(0))
        for x in (b.k, b.v)
    )
    b.k[0], b.v[0] = 1.0, 2.0
    torch.testing.assert_close(attend(b, variant)[0], torch.full_like(b.q, 2.0))


def test_rows_that_no_16_bytes_divide() -> None:
    batch = Batch((9, 1), (40, 130), (4, 2), 20, page_size=3, dim_v=12)
    wide = torch.full((*batch.k.shape[:3], 33), torch.nan)
    wide[..., 5:25] = batch.k
    batch.k = wide[..., 5:25]
    check(batch, Math(causal=True), *attend(batch, Math(causal=True).variant(4)))
