"""`fa.Bits`: the pairs of each request as bits of its own, FlashInfer's custom masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.ops.keys.mask_bits import flat_params
from tests.batch.batches import Batch
from tests.batch.oracle import Math, check
from tests.batch.sparse import flat_bits
from tests.harness.toolkit import needs_nvcc

SHAPES = (
    ((3, 70, 0, 1), (10, 75, 4, 130), 8),
    ((1, 1, 1), (300, 17, 64), 16),
    ((20, 0, 7), (300, 5, 64), 0),
)


def lay_out(batch: Batch, form: str) -> tuple[fa.Bits, Any]:
    """The same bits in each form that the sparsity takes, and which pairs they keep."""
    visited = flat_bits(batch, packed=form.startswith("packed"))
    bits, sizes = visited.sparsity.bits, [p.numel() for p in visited.pairs]
    if form == "packed off":  # not at a multiple of 8 bytes
        space = torch.zeros(bits.numel() + 3, dtype=torch.uint8)
        space[3:] = bits
        return fa.Bits(space[3:]), visited
    if form == "packed strided":
        return fa.Bits(torch.stack([bits, bits], 1)[:, 0]), visited
    if form == "spread":  # the requests' bits with others between them
        starts, parts, end = [], [], 0
        for i, p in enumerate(visited.pairs):
            starts.append(end + 13 * (i + 1))
            parts += [torch.ones(13 * (i + 1), dtype=torch.bool), p.flatten()]
            end = starts[-1] + sizes[i]
        return fa.Bits(torch.cat(parts), torch.tensor([*starts, end], dtype=torch.int32)), visited
    return visited.sparsity, visited


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("form", ["bool", "packed", "packed off", "packed strided", "spread"])
@pytest.mark.parametrize(("q_len", "kv_len", "page"), SHAPES, ids=str)
def test_bits_in_every_form(
    form: str, q_len: tuple[int, ...], kv_len: tuple[int, ...], page: int
) -> None:
    b = Batch(q_len, kv_len, (4, 2), 64, page_size=page)
    sparsity, visited = lay_out(b, form)
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=sparsity)
    check(b, Math(), batch.run(b.q, b.k, b.v), None, seen=visited.seen)


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.parametrize(("q_len", "kv_len", "page"), SHAPES, ids=str)
def test_bits_on_emulated_kernels(
    q_len: tuple[int, ...], kv_len: tuple[int, ...], page: int
) -> None:
    b = Batch(q_len, kv_len, (4, 2), 64, torch.bfloat16, page_size=page)
    visited = flat_bits(b, packed=True)
    batch = fa.BatchAttention(fa.Causal(), **b.options(), target="emulated:sm_80")
    batch.plan(b.q_indptr, b.storage, sparsity=visited.sparsity)
    check(b, Math(causal=True), batch.run(b.q, b.k, b.v), None, seen=visited.seen)


def test_they_go_with_the_variants_mask_and_any_offset() -> None:
    """Rows of the bits are query rows, whatever their positions are."""
    b = Batch((9, 4), (40, 30), (4, 2), 64)
    visited = flat_bits(b)
    batch = fa.BatchAttention(fa.Causal(), **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=visited.sparsity, q_offset=torch.tensor([20, 3]))
    out = batch.run(b.q, b.k, b.v)
    for i, (offset, begin, keys) in enumerate(((20, 0, 0), (3, 9, 40))):
        rows, count = b.q_len[i], b.kv_len[i]
        q = b.q[begin : begin + rows].transpose(0, 1)
        k, v = (t[keys : keys + count].transpose(0, 1).repeat_interleave(2, 0) for t in (b.k, b.v))
        causal = torch.arange(count) <= torch.arange(rows)[:, None] + offset
        kept = visited.pairs[i][0] & causal
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        wanted = wanted.nan_to_num().transpose(0, 1)
        torch.testing.assert_close(out[begin : begin + rows], wanted, rtol=1e-5, atol=1e-5)


def test_packed_bits_are_read_where_they_are() -> None:
    b = Batch((8, 8), (64, 64), (4, 2), 64)
    bits = torch.zeros(128, dtype=torch.uint8)
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=fa.Bits(bits))
    assert not batch.run(b.q, b.k, b.v).any()
    bits.fill_(255)
    batch.plan(b.q_indptr, b.storage, sparsity=fa.Bits(bits))
    full = batch.run(b.q, b.k, b.v)
    plain = fa.BatchAttention(None, **b.options())
    plain.plan(b.q_indptr, b.storage)
    torch.testing.assert_close(full, plain.run(b.q, b.k, b.v), rtol=1e-6, atol=1e-6)


def test_more_bits_than_32_bits_count() -> None:
    """Positions of bits are 64-bit numbers: the last of two requests begins past 2^32 bits."""
    b = Batch((4, 4), (40, 40), (4, 2), 64)
    visited = flat_bits(b)
    bits = torch.zeros(2**29 + 64, dtype=torch.uint8)  # 2^32 bits and some
    start = 2**32 + 8
    packed = flat_bits(b, packed=True).sparsity.bits
    bits[:20] = packed[:20]
    bits[start // 8 : start // 8 + 20] = packed[20:]
    ends = torch.tensor([0, start, start + 160])
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage, sparsity=fa.Bits(bits, ends))
    check(b, Math(), batch.run(b.q, b.k, b.v), None, seen=visited.seen)


def test_one_graph_replays_plans_with_other_bits() -> None:
    """Later plans of a captured run may have fewer bits; larger ones are refused."""
    b, other = (Batch((4, 4), lens, (4, 2), 64, page_size=8) for lens in ((40, 30), (20, 30)))
    limits = fa.Limits(max_requests=2, max_q_tokens=8, max_kv_len=64, max_pages=16)
    options = b.options()
    batch = fa.BatchAttention(None, **options, limits=limits, cuda_graph=True)
    batch.plan(b.q_indptr, b.storage, sparsity=flat_bits(b).sparsity)
    visited = flat_bits(other)
    batch.plan(other.q_indptr, other.storage, sparsity=visited.sparsity)
    check(other, Math(), batch.run(other.q, other.k, other.v), None, seen=visited.seen)
    with pytest.raises(fa.InputError, match="plan a sparsity's largest bits first"):
        large = fa.Bits(torch.ones(10_000, dtype=torch.bool))
        batch.plan(b.q_indptr, b.storage, sparsity=large)


def test_bits_packed_over_the_ends_of_requests() -> None:
    bits, device = torch.ones(2, dtype=torch.uint8), torch.device("cpu")
    with pytest.raises(fa.InputError, match=r"begin a new byte in each request: .* bit_indptr"):
        flat_params(bits, None, (2, 2, 2), (2, 2, 2), device)
    flat_params(bits, torch.tensor([0, 4, 8, 12]), (2, 2, 2), (2, 2, 2), device)


WRONG: dict[str, tuple[Any, str]] = {
    "dtype": (fa.Bits(torch.zeros(100)), r"bits must be a bool tensor \[num_bits\] or a packed"),
    "list": (fa.Bits([True]), "got list"),  # type: ignore[arg-type]
    "dims": (fa.Bits(torch.ones(10, 10, dtype=torch.bool)), "must have one dim"),
    "few": (
        fa.Bits(torch.ones(99, dtype=torch.bool)),
        "request 1 has q_len=4 x kv_len=20 bits, but Bits.bits has 99 bits, of which bits 20 to 100"
    ),
    "few packed": (fa.Bits(torch.ones(12, dtype=torch.uint8)), "has 96 bits, of which bits 24 to"),
    "indptr in bytes": (
        fa.Bits(torch.ones(13, dtype=torch.uint8), torch.tensor([0, 3, 13])),
        "bits 0 to 3 are its own; bit_indptr counts bits, .*multiply it by 8, or leave it out",
    ),
    "indptr": (
        fa.Bits(torch.ones(200, dtype=torch.bool), torch.tensor([0, 19, 200])),
        "request 0 has q_len=2 x kv_len=10 bits, .* of which bits 0 to 19 are its own",
    ),
    "negative": (
        fa.Bits(torch.ones(200, dtype=torch.bool), torch.tensor([-8, 20, 200])),
        "of which bits -8 to 20 are its own",
    ),
    "wrapped": (
        fa.Bits(torch.ones(200, dtype=torch.bool), torch.tensor([2**63 - 1, -(2**63) + 30, 200])),
        "request 0 has q_len=2 x kv_len=10 bits, .* of which bits 9223372036854775807 to -92",
    ),
    "count": (
        fa.Bits(torch.ones(200, dtype=torch.bool), torch.tensor([0, 20])),
        r"bit_indptr must be \[num_requests \+ 1 = 3\], got \[2\]",
    ),
    "floats": (
        fa.Bits(torch.ones(200, dtype=torch.bool), torch.tensor([0.0, 20, 100])),
        "Bits.bit_indptr must be an int32 or int64 cpu tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bits_that_cannot_be(name: str) -> None:
    sparsity, words = WRONG[name]
    b = Batch((2, 4), (10, 20), (4, 2), 64)
    batch = fa.BatchAttention(None, **b.options())
    batch.plan(b.q_indptr, b.storage)
    before = batch.run(b.q, b.k, b.v)
    with pytest.raises(fa.InputError, match=words):
        batch.plan(b.q_indptr, b.storage, sparsity=sparsity)
    after = batch.run(b.q, b.k, b.v)
    assert isinstance(before, Tensor) and isinstance(after, Tensor)
    assert torch.equal(before, after), "the plan before stays in force"
