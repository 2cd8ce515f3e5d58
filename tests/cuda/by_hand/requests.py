"""Requests for hand-written launches: where their keys lie, and their expected results.

The variant reads everything that hooks can read: indices, lengths, packed rows, physical slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashattn_jit as fa
from flashattn_jit.planner.tiles import kernels_by_rows
from flashattn_jit.variants.binding import Bound
from flashattn_jit.variants.variant import Dims
from tests.cuda.by_hand.launches import ByHand, ints

HEADS, KV_HEADS, DIM = 4, 2, 64
GROUP = HEADS // KV_HEADS
PAGE = 5
NAN = float("nan")
WRONG = 0.03
"""Larger errors are no rounding errors: outputs are below 4, in 16-bit dtypes."""


class OfEverything(fa.Variant):
    """Reads all that distinguishes pairs: b, h, positions, the packed row, the key's slot."""

    bias: torch.Tensor = fa.tensor("batch", "num_q_heads")
    token: torch.Tensor = fa.tensor("tokens")
    slot: torch.Tensor = fa.tensor("slots")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        own = self.token[fa.q_row(b, q_idx)] + self.slot[fa.kv_slot(b, kv_idx)]
        return score + self.bias[b, h] * (q_idx - kv_idx) * 0.01 + own

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx + b) % 5 != 0)


@dataclass(frozen=True)
class Request:
    """One request, or keys that several share. Its keys are [kv_first, kv_len)."""

    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_first: int = 0


@dataclass(frozen=True)
class Item:
    """Rows [row_begin, row_end) of a request and key head, over positions [begin, end)."""

    request: int
    kv_head: int
    row_begin: int
    row_end: int
    begin: int
    end: int
    partial: int = -1

    def words(self) -> list[int]:
        """The fields of fajit_work."""
        return [
            self.request, self.kv_head * GROUP, GROUP, self.row_begin, self.row_end, self.begin,
            self.end, self.partial,
        ]  # fmt: skip


PADDING = [-1, 1 << 20, 1 << 20, 1 << 20, 1 << 21, 0, 1 << 20, 1 << 20]
"""A padding item, whose other fields are far out of range."""


