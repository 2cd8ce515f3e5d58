"""Rows dealt out by the mask, and the keys that ranks need: planned for up to 64 ranks, not run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.distributed.context_parallel import read_requests
from flashattn_jit.distributed.costs import foreign_rows
from flashattn_jit.distributed.dealt_batch import DealtBatch
from flashattn_jit.distributed.needs import key_moves, moved_tokens, query_moves
from flashattn_jit.distributed.shares import ranges
from flashattn_jit.distributed.states import rows_at_keys

LONG = 131072


def _documents(tokens: int, low: int, high: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(torch.randint(low, high, (1,), generator=made)))
    return fa.variants.library.document_ids(lengths)[:tokens][None]


def _blocks(tokens: int, size: int, share: float):
    made = torch.Generator().manual_seed(2)
    kept = torch.rand(-(-tokens // size), -(-tokens // size), generator=made) < share
    return fa.variant(mask_mod=lambda b, h, q, k: kept[q // size, k // size])


def _masks(tokens: int, scale: int, requests: int = 1):
    return {
        "full": (fa.Full(), {}),
        "causal": (fa.Causal(), {}),
        "documents": (
            fa.DocumentMask() & fa.Causal(),
            {"documents": _documents(tokens, 2 * scale, 64 * scale)},
        ),
        "window": (fa.SlidingWindow(32 * scale), {}),
        "prefix": (fa.PrefixLM(), {"prefix_len": torch.tensor([tokens // 3] * requests)}),
        "blocks": (_blocks(tokens, 4 * scale, 0.2), {}),
    }


class Dealt:
    """A batch dealt out to ranks that do not exist."""

    def __init__(
        self, variant, params, q_len, kv_len, ranks, invariant=False, q_shards=None, kv_shards=None
    ) -> None:
        batch = DealtBatch(
            variant, num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=torch.float32,
            batch_invariant=invariant,
        )  # fmt: skip
        q, kv = (torch.tensor([0, *x]).cumsum(0) for x in (q_len, kv_len))
        whole = batch.whole(q, kv, "end")
        self.requests = read_requests(whole, q, kv, q_shards, kv_shards, ranks)
        self.tiles = batch.tiles(whole, params)
        self.shares, self.pages = batch.dealt(self.tiles, whole, params, self.requests)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "prefix", "blocks"])
def test_the_longest_rank_is_near_the_mean(mask) -> None:
    """Within 5 % of the mean for any number of ranks, of one sequence of 128k tokens."""
    variant, params = _masks(LONG, 128)[mask]
    for ranks in (2, 3, 8, 16, 64):
        shares = Dealt(variant, params, [LONG], [LONG], ranks).shares
        assert shares.balance <= 1.05, ranks
        assert shares.least <= shares.load.mean() * 1.0001


def test_many_requests_are_balanced() -> None:
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(10, 8000, (256,), generator=made).tolist()
    for ranks in (2, 7, 64):
        shares = Dealt(fa.Causal(), {}, lengths, lengths, ranks).shares
        assert shares.balance <= 1.05
    assert shares.home_load.max() > 1.05 * shares.home_load.mean()


def test_the_bound_is_above_one_where_rows_are_too_few() -> None:
    shares = Dealt(fa.Full(), {}, [40], [100000], 8).shares
    assert shares.least > 2.5 * shares.load.mean()
    assert shares.load.max() <= shares.least * 1.001


def test_few_rows_leave_their_home() -> None:
    """A seventh of the rows of a causal mask: what the halves of the ranks differ by."""
    dealt = Dealt(fa.Causal(), {}, [LONG], [LONG], 8)
    moved = foreign_rows(dealt.requests, dealt.shares).sum() / LONG
    assert 0.05 < moved < 0.2
    even = Dealt(fa.SlidingWindow(4096), {}, [LONG], [LONG], 8)
    assert foreign_rows(even.requests, even.shares).sum() == 0


def test_a_window_sends_a_tenth_of_an_all_gather_at_most() -> None:
    dealt = Dealt(fa.SlidingWindow(4096), {}, [LONG], [LONG], 8)
    moved = moved_tokens(dealt.pages, dealt.requests)
    assert moved.sum() <= 0.1 * 7 * LONG
    assert moved.max() <= 0.1 * LONG * 7 / 8


Q_LEN, KV_LEN = (500, 1, 300), (500, 77, 450)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mask", ["full", "causal", "documents", "window", "prefix", "blocks"])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_row_has_one_rank_and_all_of_its_keys(mask, invariant) -> None:
    """Against the mask, pair by pair."""
    variant, params = _masks(500, 4, 3)[mask]
    if mask == "documents":
        params = {"documents": params["documents"].expand(3, -1).contiguous()}
    dealt = Dealt(variant, params, Q_LEN, KV_LEN, 5, invariant)
    requests, pages = dealt.requests, dealt.pages
    computed = np.concatenate([ranges(*dealt.shares.of(r)) for r in range(5)])
    assert np.array_equal(np.sort(computed), np.arange(sum(Q_LEN)))
    at_keys = rows_at_keys(dealt.tiles, requests)
    for rank in range(5):
        rows = ranges(*dealt.shares.of(rank))
        has = np.zeros(sum(KV_LEN), bool)
        for low, high in zip(*pages.of(rank), strict=True):
            has[pages.bounds[low] : pages.bounds[high]] = True
        here = ranges(*at_keys.of(rank))
        for b, kept in enumerate(_kept(variant, params)):
            q0, k0 = int(requests.q_indptr[b]), int(requests.kv_indptr[b])
            mine = rows[(rows >= q0) & (rows < q0 + Q_LEN[b])] - q0
            seen = kept[mine].any(0)
            assert has[k0 : k0 + KV_LEN[b]][seen].all(), (rank, b)
            low, high = (np.clip(x - k0, 0, KV_LEN[b]) for x in requests.kv_shards[rank : rank + 2])
            wanted = np.flatnonzero(kept[:, low:high].any(1)) + q0
            assert np.isin(wanted, here).all(), (rank, b)


def _kept(variant, params) -> list[np.ndarray]:
    """The mask of each request, [q_len, kv_len], by eager torch."""
    found = []
    for b, (rows, keys) in enumerate(zip(Q_LEN, KV_LEN, strict=True)):
        one = {
            n: x[b : b + 1] if n in ("documents", "prefix_len") else x for n, x in params.items()
        }
        q = torch.zeros(1, 4, rows, 64)
        k = torch.zeros(1, 2, keys, 64)
        v = torch.eye(keys)[None, None].expand(1, 2, -1, -1)
        weight = variant.reference(q, k, v, q_offset="end", **one)
        found.append((weight[0] > 0).any(0).numpy())
    return found


def test_moves_bring_every_token_to_its_place() -> None:
    """Simulated for all ranks at once, with shards of any size."""
    variant, params = _masks(500, 4)["window"]
    dealt = Dealt(
        variant, params, Q_LEN, KV_LEN, 4, q_shards=[0, 0, 700, 701, 801],
        kv_shards=[0, 333, 333, 1000, 1027],
    )  # fmt: skip
    requests, pages, shares = dealt.requests, dealt.pages, dealt.shares
    for moves, shards, wanted in (
        ([query_moves(shares, requests, r) for r in range(4)], requests.q_shards,
         [ranges(*shares.of(r)) for r in range(4)]),
        ([key_moves(pages, requests, r) for r in range(4)], requests.kv_shards, None),
    ):  # fmt: skip
        for rank in range(4):
            buffer = np.full(moves[rank].num_rows, -1)
            for source in range(4):
                begin, count = moves[source].sent.of(rank)
                at, room = moves[rank].received.of(source)
                assert count.sum() == room.sum()
                buffer[ranges(at, at + room)] = ranges(begin, begin + count) + shards[source]
            if wanted is not None:
                assert np.array_equal(buffer, wanted[rank])
                continue
            own = ranges(*pages.of(rank))
            for place, page in enumerate(own):
                tokens = np.arange(pages.bounds[page], pages.bounds[page + 1])
                slots = buffer[place * pages.page_size :][: len(tokens)]
                assert np.array_equal(slots, tokens)


def test_invariant_shares_are_whole_tiles() -> None:
    """Cut only where the kernel of one process begins a tile."""
    lengths = [1000, 3, 700]
    dealt = Dealt(fa.Causal(), {}, lengths, lengths, 3, invariant=True)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=torch.float32,
        batch_invariant=True,
    )  # fmt: skip
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    plan = batch.plan(indptr, fa.Ragged(indptr))
    native = plan._planned.first.native
    starts = set()
    for kind in (0, 1):
        for request, _, _, begin, *_ in np.frombuffer(native.work(kind), np.int32).reshape(-1, 8):
            starts.add(int(indptr[request]) + int(begin) // 2)
    cuts = {*dealt.shares.begin.tolist()} - {0}
    assert cuts
    assert cuts <= starts | {*indptr.tolist()}
