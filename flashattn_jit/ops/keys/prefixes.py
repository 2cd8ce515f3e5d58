"""Shared prefixes of page tables, as a trie over requests sorted by their pages.

In lexicographic order, requests with a common prefix are neighbours. The lengths of the prefixes
that neighbours share define the trie: a node is a run of requests with a common prefix, its
children are the runs inside it with longer prefixes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import InputError
from ..arguments.calls import host_array
from ..arguments.checks import INT32_MAX, check_int, check_readable
from .level_pages import CascadeLevel
from .paged import Paged
from .storage import read_storage

Ints = NDArray[np.int64]
_CPU = torch.device("cpu")
_MOST = 10**30


class Node(NamedTuple):
    """Requests [first, last) in sorted order, which share pages [begin, end) of their tables."""

    depth: int  # number of enclosing nodes
    first: int
    last: int
    begin: int
    end: int


def shared_prefixes(
    q_indptr: torch.Tensor, paged: Paged, min_shared_pages: int
) -> list[CascadeLevel]:
    """See `cascade_levels`."""
    min_shared_pages = check_int("min_shared_pages", min_shared_pages, -_MOST, _MOST)
    if min_shared_pages < 1:
        raise InputError(f"min_shared_pages={min_shared_pages} must be at least 1")
    indices, starts, rows = _read(q_indptr, paged)
    # The page of the last key stays the request's own, so that no request is without keys. Requests
    # without query tokens share nothing.
    whole = np.maximum(np.diff(starts) - 1, 0) * (np.diff(rows) > 0)
    order, prefixes = _sorted_prefixes(indices, starts, whole)
    nodes = _nodes(prefixes, min_shared_pages)
    shared = np.zeros(len(whole), np.int64)
    for node in nodes:
        members = order[node.first : node.last]
        shared[members] = np.maximum(shared[members], node.end)
    levels = [
        _level([n for n in nodes if n.depth == depth], order, indices, starts, rows, paged)
        for depth in range(max((n.depth for n in nodes), default=-1) + 1)
    ]
    begins, ends = (starts[:-1] + shared).tolist(), starts[1:].tolist()
    kept = [indices[begin:end] for begin, end in zip(begins, ends, strict=True)]
    own = Paged(
        torch.from_numpy(_indptr(np.diff(starts) - shared)),
        torch.from_numpy(np.concatenate([indices[:0], *kept])).to(paged.page_indices.device),
        paged.last_page_len,
        paged.page_size,
    )
    return [*levels, CascadeLevel(q_indptr, own)]


def _read(q_indptr: torch.Tensor, paged: Paged) -> tuple[NDArray[np.int32], Ints, Ints]:
    """page_indices in use, page_indptr and q_indptr, checked and on the host."""
    _, q_starts = host_array("q_indptr", q_indptr)
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
    if isinstance(paged.page_indices, torch.Tensor):  # read_storage refuses other types
        check_readable("page_indices", paged.page_indices)
        if paged.page_indices.is_meta:
            raise InputError("page_indices is on meta, which has no entries; pass the pages")
        paged = replace(paged, page_indices=paged.page_indices.cpu())
    stored = read_storage(paged, _CPU)
    starts, rows = stored.held[0].numpy().astype(np.int64), q_starts.numpy().astype(np.int64)
    if not len(rows) or len(starts) != len(rows):
        raise InputError(
            f"page_indptr has {len(starts)} entries, q_indptr {len(rows)}; both need one more than "
            "there are requests"
        )
    for name, values in (("page_indptr", starts), ("q_indptr", rows)):
        falling = np.flatnonzero(values[1:] < values[:-1])  # differences of any int64 wrap around
        if values[0] != 0 or len(falling):
            where = f"descends at request {falling[0]}" if len(falling) else "does not start at 0"
            raise InputError(f"{name} {where}: it must be a running sum from 0 on")
    if rows[-1] > INT32_MAX:
        raise InputError(f"q_indptr ends at {rows[-1]}, which does not fit 32 bits")
    assert stored.page_indices is not None
    indices = stored.page_indices.numpy()
    if starts[-1] > len(indices):
        raise InputError(
            f"page_indptr ends at {starts[-1]}, but page_indices has {len(indices)} entries"
        )
    return indices[: starts[-1]], starts, rows


def _sorted_prefixes(indices: NDArray[np.int32], starts: Ints, whole: Ints) -> tuple[Ints, Ints]:
    """Requests sorted by their first `whole` pages, and how many each shares with the one before.

    The second array has one entry more than there are requests; its first and last entries are 0.
    """
    prefixes = np.zeros(len(whole) + 1, np.int64)
    # Big-endian bytes compare as the pages do.
    text = indices.astype(">i4").tobytes()
    begins, ends = starts[:-1].tolist(), (starts[:-1] + whole).tolist()
    words = [text[4 * begin : 4 * end] for begin, end in zip(begins, ends, strict=True)]
    order = sorted(range(len(words)), key=words.__getitem__)
    for position, (one, other) in enumerate(itertools.pairwise(order), 1):
        least = min(ends[one] - begins[one], ends[other] - begins[other])
        differs = (
            indices[begins[one] : begins[one] + least]
            != indices[begins[other] : begins[other] + least]
        )
        first = int(differs.argmax()) if least else 0
        prefixes[position] = first if least and differs[first] else least
    return np.asarray(order, np.int64), prefixes


def _nodes(prefixes: Ints, least: int) -> list[Node]:
    """The nodes of the trie with at least `least` pages of their own, outer ones first."""
    # A node is a maximal run of neighbours that share at least `end` pages. A stack holds the open
    # runs (begin, pages); a run is closed at the first shorter shared prefix.
    runs: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []
    for position, prefix in enumerate(prefixes.tolist()):
        first = position - 1
        while stack and stack[-1][1] > prefix:
            first, pages = stack.pop()
            runs.append((first, position, pages))
        if prefix and (not stack or stack[-1][1] < prefix):
            stack.append((first, prefix))
    runs.sort(key=lambda r: (r[0], -r[1], r[2]))
    nodes: list[Node] = []
    around: list[Node] = []
    for first, last, pages in runs:
        while around and around[-1].last <= first:
            around.pop()
        begin = around[-1].end if around else 0
        if pages - begin >= least:
            nodes.append(Node(len(around), first, last, begin, pages))
            around.append(nodes[-1])
    return nodes


def _level(
    nodes: list[Node],
    order: Ints,
    indices: NDArray[np.int32],
    starts: Ints,
    rows: Ints,
    paged: Paged,
) -> CascadeLevel:
    """The level of the trie's nodes of one depth."""
    size = paged.page_size
    tokens, pages, counts = [], [], []
    for node in nodes:
        members = np.sort(order[node.first : node.last])
        lengths = rows[members + 1] - rows[members]
        ends = np.cumsum(lengths)
        tokens.append(np.arange(ends[-1]) + np.repeat(rows[members] - ends + lengths, lengths))
        begin = starts[members[0]]
        pages.append(indices[begin + node.begin : begin + node.end])
        counts.append(node.end - node.begin)
    device = paged.page_indices.device
    storage = Paged(
        torch.from_numpy(_indptr(counts)),
        torch.from_numpy(np.concatenate(pages)).to(device),
        torch.full((len(nodes),), size, dtype=torch.int32, device="cpu"),
        size,
    )
    q_indptr = torch.from_numpy(_indptr([len(t) for t in tokens]))
    return CascadeLevel(
        q_indptr, storage, torch.from_numpy(np.concatenate(tokens).astype(np.int32))
    )


def _indptr(lengths: Any) -> NDArray[np.int32]:
    out = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=out[1:])
    return out
