"""Attention over pages: what a page table means, on emulated targets, against packed calls."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import EnvironmentVariableError, InputError
from flashattn_jit.ops.keys.paged import Paged
from flashattn_jit.ops.keys.storage import read_storage
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import indptr
from tests.harness.toolkit import needs_nvcc
from tests.ops.batches.paged_calls import paged_attention
from tests.ops.cases import HOST_TARGETS, assert_close

SM80 = "emulated:sm_80"
BF16 = torch.bfloat16
DECODE = ((1, 1, 0, 1), (70, 1, 5, 300))
PREFILL = ((3, 40, 1, 0), (90, 40, 0, 7))


class Cached(NamedTuple):
    """Packed tensors and the same keys in pages; slots without a key are NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    paged: Paged


def cached(lengths=DECODE, page_size: int = 16, heads: int = 4, dim: int = 64) -> Cached:
    generator = torch.Generator().manual_seed(0)
    q_len, kv_len = lengths
    pages = [-(-n // page_size) for n in kv_len]
    num_pages = sum(pages) + 5
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in kv_len])
    q = torch.randn(sum(q_len), heads, dim, generator=generator).to(BF16)
    k, v = (torch.randn(sum(kv_len), 2, dim, generator=generator).to(BF16) for _ in range(2))
    indices = torch.randperm(num_pages, generator=generator)[: sum(pages)].int()
    empty = torch.full((num_pages, page_size, 2, dim), torch.nan).to(BF16)
    k_pages, v_pages = empty.clone(), empty.clone()
    paged = Paged(indptr(pages), indices, last, page_size)
    fa.append_paged_kv(k, v, k_pages, v_pages, indptr(kv_len), paged)
    return Cached(q, k, v, indptr(q_len), indptr(kv_len), k_pages, v_pages, paged)


def run(c: Cached, variant: Any = None, **options: Any):
    return paged_attention(
        c.q, c.k_pages, c.v_pages, c.q_indptr, c.paged, variant, target=SM80, **options
    )


def check(c: Cached, variant: Any = None) -> torch.Tensor:
    out, lse = run(c, variant, return_lse=True)
    packed = (c.q, c.k, c.v, c.q_indptr, c.kv_indptr, variant)
    exact, exact_lse = varlen_reference(*packed)
    eager, _ = varlen_reference(*packed, dtype=BF16)
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)
    return out


@needs_nvcc
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_pages_of_any_size_hold_what_packed_rows_do(lengths, page_size: int) -> None:
    check(cached(lengths, page_size), fa.Causal())


@needs_nvcc
def test_pages_do_not_change_a_bit_of_the_result() -> None:
    outs = [check(cached(DECODE, n), fa.Causal()) for n in (1, 16)]
    assert torch.equal(*outs)


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_request_of_nan_changes_no_other(target: str, page_size: int, dtype: torch.dtype) -> None:
    # A worker prefetches the keys of its next item, whose rows are in the same table.
    kv_lens = (70, 300, 5, 64, 129, 1, 33, 96)
    c = cached(((1,) * len(kv_lens), kv_lens), page_size)
    c = c._replace(q=c.q.to(dtype), k_pages=c.k_pages.to(dtype), v_pages=c.v_pages.to(dtype))
    variants = (None, fa.SlidingWindow(40))
    expected = [paged_attention(c.q, c.k_pages, c.v_pages, c.q_indptr, c.paged, v, target=target)[0]
                for v in variants]  # fmt: skip
    for bad in range(1, len(kv_lens), 2):
        for page in range(*c.paged.page_indptr[bad : bad + 2].tolist()):
            c.k_pages[c.paged.page_indices[page]] = torch.nan
            c.v_pages[c.paged.page_indices[page]] = torch.inf
    for variant, wanted in zip(variants, expected, strict=True):
        found, _ = paged_attention(
            c.q, c.k_pages, c.v_pages, c.q_indptr, c.paged, variant, target=target
        )
        assert torch.equal(found[0::2], wanted[0::2])
        assert found[1::2].isnan().any(-1).all()


