"""The pages of one group: who uses them, which are free, and their memory.

::

    page 0        the null page: zeros, never written, stands for keys that no query reads
    1 .. n        each in one state:
                    free        in the stack of free pages
                    used        named by at least one page table: refs > 0
                    evictable   named by no table, but by the prefix index: refs == 0 and indexed
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError
from ..formats import Codes, Format, Stored
from ..ops.keys.columns import columns, latent_parts
from ..variants.ir.dtypes import CODES4, row_width
from .int_buffer import Ints
from .spec import Group

Layout = Literal["page", "layer"]
NULL = 0
NO_PAGES = np.zeros(0, np.int32)
_HUGE_FROM = 8 << 20


class Pages:
    """States and memory of a group's pages.

    refs: page tables that name each page. owner: the number of the index' node that holds it, -1
    for none. memory: the tensors that hold all pages; their first dim is the page. views: the two
    parts of `Group.part_dims` for each layer; rows: where the parts lie side by side, both as one.
    """

    def __init__(
        self, group: Group, num_pages: int, page_size: int, dtype: torch.dtype,
        device: torch.device, layout: Layout,
    ) -> None:  # fmt: skip
        self.num_pages = num_pages
        try:
            with torch.inference_mode(False):  # later writes may be made outside of it
                self._make_memory(group, page_size, dtype, device, layout)
            self.refs: NDArray[np.int32] = np.zeros(num_pages + 1, np.int32)
            self.owner: NDArray[np.int32] = np.full(num_pages + 1, -1, np.int32)
            self._free: NDArray[np.int32] = np.arange(num_pages, 0, -1, dtype=np.int32)
        except (OSError, MemoryError, OverflowError, RuntimeError, ValueError) as error:
            num_bytes = len(group.layers) * page_size * sum(group.row_bytes(dtype))
            raise InputError(
                f"num_pages={num_pages} of {num_bytes} bytes each, for {len(group.layers)} layers, "
                f"cannot be allocated on {device}: pass fewer ({error})"
            ) from error
        self.num_free = num_pages
        self.num_used = 0

    @property
    def num_evictable(self) -> int:
        """Pages that only the prefix index holds."""
        return self.num_pages - self.num_free - self.num_used

    # --- states -----------------------------------------------------------------------------------

    def take(self, count: int) -> NDArray[np.int32]:
        """Free pages, each for one table; lower numbers first where never used before."""
        assert count <= self.num_free
        begin = self.num_free - count
        taken: NDArray[np.int32] = self._free[begin : self.num_free][::-1].copy()
        self.num_free = begin
        self.num_used += count
        self.refs[taken] = 1
        return taken

    def hold(self, pages: Ints) -> None:
        """One more table names these pages, each once; the null page is ignored."""
        pages = pages[pages != NULL]
        self.num_used += self.count_unused(pages)
        self.refs[pages] += 1

    def release(self, pages: Ints) -> None:
        """One table less names these pages, each once; the null page is ignored."""
        if len(pages) == 1:  # what a window gives up with each page: ten times as fast
            self._release_one(int(pages[0]))
            return
        pages = pages[pages != NULL]
        self.refs[pages] -= 1
        unused = pages[self.refs[pages] == 0]
        self.num_used -= len(unused)
        # The last page of a table is the first to be taken again.
        self._give_back(unused[self.owner[unused] < 0])

    def _release_one(self, page: int) -> None:
        if page == NULL:
            return
        left = int(self.refs[page]) - 1
        self.refs[page] = left
        if not left:
            self.num_used -= 1
            if self.owner[page] < 0:
                self._free[self.num_free] = page
                self.num_free += 1

    def index(self, pages: Ints, node: int) -> None:
        """The index' node `node` holds these pages; the null page is ignored."""
        self.owner[pages[pages != NULL]] = node

    def drop(self, pages: Ints) -> None:
        """The index holds these pages no more; the null page is ignored."""
        pages = pages[pages != NULL]
        self.owner[pages] = -1
        self._give_back(pages[self.refs[pages] == 0])

    def evictable(self) -> NDArray[np.bool_]:
        """[num_pages + 1]: pages that only the index holds."""
        found: NDArray[np.bool_] = (self.refs == 0) & (self.owner >= 0)
        return found

    def count_unused(self, pages: Ints) -> int:
        """How many of these pages no table names; the null page is ignored."""
        return int((self.refs[pages[pages != NULL]] == 0).sum())

    def _give_back(self, pages: Ints) -> None:
        end = self.num_free + len(pages)
        self._free[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> Ints:
        """The free pages, for checks."""
        return self._free[: self.num_free]

    # --- memory -----------------------------------------------------------------------------------

    def _make_memory(
        self, group: Group, page_size: int, dtype: torch.dtype, device: torch.device, layout: Layout
    ) -> None:
        """Allocate the pages, and views of the two parts of `Group.part_dims` for each layer.

        "page": one tensor [pages, elements]; a page holds keys and values of all layers, layer
        after layer, so that copying it is one piece. "layer": two tensors for each layer. Scales
        and zero points of codes have tensors for each layer's keys and values in both layouts.
        """
        rows = self.num_pages + 1
        used, sizes = group.part_bytes(page_size, dtype)
        dims, formats = [*group.part_dims], [*group.formats]
        if group.has_latent_rows(dtype):
            dims, formats, dtype = [group.head_dim], [None], torch.uint8
            used = sizes = [page_size * row_width(group.head_dim, dtype)]
        elif group.is_one_row:
            dims, formats = [group.head_dim], formats[:1]
            used, sizes = [sum(used)], [sum(sizes)]
        dtypes = [dtype if f is None else f.dtype for f in formats]
        widths = [row_width(dim, own) for dim, own in zip(dims, dtypes, strict=True)]
        self.views: list[tuple[Codes, Codes]] = []
        self.rows: list[Codes] = []
        self.memory: list[torch.Tensor] = []
        books: dict[Format, torch.Tensor] = {}
        # Few operations know pairs of codes: their memory is of bytes.
        owners = [torch.uint8 if own is CODES4 else own for own in dtypes]
        if layout == "page":
            own = owners[0] if len({*owners}) == 1 else torch.uint8
            self.memory = [
                _zeros(rows, len(group.layers) * sum(sizes) // own.itemsize, own, device)
            ]
        for i in range(len(group.layers)):
            pair: list[Codes] = []
            for part, form in enumerate(formats):
                own, begin = owners[part], i * sum(sizes) + part * sizes[0]
                if layout == "page":
                    whole = self.memory[0].view(torch.uint8)
                    held = whole[:, begin : begin + used[part]].view(own)
                else:
                    held = _zeros(rows, sizes[part] // own.itemsize, own, device)
                    self.memory.append(held)
                    held = held[:, : used[part] // own.itemsize]
                view = held.unflatten(1, (page_size, group.num_kv_heads, widths[part]))
                if form is None:
                    pair.append(view)
                    continue
                if form.values.book and form not in books:
                    books[form] = torch.tensor(form.values.book, dtype=torch.float32, device=device)
                shape = group.numbers_shape(form, dims[part], page_size)
                pair.append(self._stored(view, form, books.get(form), shape))
            if len(pair) == 1:
                (row,), (latent, rotary) = pair, group.part_dims
                self.rows.append(row)
                if isinstance(row, torch.Tensor) and row.dtype is torch.uint8:
                    pair = [*latent_parts(row)]
                else:
                    pair = [columns(row, 0, latent), columns(row, latent, rotary)]
            self.views.append((pair[0], pair[1]))

    def _stored(
        self, codes: torch.Tensor, form: Format, book: torch.Tensor | None, shape: tuple[int, ...]
    ) -> Stored:
        """Codes with scales, and zero points, of `shape` in each page.

        Apart from the codes, so that the slots of all pages follow each other.
        """
        numbers = []
        for _ in range(2 if form.zero else 1):
            held = _zeros(codes.shape[0], math.prod(shape), form.scale_dtype, codes.device)
            self.memory.append(held)
            numbers.append(held.unflatten(1, shape))
        zeros = numbers[1] if form.zero else None
        return Stored(
            codes, numbers[0], zeros, book, group=form.channels, block=codes.shape[1] // shape[0],
            rotated=form.rotate,
        )  # fmt: skip


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, columns] of zeros; on the host in huge pages where the system gives them on request.

    Pages of all layers lie far apart for one layer: in pages of 4 KB, decoding over them took 1.11x
    of the time over layers apart, in huge ones 1.04x, and copies are three times as fast.
    """
    num_bytes = rows * columns * dtype.itemsize
    if device.type != "cpu" or num_bytes < _HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)
