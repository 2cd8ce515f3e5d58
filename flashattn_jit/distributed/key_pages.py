"""Page tables of a batch whose pages are divided among ranks: page i is with rank i % num_ranks.

Pages of a request are counted from its first key on, through all levels of a cascade. So each rank
has every num_ranks-th page, and its keys are a request of their own with places (`KeyPlaces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from .. import _C
from ..errors import InputError
from ..ops.arguments.calls import Offset, host_array, offset_array
from ..ops.keys.level_pages import CascadeLevel
from ..ops.keys.paged import Paged
from ..ops.keys.storage import ReadStorage, read_indices, read_storage
from ..ops.planning.batch_plan import Options
from .shares import Ints, within


class OwnPages(NamedTuple):
    """The levels of a batch with the pages of one rank, and what is known of the whole batch."""

    levels: list[CascadeLevel]
    page_size: int
    lengths: _C.BatchLengths
    tables: tuple[Ints, ...]
    """Of each level q_indptr, tokens (none: -1), page_indptr and last_page_len: equal on ranks."""


def own_pages(
    levels: Sequence[CascadeLevel], q_offset: Offset, rank: int, num_ranks: int,
    options: Options,
) -> OwnPages:  # fmt: skip
    """The levels with the pages of a rank. Raises InputError, also for wrong tables of other ranks.

    levels: with the tables of all ranks; entries of page_indices for pages of others have no
    meaning.
    """
    read, arrays = [], []
    for i, level in enumerate(levels):
        where = "" if i == len(levels) - 1 else f"level {i}: "
        read.append(_read(level, where, options.device))
        rows = [host_array(f"{where}q_indptr", level.q_indptr)]
        if level.tokens is not None:
            rows.append(host_array(f"{where}tokens", level.tokens))
        arrays.append(rows)
    sizes = sorted({stored.page_size for stored in read})
    if len(sizes) > 1:
        raise InputError(
            f"levels have pages of {', '.join(map(str, sizes))} keys; where pages are divided "
            "among ranks all levels need one page_size"
        )
    (rows_of_own, owner) = arrays[-1][0]
    offset, _held = offset_array(q_offset, rows_of_own[1] - 1)
    try:
        lengths = _C.BatchLengths(
            rows_of_own, read[-1].native, offset,
            tuple(
                (rows[0][0], rows[1][0] if len(rows) > 1 else None, stored.native)
                for rows, stored in zip(arrays[:-1], read, strict=False)
            ),
            None, *options.query_bounds,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from None
    keys_before = np.zeros(lengths.num_q_tokens, np.int64)
    found, tables = [], []
    for i, (level, stored, rows) in enumerate(zip(levels, read, arrays, strict=True)):
        q_indptr, page_indptr, last = (_ints(x) for x in (rows[0][1], *stored.held))
        tokens = _ints(rows[1][1]) if len(rows) > 1 else np.arange(lengths.num_q_tokens)
        counts = np.diff(page_indptr)
        first = np.zeros(len(counts), np.int64)
        some = np.diff(q_indptr) > 0
        first[some] = keys_before[tokens[q_indptr[:-1][some]]]
        _check_whole(first, counts, sizes[0], i, len(levels))
        page = np.repeat(first // sizes[0], counts) + within(counts)
        own = page % num_ranks == rank
        group = np.repeat(np.arange(len(counts)), counts)
        own_counts = np.bincount(group[own], minlength=len(counts))
        ends_here = np.zeros(len(counts), bool)
        ends_here[counts > 0] = own[page_indptr[1:][counts > 0] - 1]
        own_last = np.where(ends_here, last, np.where(own_counts > 0, sizes[0], 0))
        assert stored.page_indices is not None
        at = torch.from_numpy(np.flatnonzero(own)).to(stored.page_indices.device)
        found.append(
            replace(
                level,
                storage=Paged(
                    torch.from_numpy(np.append(0, own_counts.cumsum())),
                    level.storage.page_indices[at],  # type: ignore[union-attr]
                    torch.from_numpy(own_last),
                    sizes[0],
                ),
            )
        )
        length = np.where(counts > 0, (counts - 1) * sizes[0] + last, 0)
        keys_before[tokens[q_indptr[0] : q_indptr[-1]]] += np.repeat(length, np.diff(q_indptr))
        tables += [q_indptr, tokens if len(rows) > 1 else np.array([-1]), page_indptr, last]
    del owner
    return OwnPages(found, sizes[0], lengths, tuple(tables))


def _read(level: CascadeLevel, where: str, device: torch.device) -> ReadStorage:
    paged = level.storage
    if not isinstance(paged, Paged):
        raise InputError(
            f"{where}storage must be an fa.Paged, got {type(paged).__name__}: ranks divide pages; "
            "fa.ContextParallel divides ragged keys"
        )
    indices = read_indices(f"{where}page_indices", paged.page_indices, device)
    # Those of other ranks may be -1.
    return read_storage(replace(paged, page_indices=indices.clamp(min=0)), device, where)


def _check_whole(first: Ints, counts: Ints, page_size: int, level: int, num_levels: int) -> None:
    """Raises InputError for groups whose keys begin inside of a page of all keys."""
    wrong = np.flatnonzero((first % page_size > 0) & (counts > 0))
    if len(wrong):
        own = level == num_levels - 1
        name = f"request {wrong[0]}" if own else f"level {level}: group {wrong[0]}"
        raise InputError(
            f"{name} has its first key at position {first[wrong[0]]}, which does not begin a page "
            f"of {page_size}: where pages are divided among ranks, levels share whole pages"
        )


def _ints(tensor: torch.Tensor) -> Ints:
    return tensor.numpy().astype(np.int64)
