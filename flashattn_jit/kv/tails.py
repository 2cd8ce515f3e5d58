"""`TailAppend`: new rows of a group with a tail, and the codes of the pages that they fill.

A page is quantised by the step that fills it. Until then its rows are in a page of the tail, and so
that an aborted step leaves the tail as it was, they stay there until the commit. Pages that a step
begins and fills have no page in the tail: their rows pass through memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..formats import Codes, Format, Stored
from ..ops.append import plan_append
from .copies import indexable
from .pages import NULL
from .spec import Spec

if TYPE_CHECKING:
    from .step import Step

_AT_ONCE = 32
"""Pages that are quantised at a time, which takes several times their memory in fp32."""


class TailAppend:
    """Where the new rows of a step go in a group with a tail, found once for all layers."""

    def __init__(self, step: Step, spec: Spec, group: int) -> None:
        tail, size = spec.tails[group], spec.page_size
        assert tail is not None
        own = spec.groups[group]
        self._formats = own.formats
        tails, codes, fills, begun = ([np.zeros(0, t)] for t in (np.int32, np.int32, bool, bool))
        firsts, lengths = [], []
        for seq, count in step.counts():
            start, end = seq.kv_len, seq.kv_len + count
            first = start // size
            number = np.arange(first, -(-end // size) if count else first)
            tails.append(seq.tables[tail].view[number])
            codes.append(seq.tables[group].view[number])
            fills.append((number + 1) * size <= end)
            begun.append(number * size < start)
            firsts.append(first)
            lengths.append(end if count else 0)
        in_tail, filled = np.concatenate(tails), np.flatnonzero(np.concatenate(fills))
        self._num_scratch = 0 if (in_tail != NULL).all() else len(in_tail)
        # The pages that rows are written to: those of the tail, or of memory that is as long.
        pages = np.arange(len(in_tail), dtype=np.int32) if self._num_scratch else in_tail
        ends = np.cumsum([len(t) for t in tails])
        tables = [
            np.concatenate([np.full(n, NULL, np.int32), pages[a:b]])
            for n, a, b in zip(firsts, ends[:-1], ends[1:], strict=True)
        ]
        paged = step.to_paged(tables, np.array(lengths, np.int64))
        self._append = plan_append(step.q_indptr, paged, transform=own.transform)

        def index(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x.astype(np.int64)).to(paged.page_indices.device)

        old, kept = np.flatnonzero(np.concatenate(begun)), np.flatnonzero(in_tail)
        self._old, self._kept = (
            (index(old), index(in_tail[old])),
            (index(kept), index(in_tail[kept])),
        )
        self._filled = index(pages[filled]), index(np.concatenate(codes)[filled])

    def run(
        self, k: torch.Tensor, v: torch.Tensor, full: tuple[Codes, Codes],
        tails: tuple[Codes, Codes], params: Mapping[str, object],
    ) -> None:  # fmt: skip
        """`Step.append` of one layer: its pages of codes, and those of its tail."""
        k_tail, v_tail = tails
        assert isinstance(k_tail, torch.Tensor) and isinstance(v_tail, torch.Tensor)
        to_k, to_v = k_tail, v_tail
        if self._num_scratch:
            to_k, to_v = (t.new_zeros(self._num_scratch, *t.shape[1:]) for t in (k_tail, v_tail))
            for rows, tail in ((to_k, k_tail), (to_v, v_tail)):
                rows[self._old[0]] = tail[self._old[1]]
        self._append.run(k, v, to_k, to_v, **params)
        for rows, tail, pages, form in zip(
            (to_k, to_v), (k_tail, v_tail), full, self._formats, strict=True
        ):
            if self._num_scratch:
                tail[self._kept[1]] = rows[self._kept[0]]
            for begin, end in zip(*(x.split(_AT_ONCE) for x in self._filled), strict=True):
                _write(pages, end, rows[begin], form)


def _write(pages: Codes, at: torch.Tensor, rows: torch.Tensor, form: Format | None) -> None:
    """Put rows [n, page_size, num_kv_heads, dim] into pages, quantised where there is a format."""
    if not isinstance(pages, Stored):
        pages[at] = rows
        return
    assert form is not None
    new = form.quantize(rows)
    indexable(pages.codes)[at] = indexable(new.codes)
    pages.scales[at] = new.scales
    if pages.zeros is not None and new.zeros is not None:
        pages.zeros[at] = new.zeros