def test_hooks_see_logical_positions_and_the_physical_slot() -> None:
    c = cached(DECODE, 16)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(c.k_pages.shape[0] * 16, generator=generator)

    def by_slot(score, b, h, q_idx, kv_idx):
        return score + weight[fa.kv_slot(b, kv_idx)] + 0.01 * (kv_idx - q_idx)

    out, _ = run(c, by_slot)
    # The same weights in the order of the packed keys.
    own = []
    for b, (begin, end) in enumerate(itertools.pairwise(c.paged.page_indptr.tolist())):
        pages = c.paged.page_indices[begin:end].long()
        slots = (pages[:, None] * 16 + torch.arange(16)).flatten()
        own.append(weight[slots[: int(c.kv_indptr[b + 1] - c.kv_indptr[b])]])
    packed = torch.cat(own)

    def by_row(score, b, h, q_idx, kv_idx):
        return score + packed[fa.kv_slot(b, kv_idx)] + 0.01 * (kv_idx - q_idx)

    rows = (c.q, c.k, c.v, c.q_indptr, c.kv_indptr, by_row)
    exact, _ = varlen_reference(*rows)
    eager, _ = varlen_reference(*rows, dtype=BF16)
    assert_close(out, exact, eager)


@needs_nvcc
def test_k_and_v_have_their_own_strides() -> None:
    """Keys as [pages, heads, slots, dim], values beside something else in a wider row."""
    c = cached(DECODE, 16)
    expected = check(c, fa.Causal())
    k_pages = c.k_pages.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*c.v_pages.shape[:3], 128), torch.nan, dtype=BF16)
    wide[..., 32:96] = c.v_pages
    out, _ = run(c._replace(k_pages=k_pages, v_pages=wide[..., 32:96]), fa.Causal())
    assert torch.equal(out, expected)


@needs_nvcc
def test_out_and_int64_indices() -> None:
    c = cached(DECODE, 16)
    expected = check(c, fa.Causal())
    out = torch.empty(3, 4, 64, dtype=BF16)
    indices = c.paged.page_indices.long()
    got, lse = run(c._replace(paged=replace(c.paged, page_indices=indices)), fa.Causal(), out=out)
    assert got is out and lse is None and torch.equal(out, expected)


def append(c: Cached) -> None:
    """Writes zeros over the last keys of each request, one for each of its queries."""
    rows = torch.zeros(c.q.shape[0], 2, 64, dtype=BF16)
    fa.append_paged_kv(rows, rows.clone(), c.k_pages, c.v_pages, c.q_indptr, c.paged)


def changed(**fields: Any) -> Cached:
    c = cached()
    return c._replace(paged=replace(c.paged, **fields))


NO_PAGES = torch.tensor([0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cached()._replace(paged=(1, 2)), "paged must be an fa.Paged, got tuple"),
        (lambda: changed(page_size=8), r"last_page_len\[3\]=12: .* 1 to page_size=8"),
        (lambda: changed(page_size=32), "k_pages has page_size=16, but paged 32"),
        (lambda: changed(page_size=0), "page_size=0 must be an int of at least 1"),
        (
            lambda: changed(page_indptr=torch.tensor([0, 5, 4, 6, 9])),
            "descends at request 1",
        ),
        (lambda: changed(page_indptr=torch.tensor([0, 5])), "page_indptr has 2 entries"),
        (
            lambda: changed(page_indptr=torch.tensor([-1, 5, 6, 7, 26])),
            r"indptr\[0\]=-1 must be 0",
        ),
        (lambda: changed(page_indptr=torch.tensor([0.0, 5])), "page_indptr must be an int32 or"),
        (lambda: changed(page_indptr=torch.tensor([0, 5, 6, 7, 99])), "ends at 99, but page_indi"),
        (
            lambda: changed(page_indptr=NO_PAGES),
            "request 0 has 1 new tokens, but paged",
        ),
        (
            lambda: changed(last_page_len=torch.tensor([6, 0, 5, 12])),
            r"last_page_len\[1\]=0: ",
        ),
        (lambda: changed(last_page_len=torch.tensor([6, 17, 5, 12])), r"last_page_len\[1\]=17"),
        (
            lambda: changed(last_page_len=torch.tensor([6])),
            "last_page_len has 1 entries for",
        ),
        (
            lambda: changed(page_indices=torch.zeros(9)),
            "page_indices must be an int32 or int64 tensor",
        ),
        (lambda: changed(page_indices=torch.zeros(2, 9).int()), "must be a tensor"),
        (
            lambda: changed(page_indices=torch.zeros(26, dtype=torch.int32, device="meta")),
            "page_indices are on meta",
        ),
        (
            lambda: cached()._replace(q_indptr=torch.tensor([0, 3])),
            "page_indptr has 5 entries",
        ),
        (
            lambda: cached()._replace(v_pages=torch.zeros(9, 16, 2, 64, dtype=BF16)),
            "v_pages has num_pages=9",
        ),
        (lambda: cached()._replace(k_pages=torch.zeros(9, 16, 64)), "k_pages must be .num_pages"),
    ],
)
def test_errors_of_pages_come_before_anything_is_written(make, message: str) -> None:
    """Errors of `append_paged_kv`; those of batches are in tests/ops/errors/test_bad_batch.py."""
    with pytest.raises(InputError, match=message):
        append(make())


