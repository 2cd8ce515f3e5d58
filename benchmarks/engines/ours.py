"""This package: `fa.attention` on dense cases, `fa.BatchAttention` over pages on the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.engines.case import Case, Inputs, Prepared, dense, packed
from benchmarks.parts.batch_work import indptr, page_table


class Pages(NamedTuple):
    """Slots of a page, and whether its heads are outside of its slots; vLLM's are 128, True."""

    size: int = 16
    heads_apart: bool = False


DEFAULT = Pages()


def ours(case: Case, inputs: Inputs, pages: Pages = DEFAULT) -> Prepared:
    """The case on this package; the plan is made here, outside of the timing."""
    return _paged(case, inputs, pages) if case.paged else _dense(case, inputs)


def _dense(case: Case, inputs: Inputs) -> Prepared:
    batch, variant = len(case.q_lens), case.variant
    q, k, v = (dense(t, batch) for t in (inputs.q, inputs.k, inputs.v))

    def run() -> Tensor:
        return fa.attention(q, k, v, variant)

    return Prepared(run, lambda: packed(run()))


def _paged(case: Case, inputs: Inputs, layout: Pages) -> Prepared:
    engine = fa.BatchAttention(
        case.variant,
        num_q_heads=case.heads[0],
        num_kv_heads=case.heads[1],
        head_dim=case.head_dim,
        q_dtype=case.dtype,
        kv_format=fa.kv.Format("e4m3", "tensor") if case.fp8 else None,
    )
    storage = page_table(case.kv_lens, layout.size, shuffled=True)
    place = slots(storage, case.kv_lens)
    pages: list[Any] = []
    for rows in (inputs.k, inputs.v):
        cache = rows.new_zeros(len(storage.page_indices) * layout.size, *rows.shape[1:])
        cache[place] = rows
        cache = cache.unflatten(0, (-1, layout.size))
        if layout.heads_apart:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        if case.fp8:
            cache = fa.kv.Stored(cache.to(torch.float8_e4m3fn), torch.ones(()))
        pages.append(cache)
    engine.plan(indptr(case.q_lens), storage)
    out = torch.empty_like(inputs.q)

    def run() -> Tensor:
        return engine.run(inputs.q, *pages, out=out)

    return Prepared(run, run)


def slots(storage: fa.Paged, kv_lens: tuple[int, ...]) -> Tensor:
    """Of each key of each request in turn, its row in the cache: page * page_size + offset."""
    size, found = storage.page_size, []
    for b, length in enumerate(kv_lens):
        position = torch.arange(length)
        page = storage.page_indices[int(storage.page_indptr[b]) + position // size]
        found.append(page.long() * size + position % size)
    return torch.cat(found)