class Batch:
    """Requests with random tensors; memory that holds no request's keys is NaN.

    The first `tokens_of` requests have the packed tokens; each request after them stands for keys
    that some of these tokens share.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        kind: str,
        target: str,
        features: tuple[str, ...] = (),
        *,
        tokens_of: int | None = None,
        head_dim: int = DIM,
        variant: fa.Variant | None = None,
        stages: int = 0,
        seed: int = 0,
    ) -> None:
        self.requests = tuple(requests)
        self.tokens_of = len(self.requests) if tokens_of is None else tokens_of
        self.features, self.paged = features, "paged" in features
        self.dtype = torch.float16 if target == "sm_75" else torch.bfloat16
        self.generator = torch.Generator().manual_seed(seed)
        self.head_dim, self.variant = head_dim, variant
        own = self.requests[: self.tokens_of]
        self.q_row0 = [sum(r.q_len for r in own[:b]) for b in range(len(own))]
        self.tokens = sum(r.q_len for r in own)
        self._store_keys()
        self.q = self._random(self.tokens, HEADS, head_dim)
        self.bias = self._random(len(own), HEADS).float()
        self.token = self._random(self.tokens).float()
        self.slot = self._random(self.num_slots).float()
        self.bound = self._bind()
        specs = kernels_by_rows(
            self.bound.ir, (head_dim, head_dim), (str(self.dtype).removeprefix("torch."),) * 3,
            target, (features,),
        )  # fmt: skip
        self.spec = [s for s in specs if s.tile_kind == kind][-1]  # prefill: that of 64 rows
        if stages:
            self.spec = replace(self.spec, num_stages=stages)
        self.out = torch.full((self.tokens, HEADS, head_dim), NAN, dtype=self.dtype)
        self.lse = torch.full((self.tokens, HEADS), NAN)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def _bind(self) -> Bound:
        dims = Dims(self.tokens_of, HEADS, KV_HEADS, 1, 1, self.head_dim, self.head_dim)
        if self.variant is not None:
            return self.variant.bind(dims, {})
        params = {"bias": self.bias, "token": self.token, "slot": self.slot}
        return OfEverything().bind(dims, params)

    def _store_keys(self) -> None:
        """Stores rows or pages in random order, with a gap of NaN behind each request's keys."""
        counts = [r.kv_len - r.kv_first for r in self.requests]
        units = [-(-n // PAGE) if self.paged else n + 3 for n in counts]
        total = sum(units) + 2
        shape = (total, PAGE, KV_HEADS, self.head_dim)
        if not self.paged:
            shape = (total, KV_HEADS, self.head_dim)
        self.k, self.v = (torch.full(shape, NAN, dtype=self.dtype) for _ in range(2))
        order = torch.randperm(total, generator=self.generator).tolist()
        self.page_indptr = [sum(units[:b]) for b in range(len(units) + 1)]
        self.page_indices = order[: sum(units)] if self.paged else []
        self.kv_row0 = [1 + sum(units[:b]) for b in range(len(units))]
        self.num_slots = total * (PAGE if self.paged else 1)
        flat_k, flat_v = (t.view(self.num_slots, KV_HEADS, self.head_dim) for t in (self.k, self.v))
        self._slots: list[dict[int, int]] = []
        for b, request in enumerate(self.requests):
            positions = range(request.kv_first, request.kv_len)
            slots = self.slots_of(b, positions)
            self._slots.append(dict(zip(positions, slots, strict=True)))
            flat_k[slots] = self._random(len(slots), KV_HEADS, self.head_dim)
            flat_v[slots] = self._random(len(slots), KV_HEADS, self.head_dim)

    def slots_of(self, request: int, keys: Iterable[int]) -> list[int]:
        """Physical slots of logical positions."""
        first = self.requests[request].kv_first
        if not self.paged:
            return [self.kv_row0[request] + key - first for key in keys]
        pages = self.page_indices[self.page_indptr[request] :]
        return [pages[(k - first) // PAGE] * PAGE + (k - first) % PAGE for k in keys]

    def values(self) -> dict[str, torch.Tensor | int]:
        """The fields of fajit_args that describe the requests and their keys."""
        own, shared = self.requests[: self.tokens_of], self.requests[self.tokens_of :]
        values: dict[str, torch.Tensor | int] = {
            "num_requests": len(self.requests),
            "q_len": ints([r.q_len for r in self.requests]),
            "kv_len": ints([r.kv_len for r in self.requests]),
            # Rows of shared keys are entries of row_token, behind the entries of all tokens.
            "q_row0": ints(
                self.q_row0
                + [self.tokens + sum(r.q_len for r in shared[:g]) for g in range(len(shared))]
            ),
            "kv_row0": ints(self.kv_row0),
            "q_offset": ints([r.q_offset for r in self.requests]),
            "q_token0": ints(self.q_row0 + [0] * len(shared)),
            "kv_token0": ints(
                [n - r.kv_first for n, r in zip(self.kv_row0, self.requests, strict=True)]
            ),
            "row_request": ints([b for b, r in enumerate(own) for _ in range(r.q_len)]),
        }
        if any(r.kv_first for r in self.requests):
            values["kv_first"] = ints([r.kv_first for r in self.requests])
        if self.paged:
            values["page_indptr"] = ints(self.page_indptr)
            values["page_indices"] = ints(self.page_indices)
            values["page_size"], values["num_pages"] = PAGE, len(self.k)
        return values

    def launch(self, work: Sequence[Sequence[int]], **more: Any) -> ByHand:
        """A launch of `work`. more: merge_work, partial_rows and further fields of fajit_args."""
        merge_work = more.pop("merge_work", None)
        return ByHand(
            self.spec, self.bound, self.q, self.k, self.v, self.out, self.lse,
            ints(work).reshape(-1, 8), None if merge_work is None else ints(merge_work),
            more.pop("partial_rows", 0), self.values() | more,
        )  # fmt: skip

    def tiles(self, request: int) -> list[tuple[int, int, int]]:
        """(key head, first packed row, end) of the tiles of a request."""
        rows, step = self.requests[request].q_len * GROUP, self.spec.tile_q
        return [
            (head, row, min(row + step, rows))
            for head in range(KV_HEADS)
            for row in range(0, rows, step)
        ]

    def expected(
        self, b: int, row: int, head: int, keys: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, float]:
        """One row's output and lse in fp64, over keys as (request that stores it, position)."""
        position = self.requests[b].q_offset + row
        kept = [(g, j) for g, j in keys if position >= j and (j + b) % 5 != 0]
        if not kept:
            return torch.zeros(self.head_dim, dtype=torch.float64), float("-inf")
        slots = torch.tensor([self._slots[g][j] for g, j in kept])
        k, v = (
            t.view(self.num_slots, KV_HEADS, -1)[slots, head // GROUP].double()
            for t in (self.k, self.v)
        )
        at = torch.tensor([j for _, j in kept], dtype=torch.float64)
        scores = k @ self.q[self.q_row0[b] + row, head].double() * self.head_dim**-0.5
        scores += self.bias[b, head].double() * (position - at) * 0.01
        scores += self.token[self.q_row0[b] + row].double() + self.slot[slots].double()
        return torch.softmax(scores, 0) @ v, float(torch.logsumexp(scores, 0))

    def check(self, keys_of: Any) -> None:
        """Checks every row; keys_of(request, key head) are its keys as (request, position)."""
        for where, error, got, lse in self._rows(keys_of):
            assert error < WRONG, f"{where} is off by {error:.3g}"
            assert got == lse or abs(got - lse) < 1e-4, f"{where}: lse {got}, not {lse}"

    def difference(self, keys_of: Any) -> float:
        """The largest error of any row of the output; inf for NaN."""
        return max(e if e < float("inf") else float("inf") for _, e, _, _ in self._rows(keys_of))

    def _rows(self, keys_of: Any) -> Iterator[tuple[str, float, float, float]]:
        """(which row, error of its output, its lse, its expected lse) of all rows."""
        for b, request in enumerate(self.requests[: self.tokens_of]):
            for head in range(HEADS):
                keys = keys_of(b, head // GROUP)
                for row in range(request.q_len):
                    out, lse = self.expected(b, row, head, keys)
                    at = self.q_row0[b] + row
                    error = float((self.out[at, head].double() - out).abs().max())
                    where = f"request {b}, row {row}, head {head}"
                    yield where, error, float(self.lse[at, head]), lse

    def own_keys(self, b: int, kv_head: int) -> list[tuple[int, int]]:
        """All keys of a request, for `check`."""
        request = self.requests[b]
        return [(b, j) for j in range(request.kv_first, request.kv_len)]