def test_the_error_of_a_page_out_of_range_names_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cached()
    indices = c.paged.page_indices.clone()
    indices[6] = 1000
    wrong = c._replace(paged=replace(c.paged, page_indices=indices))
    for call in (run, append):
        with pytest.raises(InputError, match=r"page_indices\[6\]=1000, a page of request 2, is"):
            call(wrong)
    # Entries that no request owns may hold anything.
    unused = torch.cat([c.paged.page_indices, torch.tensor([-7], dtype=torch.int32)])
    own = c._replace(k_pages=c.k_pages.clone(), v_pages=c.v_pages.clone())
    append(own._replace(paged=replace(c.paged, page_indices=unused)))
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    read_storage(wrong.paged, torch.device("cpu"))
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "yes")
    with pytest.raises(EnvironmentVariableError, match="must be 0 or 1"):
        read_storage(wrong.paged, torch.device("cpu"))


@needs_nvcc
@pytest.mark.parametrize("wild", [-1, 10**6, 2**31 - 1])
def test_an_unchecked_page_that_is_not_there_is_no_wild_address(
    wild: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where indices are not checked, as on devices, page 0 is read instead."""
    c = cached(DECODE)
    bad = c.paged.page_indices.clone()
    bad[0] = wild
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    out, _ = run(c._replace(paged=replace(c.paged, page_indices=bad)))
    assert torch.equal(out[1:], run(c)[0][1:])  # the other requests are untouched


@pytest.mark.parametrize(
    "target", [None, pytest.param(SM80, marks=needs_nvcc)], ids=["cpu", "emulated"]
)
@pytest.mark.parametrize("wild", [-1, 10**6])
def test_slots_of_a_page_that_is_not_there_are_those_of_page_0(
    wild: int, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks see the slots whose keys are read."""
    c = cached(DECODE)
    keys = torch.zeros_like(c.k_pages)  # all scores are 0, and out is the mean of the values
    values = torch.arange(16.0).to(BF16)[None, :, None, None].expand(c.v_pages.shape).contiguous()
    gain = torch.zeros(c.k_pages.shape[0] * 16)
    gain[:16] = torch.arange(16) * 0.25

    def by_slot(score, b, h, q_idx, kv_idx):
        return score + gain[fa.kv_slot(b, kv_idx)]

    def first_page(page: int) -> torch.Tensor:
        indices = c.paged.page_indices.clone()
        indices[0] = page
        paged = replace(c.paged, page_indices=indices)
        return paged_attention(c.q, keys, values, c.q_indptr, paged, by_slot, target=target)[0]

    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    assert torch.equal(first_page(wild), first_page(0))
    assert not torch.equal(first_page(wild), first_page(int(c.paged.page_indices[0])))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("past", [2**31 - 8, -(2**31) + 8, 10**6])
def test_keys_that_are_not_there_have_slot_0(past: int, target: str) -> None:
    """Also where their indices pass the largest int32 and go on from the least one."""
    c = cached(DECODE, page_size=100)
    gain = torch.zeros(c.k_pages.shape[0] * 100)
    gain[1:] = float("nan")

    def by_slot(score, b, h, q_idx, kv_idx):
        return score + gain[fa.kv_slot(b, kv_idx + past)]

    found, plain = (
        paged_attention(c.q, c.k_pages, c.v_pages, c.q_indptr, c.paged, hook, target=target)[0]
        for hook in (by_slot, None)
    )
    assert torch.equal(found, plain)


def test_caches_that_overlap_are_refused() -> None:
    c = cached(DECODE)
    with pytest.raises(InputError, match="same entry"):
        fa.append_paged_kv(c.k, c.v, c.k_pages, c.k_pages, c.kv_indptr, c.paged)
    inside = c.k_pages.view(-1, 2, 64)[: c.k.shape[0]]
    with pytest.raises(InputError, match="clone"):
        fa.append_paged_kv(inside, c.v, c.k_pages, c.v_pages, c.kv_indptr, c.paged)
