"""The rows of one rank as a batch: each run of rows is a request over the pages of its keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from ..errors import InputError
from ..ops.arguments.calls import Offset, host_array, offset_array
from ..ops.batch_base import BatchBase, Level, Params
from ..ops.keys.paged import Paged
from ..ops.keys.storage import Ragged, read_storage
from ..ops.launching.batch_run import Planned
from ..ops.planning.batch_params import bind_plan
from ..ops.planning.batch_plan import Pair, costed_mask, native_kinds
from ..planner.tiles import coefficients
from ..variants.binding import Bound
from ..variants.params import Dims
from ..variants.placed import Places
from .needs import PAGE_SIZE, Pages, cut, needed_pages
from .shares import GRANULE, TILE, Ints, Requests, Shares, deal, ranges

_MOST_TILES = 4096

Runs = tuple[Ints, Ints, Ints]
"""Of each run of rows the request, begin and end of packed rows."""


class KeySpans(NamedTuple):
    """Packed keys [begin[i], end[i]) of request[i], in pages of their own from first_page[i] on."""

    request: Ints
    begin: Ints
    end: Ints
    first_page: Ints
    num_pages: int


class Whole(NamedTuple):
    """The lengths of the batch of all ranks, and the sizes that params of the variant have."""

    lengths: _C.BatchLengths
    dims: Dims


class DealtBatch(BatchBase):
    """Plans and runs the rows of one rank; its params have the sizes of the whole batch."""

    _whole: Whole | None = None

    def _dims(self, lengths: _C.BatchLengths) -> Dims:
        return super()._dims(lengths) if self._whole is None else self._whole.dims

    def sharing(self, other: DealtBatch) -> DealtBatch:
        """This object with the kernels of another one with equal options."""
        self.share_kernels(other)
        return self

    @property
    def num_rows(self) -> int:
        """Query rows of the plan in force."""
        planned = self.in_force()
        assert isinstance(planned, Planned)
        return planned.batch.lengths.num_q_tokens

    def whole(self, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, q_offset: Offset) -> Whole:
        """The batch of all ranks, checked. Raises InputError."""
        rows, _rows_held = host_array("q_indptr", q_indptr)
        stored = read_storage(Ragged(kv_indptr), self.options.device)
        offset, _offset_held = offset_array(q_offset, rows[1] - 1)
        try:
            lengths = _C.BatchLengths(rows, stored.native, offset, ())
        except ValueError as error:
            raise InputError(str(error)) from None
        return Whole(lengths, super()._dims(lengths))

    def dealt(
        self, tiles: NDArray[Any], whole: Whole, params: Params, requests: Requests
    ) -> tuple[Shares, Pages]:
        """The rows of every rank, and the pages that they need. tiles: those of `tiles`.

        Raises ParamError, CompileError.
        """
        granules = np.full(whole.lengths.num_requests, GRANULE)
        invariant = self.options.batch_invariant
        if invariant:
            granules = self._whole_tiles(whole, params)
        shares = deal(tiles, requests, granules, invariant)
        return shares, needed_pages(tiles, requests, shares)

    def tiles(self, whole: Whole, params: Params) -> NDArray[Any]:
        """The tiles of all rows, as `shares.TILE`, and which keys they visit by the mask."""
        lengths = whole.lengths
        if not lengths.num_q_tokens:
            return np.zeros(0, TILE)
        bound = bind_plan(self._variant, whole.dims, params, self._observed.dtypes)
        known, mask, module = bound.structure, None, None
        held: object = None
        if known.ir.hook("mask_mod") is not None and all(
            bound.tensors[slot].is_cpu for slot in known.mask_slots[0]
        ):
            mask, held = costed_mask(known, bound.tensors, bound.scalars)
            prefill, few = self._pair(whole, bound)
            kernel = prefill or few
            assert kernel is not None
            module = kernel.module
        options = self._kernels.plan_options((None, None), self.options.num_kv_heads, 0)
        rows = 64 * -(-lengths.num_q_tokens // (64 * _MOST_TILES))
        tiles = _C.row_tiles(lengths, module, options, tile_q=rows, tile_kv=PAGE_SIZE, mask=mask)
        del held
        return np.frombuffer(tiles, TILE)

    def pair_s(self, whole: Whole, params: Params) -> float:
        """Seconds that a row and a key of all heads should take, on all workers."""
        bound = bind_plan(self._variant, whole.dims, params, self._observed.dtypes)
        options = self.options
        for kernel in self._pair(whole, bound):
            if kernel is not None:
                costs = coefficients(kernel.spec, options.target)
                rows = min(kernel.native.tile_q, whole.lengths.max_q_len * options.group_size)
                workers = torch.get_num_threads() if options.cpu else kernel.workers
                pair_ns = max(costs.pair_ns, costs.load_ns / max(1, rows))
                return options.num_q_heads * pair_ns / workers * 1e-9
        return 0.0

    def _pair(self, whole: Whole, bound: Bound) -> Pair:
        needs = self._kernels.needs(
            whole.lengths, self.options.group_size, 0, PAGE_SIZE, False, False, False
        )
        return self._kernels.pair(bound.structure, needs, self._variant.name)

    def _whole_tiles(self, whole: Whole, params: Params) -> Ints:
        """For each request the least rows that are whole tiles of the kernel that computes them."""
        bound = bind_plan(self._variant, whole.dims, params, self._observed.dtypes)
        kinds, group = native_kinds(self._pair(whole, bound)), self.options.group_size
        found = []
        for rows in whole.lengths.q_len:
            kind = kinds[int(rows * group <= self._kernels.few_rows)]
            packed = rows * group
            tile = packed if kind is None else kind.rows_of_tile(packed)
            found.append(max(1, math.lcm(tile, group) // group))
        return np.asarray(found, np.int64)

    def plan_rows(
        self, whole: Whole, requests: Requests, runs: Runs, pages: Pages, rank: int,
        params: Params, held_only: bool = False,
    ) -> None:  # fmt: skip
        """Plan rows of a rank over the pages that it needs; held_only: over those that it holds."""
        self._whole = whole
        request, begin, end = runs
        kv_len = np.diff(requests.kv_indptr)[request]
        count = np.diff(pages.indptr)[request]
        # No row sees a key of the pages that the rank lacks. An empty page is in their place: a
        # tile of the kernel may have some of it beside keys that are seen.
        needed = ranges(*pages.of(rank))
        place = np.full(int(pages.indptr[-1]), len(needed), np.int32)
        place[needed] = np.arange(len(needed), dtype=np.int32)
        if held_only:
            low, high = requests.kv_shards[rank : rank + 2]
            place[(pages.bounds[:-1] < low) | (pages.bounds[1:] > high)] = len(needed)
        indices = place[ranges(pages.indptr[request], pages.indptr[request + 1])]
        last = np.where(count > 0, kv_len - (count - 1) * pages.page_size, 0)
        offset = requests.q_offset[request] + begin - requests.q_indptr[request]
        storage = Paged(
            indptr_of(count), torch.from_numpy(indices).to(self.options.device),
            torch.from_numpy(last), pages.page_size,
        )  # fmt: skip
        parts, _held = None, None
        if self.options.batch_invariant:
            q_len = np.diff(requests.q_indptr)[request]
            parts, _held = host_array("whole_q_len", torch.from_numpy(q_len))
        stored = read_storage(storage, self.options.device)
        self._put_in_force(
            self._planned_now(
                indptr_of(end - begin),
                stored,
                (),
                None,
                torch.from_numpy(offset),
                params,
                whole_q_len=parts,
            )
        )

    def plan_states(
        self, whole: Whole, requests: Requests, shares: Shares, rank: int, params: Params
    ) -> None:
        """Plan the rows of `states.rows_at_keys` over the keys that a rank holds."""
        self._whole = whole
        request, low, high = held(requests.kv_shards, requests.kv_indptr, rank)
        begin, end = shares.of(rank)
        row_request = requests.q_indptr.searchsorted(begin, "right") - 1
        at = request.searchsorted(row_request)
        first, q_len = requests.q_indptr[request], np.zeros(len(request), np.int64)
        first[at], q_len[at] = begin, end - begin
        before = low - requests.kv_indptr[request]
        runs = request, first, first + q_len
        self._plan_after(before, Ragged(indptr_of(high - low)), requests, runs, params)

    def plan_heads(self, whole: Whole, requests: Requests, params: Params) -> None:
        """Plan all rows of the heads that the object is made for."""
        self._whole = whole
        stored = read_storage(Ragged(torch.from_numpy(requests.kv_indptr)), self.options.device)
        offset = torch.from_numpy(requests.q_offset)
        rows = torch.from_numpy(requests.q_indptr)
        self._put_in_force(self._planned_now(rows, stored, (), None, offset, params))

    def plan_step(
        self, whole: Whole, requests: Requests, runs: Runs, keys: KeySpans, params: Params
    ) -> None:
        """Plan rows over one span of keys of their request each."""
        self._whole = whole
        request = runs[0]
        at = keys.request.searchsorted(request)
        low, length = keys.begin[at] - requests.kv_indptr[request], (keys.end - keys.begin)[at]
        count = -(-length // PAGE_SIZE)
        indices = ranges(keys.first_page[at], keys.first_page[at] + count).astype(np.int32)
        storage = Paged(
            indptr_of(count), torch.from_numpy(indices).to(self.options.device),
            torch.from_numpy(length - (count - 1) * PAGE_SIZE), PAGE_SIZE,
        )  # fmt: skip
        self._plan_after(low, storage, requests, runs, params)

    def _plan_after(
        self, before: Ints, storage: Ragged | Paged, requests: Requests, runs: Runs, params: Params
    ) -> None:
        """Plan rows whose requests have keys elsewhere before those of the storage."""
        request, begin, end = runs
        rows = indptr_of(end - begin)
        groups, owner = host_array("q_indptr", rows)
        # Keys that are elsewhere count in positions.
        far = read_storage(Ragged(indptr_of(before)), self.options.device).elsewhere()
        levels = [Level(groups, None, far, (owner, owner))]
        near = read_storage(storage, self.options.device)
        offset = torch.from_numpy(requests.q_offset[request] + begin - requests.q_indptr[request])
        self._put_in_force(self._planned_now(rows, near, levels, None, offset, params))

    def plan_finish(self, whole: Whole, requests: Requests, rank: int, params: Params) -> None:
        """Plan the rows that a rank holds, over no keys: for merging their states."""
        runs = held(requests.q_shards, requests.q_indptr, rank)
        self.plan_no_keys(whole, requests, runs, params)

    def plan_no_keys(self, whole: Whole, requests: Requests, runs: Runs, params: Params) -> None:
        """Plan rows over no keys: for finalising their states."""
        self._whole = whole
        request, begin, end = runs
        none = read_storage(Ragged(indptr_of(0 * begin)), self.options.device)
        offset = torch.from_numpy(requests.q_offset[request] + begin - requests.q_indptr[request])
        self._put_in_force(
            self._planned_now(indptr_of(end - begin), none, (), None, offset, params)
        )


def runs_of(requests: Requests, begin: Ints, end: Ints) -> Runs:
    """Packed rows as runs of one request each."""
    _, begin, end = cut(begin, end, requests.q_indptr)
    return requests.q_indptr.searchsorted(begin, "right") - 1, begin, end


def held(shards: Ints, indptr: Ints, rank: int) -> Runs:
    """The tokens that a rank holds: the request, begin and end of packed tokens of each run."""
    _, begin, end = cut(shards[rank : rank + 1], shards[rank + 1 : rank + 2], indptr)
    return indptr.searchsorted(begin, "right") - 1, begin, end


def places(request: Ints, requests: Requests, device: torch.device) -> Places:
    """What hooks of a `variants.placed` variant read; request: of each run."""

    def on(values: Ints, dtype: type[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)

    return Places(
        placed_request=on(request, np.int32),
        placed_q_len=on(np.diff(requests.q_indptr), np.int32),
        placed_kv_len=on(np.diff(requests.kv_indptr), np.int32),
        placed_q_row=on(requests.q_indptr[:-1] - requests.q_offset, np.int64),
        placed_kv_slot=on(requests.kv_indptr[:-1], np.int64),
    )


def indptr_of(lengths: Ints) -> torch.Tensor:
    """The running sum of lengths, from 0 on."""
    out = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=out[1:])
    return torch.from_numpy(out)
