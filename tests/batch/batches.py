"""Batches for tests: random tensors, with keys packed or in pages of any layout.

Every slot of a page that holds no key is NaN, and so is every page that no request owns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashattn_jit as fa

SPARE_PAGES = 3
LAYOUTS = ("pages", "heads first", "halves", "layers", "mixed")
"""[pages, slots, heads, dim]; [pages, heads, slots, dim]; halves of [pages, 2, ...]; all layers in
a page [pages, layers, 2, slots, heads, dim]; K and V laid out differently."""


def indptr(lengths: Sequence[int]) -> Tensor:
    """[0, lengths[0], lengths[0] + lengths[1], ...], int64."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


@dataclass(slots=True)
class Batch:
    """Requests with their tensors. page_size 0: keys are packed.

    heads: (num_q_heads, num_kv_heads). q [Nq, Hq, D]; k, v as `run` takes them.
    """

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype = torch.float32
    page_size: int = 0
    layout: str = "pages"
    dim_v: int = 0
    seed: int = 0
    device: str = "cpu"
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    storage: fa.Paged | fa.Ragged = field(init=False)
    slots: list[Tensor] = field(init=False)  # of each request's keys: rows of k, or page * size + i

    def __post_init__(self) -> None:
        self.dim_v = self.dim_v or self.dim
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=torch.float32).to(self.dtype)

        total = sum(self.kv_len)
        self.q = normal(sum(self.q_len), self.heads[0], self.dim).to(self.device)
        k, v = normal(total, self.heads[1], self.dim), normal(total, self.heads[1], self.dim_v)
        if not self.page_size:
            self.k, self.v = k.to(self.device), v.to(self.device)
            self.storage = fa.Ragged(indptr(self.kv_len))
            self.slots = list(torch.arange(total).split(list(self.kv_len)))
            return
        size = self.page_size
        counts = [-(-n // size) for n in self.kv_len]
        num_pages = sum(counts) + SPARE_PAGES
        order = torch.randperm(num_pages, generator=generator)[: sum(counts)]
        own = order.split(counts) if counts else ()
        self.slots = [
            (pages[:, None] * size + torch.arange(size)).flatten()[:n]
            for pages, n in zip(own, self.kv_len, strict=True)
        ]
        at = torch.cat(self.slots) if self.slots else torch.empty(0, dtype=torch.long)
        where = (at // size).to(self.device), (at % size).to(self.device)
        self.k, self.v = caches(num_pages, size, self.heads[1], self.dim, self.dim_v, self.dtype,
                                self.layout, self.device)  # fmt: skip
        self.k[where], self.v[where] = k.to(self.device), v.to(self.device)
        last = [(n - 1) % size + 1 if n else 0 for n in self.kv_len]
        self.storage = fa.Paged(
            indptr(counts), order.int().to(self.device), torch.tensor(last, dtype=torch.int64), size
        )

    @property
    def q_indptr(self) -> Tensor:
        return indptr(self.q_len)

    @property
    def q_start(self) -> list[int]:
        return self.q_indptr.tolist()[:-1]

    def index(self, b: int) -> tuple[Tensor, ...]:
        """The index into k and v of a request's keys."""
        slots = self.slots[b].to(self.k.device)
        if not self.page_size:
            return (slots,)
        return slots // self.page_size, slots % self.page_size

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """Dense (k [kv_len, Hkv, D], v [kv_len, Hkv, Dv]) of a request."""
        return self.k[self.index(b)], self.v[self.index(b)]

    def packed_keys(self) -> tuple[Tensor, Tensor]:
        """(k, v) of all requests, one request after another."""
        k, v = zip(*map(self.keys, range(len(self.kv_len))), strict=True)
        return torch.cat(k), torch.cat(v)

    def options(self) -> dict[str, object]:
        """The arguments of BatchAttention, without the variant."""
        return {
            "num_q_heads": self.heads[0], "num_kv_heads": self.heads[1], "head_dim": self.dim,
            "head_dim_v": self.dim_v, "q_dtype": self.dtype, "device": self.device,
        }  # fmt: skip


def caches(
    num_pages: int, size: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype, layout: str,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k and v pages [pages, slots, heads, dim] in memory of some layout, all NaN."""

    def nan(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    if layout == "heads first":
        k, v = nan(num_pages, heads, size, dim), nan(num_pages, heads, size, dim_v)
        return k.transpose(1, 2), v.transpose(1, 2)
    if layout == "halves" and dim == dim_v:
        both = nan(num_pages, 2, size, heads, dim)
        return both[:, 0], both[:, 1]
    if layout == "layers" and dim == dim_v:
        all_layers = nan(num_pages, 3, 2, size, heads, dim)
        return all_layers[:, 1, 0], all_layers[:, 1, 1]
    if layout == "mixed":
        return nan(num_pages, size, heads, dim), nan(num_pages, heads, size, dim_v).transpose(1, 2)
    return nan(num_pages, size, heads, dim), nan(num_pages, size, heads, dim_v)


def share_prefix(batch: Batch, tokens: int, members: Sequence[int] | None = None) -> None:
    """Lets requests use the first one's pages for their first `tokens` keys; their own become NaN.

    members: the requests, all by default. tokens is a multiple of the page size and at most the
    kv_len of each.
    """
    paged, size = batch.storage, batch.page_size
    assert isinstance(paged, fa.Paged) and tokens % size == 0
    first, *others = range(len(batch.q_len)) if members is None else members
    starts, pages = paged.page_indptr.tolist(), tokens // size
    shared = paged.page_indices[starts[first] : starts[first] + pages].clone()
    for b in others:
        own = paged.page_indices[starts[b] : starts[b] + pages]
        gone = own[~torch.isin(own, shared)].long()
        batch.k[gone], batch.v[gone] = torch.nan, torch.nan
        own.copy_(shared)
        batch.slots[b][:tokens] = batch.slots[first][:tokens]


def level_of(
    batch: Batch, begin: int, end: int, groups: Sequence[Sequence[int]]
) -> tuple[Tensor, fa.Paged]:
    """(q_indptr, paged) of a cascade's level: keys `begin` to `end` of the requests of each group,
    which follow one another. `end` -1: up to the last key."""
    paged, size = batch.storage, batch.page_size
    assert isinstance(paged, fa.Paged)
    starts, tables, last, rows = paged.page_indptr.tolist(), [], [], []
    for group in groups:
        b = group[0]
        stop = batch.kv_len[b] if end < 0 else end
        pages = -(-stop // size)
        tables.append(paged.page_indices[starts[b] + begin // size : starts[b] + pages])
        last.append((stop - 1) % size + 1 if stop > begin else 0)
        rows.append(sum(batch.q_len[m] for m in group))
    counts = [len(t) for t in tables]
    return indptr(rows), fa.Paged(indptr(counts), torch.cat(tables), torch.tensor(last), size)
