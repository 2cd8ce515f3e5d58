"""`batch_invariant=True`: the bits of a request do not depend on the batch around it.

FlashInfer's test_batch_invariant_fa2.py at full size; `torch.equal` throughout.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import Batch, indptr
from tests.batch.lists import DTYPES
from tests.batch.oracle import Math, check
from tests.batch.runs import engine

DECODE = (
    (5, 4096, 1, 1, 128, 1), (12, 8192, 4, 1, 64, 8), (5, 5000, 8, 1, 256, 16),
    (12, 5000, 1, 2, 64, 16), (5, 8192, 8, 2, 128, 1),
)  # fmt: skip
"""(requests, kv_len, group, kv heads, head dim, page size)."""


def run(batch: Batch, members: list[int] | None = None, page_size: int | None = None):
    """(out, lse) of each of some requests of a batch, planned together in the order given."""
    members = list(range(len(batch.q_len))) if members is None else members
    size = batch.page_size if page_size is None else page_size
    part = Batch(
        tuple(batch.q_len[b] for b in members), tuple(batch.kv_len[b] for b in members),
        batch.heads, batch.dim, batch.dtype, size, seed=1 + len(members),
    )  # fmt: skip
    for i, b in enumerate(members):
        part.k[part.index(i)], part.v[part.index(i)] = batch.keys(b)
        begin, mine = batch.q_start[b], part.q_start[i]
        part.q[mine : mine + part.q_len[i]] = batch.q[begin : begin + batch.q_len[b]]
    made = engine(part, fa.Causal(), batch_invariant=True)
    made.plan(part.q_indptr, part.storage)
    out, lse = made.run(part.q, part.k, part.v, return_lse=True)
    return part, [
        (out[a:b], lse[a:b]) for a, b in itertools.pairwise(part.q_indptr.tolist())
    ]  # fmt: skip


def assert_same(some, others) -> None:
    for (out, lse), (other, other_lse) in zip(some, others, strict=True):
        assert torch.equal(out, other) and torch.equal(lse, other_lse)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("count", "kv_len", "group", "kv_heads", "dim", "page"), DECODE)
def test_decoding(count, kv_len, group, kv_heads, dim, page) -> None:
    heads = (group * kv_heads, kv_heads)
    batch = Batch((1,) * count, (kv_len,) * count, heads, dim, DTYPES[dim], page)
    part, whole = run(batch)
    check(part, Math(causal=True), torch.cat([o for o, _ in whole]),
          torch.cat([x for _, x in whole]))  # fmt: skip
    some = [count - 1, 0, 2, 1]
    assert_same(run(batch, some)[1], [whole[b] for b in some])
    assert_same(run(batch, [3])[1], [whole[3]])


@pytest.mark.parametrize(("q_len", "dim", "group", "page"), [(128, 128, 4, 16), (256, 64, 8, 1)])
@pytest.mark.parametrize("count", [3, 4])
def test_prefill(count, q_len, dim, group, page) -> None:
    batch = Batch((q_len,) * count, (5000,) * count, (group, 1), dim, DTYPES[dim], page)
    whole = run(batch)[1]
    assert_same(run(batch, [2, 0])[1], [whole[2], whole[0]])


def test_a_mixed_batch_in_any_order_over_any_storage() -> None:
    """Lengths around the splits; the same requests permuted, alone, in other pages, packed, and
    with one page each, as in a dense cache."""
    q_len = (1, 200, 3, 1, 17, 0, 1)
    kv_len = (4097, 300, 8192, 2, 4095, 7, 9000)
    batch = Batch(q_len, kv_len, (8, 2), 64, page_size=16)
    whole = run(batch)[1]
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    assert_same(run(batch, order)[1], [whole[b] for b in order])
    for b in range(7):
        assert_same(run(batch, [b])[1], [whole[b]])
    for page_size in (0, 1, 64, max(kv_len)):
        assert_same(run(batch, page_size=page_size)[1], whole)


@pytest.mark.usefixtures("restored_threads")
def test_threads_do_not_matter() -> None:
    batch = Batch((1, 40), (9000, 5000), (8, 2), 64, page_size=16)
    whole = run(batch)[1]
    for count in (1, 3):
        torch.set_num_threads(count)
        assert_same(run(batch)[1], whole)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dense_call_of_uncut_keys_has_the_same_bits(dtype: torch.dtype) -> None:
    batch = Batch((200, 1, 17, 3), (300, 2, 4095, 2048), (8, 2), 64, dtype, 16)
    whole = run(batch)[1]
    torch.set_num_threads(1)  # more of them would share one request's keys
    for b, (out, lse) in enumerate(whole):
        begin = batch.q_start[b]
        q = batch.q[begin : begin + batch.q_len[b]]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, *batch.keys(b)))
        dense = fa.attention(q, k, v, fa.Causal(), q_offset="end", return_lse=True)
        assert_same([(out, lse)], [tuple(x[0].transpose(0, 1) for x in dense)])


@pytest.mark.parametrize("kv_len", [2923, 3015, 3130])
def test_a_window_begins_at_the_same_key_in_any_batch(kv_len: int) -> None:
    """97 rows end in a prefill tile of one row, which sees the keys of a decoding request; each
    tile kind begins at a multiple of its own tile_kv."""
    generator = torch.Generator().manual_seed(5)
    lengths = {"append": 97, "decode": 1}
    made = fa.BatchAttention(
        fa.SlidingWindow(300), num_q_heads=1, num_kv_heads=1, head_dim=8, q_dtype=torch.float32,
        batch_invariant=True,
    )  # fmt: skip
    inputs = {
        name: [torch.randn(n, 1, 8, generator=generator) for n in (q_len, kv_len, kv_len)]
        for name, q_len in lengths.items()
    }

    def run_in_order(*names: str) -> dict[str, torch.Tensor]:
        q_lens = [lengths[name] for name in names]
        made.plan(indptr(q_lens), fa.Ragged(torch.arange(len(names) + 1) * kv_len))
        out = made.run(*(torch.cat(x) for x in zip(*(inputs[n] for n in names), strict=True)))
        return dict(zip(names, out.split(q_lens), strict=True))

    alone = run_in_order("append") | run_in_order("decode")
    for order in (("append", "decode"), ("decode", "append")):
        for name, out in run_in_order(*order).items():
            assert torch.equal(out, alone[name]), f"{name} in {order}"


def test_lists_are_cut_alike_in_any_batch() -> None:
    """Token lists longer than a split, in requests of several tokens."""
    q_len, kv_len, topk = (1, 3, 1, 60), (4500, 3000, 2600, 2700), 2500
    batch = Batch(q_len, kv_len, (4, 2), 64, page_size=16)
    generator = torch.Generator().manual_seed(1)
    longest = [n for rows, n in zip(q_len, kv_len, strict=True) for _ in range(rows)]
    indices = torch.stack([torch.randperm(n, generator=generator)[:topk] for n in longest])

    def run_sparse(*members: int) -> list[torch.Tensor]:
        rows = [batch.q_start[b] + torch.arange(q_len[b]) for b in members]
        tables = [batch.slots[b][::16] // 16 for b in members]
        paged = fa.Paged(
            indptr([*map(len, tables)]), torch.cat(tables),
            torch.tensor([(kv_len[b] - 1) % 16 + 1 for b in members]), 16,
        )  # fmt: skip
        made = engine(batch, fa.Causal(), batch_invariant=True)
        counts = [*map(len, rows)]
        sparsity = fa.TokenSparse(indices[torch.cat(rows)])
        plan = made.plan(indptr(counts), paged, sparsity=sparsity)
        assert plan.workspace_bytes > 0, "nothing is cut"
        return list(made.run(batch.q[torch.cat(rows)], batch.k, batch.v).split(counts))

    whole = run_sparse(0, 1, 2, 3)
    for members in ((3, 1, 0, 2), (0,), (1,), (3,)):
        for b, out in zip(members, run_sparse(*members), strict=True):
            assert torch.equal(out, whole[b]), f"request {b} among {members}"
