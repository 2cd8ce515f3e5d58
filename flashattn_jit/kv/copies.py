"""Contents of pages, moved: within a cache, to the host and back, in one native call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import _C
from .int_buffer import Ints

Saved = list[torch.Tensor]
"""The contents of some pages: one tensor [pages, elements] for each tensor of the memory."""


def copy_pages(memory: Sequence[torch.Tensor], sources: Ints, destinations: Ints) -> None:
    """Copy pages within a cache. No page may be both a source and a destination."""
    if not len(sources):
        return
    if memory[0].is_cpu:
        _copy(memory, sources, memory, destinations)
        return
    begin, end = (torch.from_numpy(x.astype(np.int64)) for x in (sources, destinations))
    for tensor in map(indexable, memory):
        tensor[end.to(tensor.device)] = tensor[begin.to(tensor.device)]


def save_pages(memory: Sequence[torch.Tensor], pages: Ints) -> Saved:
    """The contents of pages, on the host. A device is waited for."""
    if not memory[0].is_cpu:
        index = torch.from_numpy(pages.astype(np.int64)).to(memory[0].device)
        return [tensor[index].cpu() for tensor in map(indexable, memory)]
    saved = [
        torch.empty(len(pages), tensor.shape[1], dtype=tensor.dtype, device="cpu")
        for tensor in memory
    ]
    _copy(memory, pages, saved, np.arange(len(pages)))
    return saved


def load_pages(memory: Sequence[torch.Tensor], pages: Ints, saved: Saved, rows: Ints) -> None:
    """Write rows of `saved` into pages."""
    if not len(pages):
        return
    if memory[0].is_cpu:
        _copy(saved, rows, memory, pages)
        return
    index, row = (torch.from_numpy(x.astype(np.int64)) for x in (pages, rows))
    for tensor, contents in zip(map(indexable, memory), saved, strict=True):
        tensor[index.to(tensor.device)] = contents[row].to(tensor.device)


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """A view that torch indexes on devices: floats of 8 bits as bytes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _copy(
    sources: Sequence[torch.Tensor], rows: Ints, destinations: Sequence[torch.Tensor], to: Ints
) -> None:
    """Copy row rows[i] of each source to row to[i] of its destination, on the host."""
    by_bytes: dict[int, tuple[list[Ints], list[Ints]]] = {}
    for source, destination in zip(sources, destinations, strict=True):
        piece = source.shape[1] * source.element_size()
        addresses = by_bytes.setdefault(piece, ([], []))
        for tensor, index, found in ((source, rows, 0), (destination, to, 1)):
            step = tensor.stride(0) * tensor.element_size()
            addresses[found].append(index.astype(np.int64) * step + tensor.data_ptr())
    for piece, (begins, ends) in by_bytes.items():
        _C.copy_pieces(np.concatenate(begins), np.concatenate(ends), piece, torch.get_num_threads())
