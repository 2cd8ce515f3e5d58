"""Appends of one plan that C repeats: of rows that hooks change or quantise, on the host.

The layers of a model append to pages of one layout. The checks and look-ups of `AppendPlan.run` are
Python and take longer than the kernel does for a token of each of 64 requests (see also
`launching/repeats.py`). Here C compares the tensors and what the variant is bound to, and launches:
int8 took 1.7 times as long as bf16, and takes 0.75 (`python -m benchmarks.kv.quantised --only
append`, cpu:avx512_fp16).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch

from ... import _C
from ...formats import Codes, Stored
from ...variants.binding import Bound, captured
from ...variants.ir.dtypes import CODES4
from ...variants.variant import Variant
from .appends import Launched
from .repeats import Notes, example_of

_KEPT = 4
_Kind = tuple[object, ...] | None


class _Repeat(NamedTuple):
    kinds: tuple[_Kind, _Kind]
    variant: Variant
    native: _C.RepeatedAppend


class RepeatedAppends:
    """The runs of one plan that were made before. Threads may share it."""

    __slots__ = ("_notes", "_repeats")

    def __init__(self) -> None:
        self._repeats: tuple[_Repeat, ...] = ()
        self._notes = Notes()

    def run(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: Codes,
        v_pages: Codes,
        params: Mapping[str, object],
    ) -> bool:
        """Whether it was like an earlier run; then the rows are written. Takes any objects."""
        if not self._repeats or torch.compiler.is_dynamo_compiling():
            return False
        kinds = kind_of(k_pages), kind_of(v_pages)
        given = _given(k, v, k_pages, v_pages)
        return any(
            repeat.kinds == kinds and repeat.native.run(repeat.variant, given, params)
            for repeat in self._repeats
        )

    def note(
        self,
        form: Hashable,
        given: tuple[torch.Tensor, torch.Tensor, Codes, Codes],
        variant: Variant,
        params: Mapping[str, object],
        bound: Bound,
        launched: Launched | None,
    ) -> None:
        """Notes a run that was not repeated; the second and third like it are kept.

        form: what their tensors have in common. bound: `variant`, bound to `params`.
        """
        key = (form, bound.structure, bound.scalars, *params)
        if launched is None or not self._notes.count(key):
            return
        read = captured(variant, launched.dims, {}, params, bound)
        if read is None:
            return
        k_pages, v_pages = given[2:]
        native = _C.RepeatedAppend(
            launched.call,
            [None if t is None else _layout(t) for t in _given(*given)],
            packed=(_is_packed(k_pages), _is_packed(v_pages)),
            params=[_layout(t) for t in bound.tensors],
            captured=read,
            page_indices=launched.page_indices,
            address=launched.page_indices.data_ptr(),
            scalars=tuple(bound.scalars),
        )
        if native.is_readable:
            made = _Repeat((kind_of(k_pages), kind_of(v_pages)), variant, native)
            self._repeats = (made, *self._repeats[: _KEPT - 1])


def kind_of(pages: Codes) -> _Kind:
    """What pages of codes are besides their tensors."""
    if not isinstance(pages, Stored):
        return None
    has_zeros, has_book = pages.zeros is not None, pages.codebook is not None
    return (pages.group, pages.block, bool(pages.rotated), has_zeros, has_book)


def _given(
    k: torch.Tensor, v: torch.Tensor, k_pages: Codes, v_pages: Codes
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a run in the order of `_C.RepeatedAppend`."""
    return (k, v, codes_of(k_pages), codes_of(v_pages), *_beside(k_pages), *_beside(v_pages))


def codes_of(pages: Codes) -> torch.Tensor:
    """The tensor of pages, or of their codes."""
    return pages.codes if isinstance(pages, Stored) else pages


def _beside(pages: Codes) -> tuple[torch.Tensor | None, ...]:
    if not isinstance(pages, Stored):
        return (None, None, None)
    return (pages.scales, pages.zeros, pages.codebook)


def _is_packed(pages: Codes) -> bool:
    return isinstance(pages, Stored) and pages.codes.dtype == CODES4


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    return tuple(tensor.shape), tensor.stride(), example_of(tensor.dtype)
