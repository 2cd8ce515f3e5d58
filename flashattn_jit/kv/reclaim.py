"""Which pages a mask can never read again, from its interval form.

A page is dead for the queries from `q_from` on if the mask is empty on the one box of these queries
and the page's keys. Once dead it stays dead, as later queries are a part of the box. The interval
form is sound, so a page that any later query reads is never called dead; it is exact for the
library's masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError, ParamError
from ..ops.arguments.checks import INT32_MAX, check_int
from ..ops.planning.batch_params import bind_plan
from ..variants.binding import Bound
from ..variants.interval.shifts import Shift, shift_of
from ..variants.interval.simplify import simplify
from ..variants.interval.terms import MAX_POSITION
from ..variants.interval.tile_runs import MaskParams, form_and_arguments
from ..variants.ir.ir import Graph, VariantIR, remap_slots, slot_order
from ..variants.params import Dims
from ..variants.variant import Variant, as_variant
from .int_buffer import Ints
from .spec import Group

Bools = NDArray[np.bool_]


class Mask(NamedTuple):
    """A mask, and the values that it reads. No graph: C++ text, or every key is kept."""

    graph: Graph | None
    text: str | None
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]

    def is_same(self, other: Mask) -> bool:
        """Whether both have one graph, equal numbers and the same tensors, whatever they hold."""
        return (
            self[:2] == other[:2]
            and other.scalars == self.scalars
            and len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        )

    def is_like(self, other: Mask) -> bool:
        """Whether both have one interval form over equal values, so that one judges for both."""
        if self.graph is None or other.graph is None:
            return self[:2] == other[:2]
        return (
            simplify(self.graph) == simplify(other.graph)
            and self.scalars == other.scalars
            and len(self.tensors) == len(other.tensors)
            and all(
                a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
                for a, b in zip(self.tensors, other.tensors, strict=True)
            )
        )


Own = tuple[Graph, dict[int, int], dict[int, int]]
"""The graph of a mask, with slots of its own, and the variant's slots of tensors and of scalars."""


def _own_graph(ir: VariantIR) -> Own | None:
    """That of a variant's mask; None where it has no graph."""
    graph = ir.hook("mask_mod")
    if graph is None:
        return None
    tensors, scalars = slot_order([graph])
    return remap_slots(graph, tensors, scalars), tensors, scalars


def _mask_of(bound: Bound, own: Own | None) -> Mask:
    """The mask of a bound variant, whatever its other hooks read."""
    if own is None:
        return Mask(None, bound.ir.cpp_hook("mask_mod"), (), ())
    graph, tensors, scalars = own
    return Mask(
        graph, None, tuple(bound.tensors[i] for i in tensors),
        tuple(bound.scalars[i] for i in scalars),
    )  # fmt: skip


class MaskPages:
    """The pages of a group's keys that its mask can still read.

    reclaims: whether the mask gives up any page at all, for queries below `max_kv_len`. reads_head:
    whether the mask depends on the head.
    """

    def __init__(self, group: Group, page_size: int, max_kv_len: int) -> None:
        """Raises InputError or ParamError if the mask cannot be judged for all sequences."""
        self._page_size, self.max_kv_len = page_size, max_kv_len
        self._form = None
        self._mask: Mask | None = None
        self._seen: tuple[VariantIR, Own | None] | None = None
        self.reclaims = self.reads_head = False
        variant = group.variant
        if variant is None or group.reclaim == "never":
            return
        heads, dim_v = group.num_q_heads, group.head_dim_v
        assert heads is not None and dim_v is not None
        dims = Dims(
            1, heads, group.num_kv_heads, 1, max_kv_len, group.head_dim, dim_v, torch.device("cpu")
        )
        try:
            bound = bind_plan(variant, dims, group.mask_params, {})
        except ParamError as error:
            raise ParamError(
                f"the mask of {variant.name} decides which pages stay, for all sequences: give "
                f'its params as mask_params of the fa.kv.Group, or reclaim="never" ({error})'
            ) from error
        self._mask = mask = _mask_of(bound, _own_graph(bound.ir))
        # Without a mask, with C++ text, which is not analysed, and with boxes that reach beyond the
        # positions of the interval form every page stays.
        if mask.graph is None or max_kv_len > MAX_POSITION + 1:
            return
        uses = simplify(mask.graph).uses
        if uses("b") and mask.tensors:
            raise InputError(
                f"the mask of {variant.name} reads tensors at the request b, and a sequence is "
                'another request in each step; pass reclaim="never" for this fa.kv.Group'
            )
        params = MaskParams(mask.tensors, mask.scalars)
        self._form, self._arguments, self._held = form_and_arguments(mask.graph, params)
        self.reads_head = uses("h")
        self._h = [(h, h) for h in range(heads)] if self.reads_head else [(0, heads - 1)]
        # Deadness is monotone: pages that die for any q_from are dead for the last one.
        pages = -(-max_kv_len // page_size)
        self.reclaims = self.count_read(max_kv_len - 1, pages) < pages

    def of(self, variant: Variant, dims: Dims, mask_params: Mapping[str, object]) -> Mask | None:
        """The mask of a variant; None where nothing is given up by the group's choice.

        Raises ParamError as `plan` of an attention.
        """
        if self._mask is None:
            return None
        bound, seen = bind_plan(variant, dims, mask_params, {}), self._seen
        if seen is None or seen[0] is not bound.ir:
            seen = self._seen = bound.ir, _own_graph(bound.ir)
        return _mask_of(bound, seen[1])

    def is_like(self, mask: Mask | None) -> bool:
        """Whether `of` gave the group's mask."""
        return self._mask is None or (mask is not None and self._mask.is_like(mask))

    def dead(self, q_from: int, kv_len: int) -> Bools:
        """[pages] of the keys below kv_len, rounded up: True where no query from q_from on reads.

        q_from below 0 counts as 0. The slots behind kv_len on the last page count as keys.
        """
        return ~self.read(q_from, 0, -(-kv_len // self._page_size))

    def read(self, q_from: int, first: int, last: int, q_end: int | None = None) -> Bools:
        """[last - first]: the pages from `first` to `last` that are not `dead`.

        q_end: the end of the queries instead of max_kv_len.
        """
        out = np.zeros(last - first, np.bool_)
        begins, ends = self._runs(q_from, first, last, q_end)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            out[begin:end] = True
        return out

    def count_read(self, q_from: int, pages: int, first: int = 0) -> int:
        """How many of the pages from `first` to `pages` are not `dead`."""
        begins, ends = self._runs(q_from, first, pages)
        order = begins.argsort(kind="stable")  # runs of several heads overlap
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        begins[1:] = np.maximum(begins[1:], ends[:-1])
        return int((ends - begins).sum())

    def _runs(
        self, q_from: int, first: int, last: int, q_end: int | None = None
    ) -> tuple[Ints, Ints]:
        """Where runs of pages that are read begin and end, counted from `first`; for each head."""
        if self._form is None or first >= last:
            return np.array([0]), np.array([max(0, last - first)])
        q_begin, size = max(0, q_from), self._page_size
        q_end = max(q_begin + 1, q_end or self.max_kv_len)
        _, begins, ends, _ = self._form.tile_runs(
            q_begin=q_begin, q_end=q_end, tile_q=q_end - q_begin, kv_begin=first * size,
            kv_end=last * size, tile_kv=size, b=[(0, INT32_MAX)], h=self._h, **self._arguments,
        )  # fmt: skip
        return np.frombuffer(begins, np.int64), np.frombuffer(ends, np.int64)

    def shift(self) -> Shift | None:
        """The shift of the mask; None where none is known."""
        if self._form is None or self._mask is None or self._mask.graph is None:
            return None
        return shift_of(simplify(self._mask.graph), self._mask.scalars)

    def given_up(self, q_from: int, pages: int) -> Bools:
        """[pages]: the first pages of a sequence that it need not keep, for queries from q_from on.

        Those are the dead ones that end by q_from: new tokens go to the page of q_from and to later
        ones, whatever the mask makes of their keys.
        """
        out = self.dead(q_from, pages * self._page_size)
        out[max(0, q_from) // self._page_size :] = False
        return out


def dead_pages(
    variant: Variant | None,
    q_from: int,
    kv_len: int,
    max_kv_len: int,
    page_size: int,
    *,
    num_q_heads: int = 1,
    num_kv_heads: int | None = None,
    **mask_params: object,
) -> torch.Tensor:
    """The pages that no query at the positions q_from to max_kv_len - 1 reads, in any head.

    Args:
        variant: the variant, whose mask decides; or a bare ``mask_mod``.
        q_from: the first position of a later query.
        kv_len: keys so far; the pages are those of the keys 0 to kv_len - 1, the last one whole.
        max_kv_len: positions that a sequence has at most.
        page_size: keys of a page.
        num_q_heads: heads that masks which depend on the head have.
        num_kv_heads: num_q_heads by default.
        **mask_params: the params that the mask reads.

    Returns:
        bool cpu tensor [ceil(kv_len / page_size)]. It is sound for every mask, and exact for those
        of the library: a False page may be dead only where the interval form is not exact.

    Raises:
        InputError: a number is out of range, or the mask reads tensors at the request.
        ParamError: a param of the mask is missing.

    Example:
        >>> fa.kv.dead_pages(fa.SlidingWindow(64), q_from=200, kv_len=200, max_kv_len=4096,
        ...                  page_size=16)  # keys below 137 are dead: 8 pages
    """
    page_size = check_int("page_size", page_size, 1, 1 << 16)
    max_kv_len = check_int("max_kv_len", max_kv_len, 1, INT32_MAX - page_size)
    kv_len = check_int("kv_len", kv_len, 0, max_kv_len)
    q_from = check_int("q_from", q_from, 0, max_kv_len)
    kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    group = Group(
        (0,), kv_heads, 8, num_q_heads=num_q_heads, variant=as_variant(variant),
        mask_params=mask_params,
    )  # fmt: skip
    return torch.from_numpy(MaskPages(group, page_size, max_kv_len).dead(q_from, kv_len))
