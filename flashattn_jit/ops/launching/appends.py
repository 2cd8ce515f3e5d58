"""The kernels that write new rows into pages: copies on devices, and rows that hooks change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _C
from ...codegen.spec import APPEND_TOKENS, CODE_DTYPES, UtilitySpec, append_kernel, on_cpu
from ...codegen.targets import compiled_target
from ...errors import InputError
from ...formats import Codes, Decoding, Stored
from ...variants.binding import Bound, Structure
from ...variants.ir.dtypes import KV_NAMES
from ...variants.ir.ir import reads_builtin
from ...variants.params import Dims
from ..arguments.calls import Layouts, address_of, bind_tensors
from ..arguments.new_rows import bytes_of_rows
from ..device.cuda import LaunchTensors, check_params
from ..device.plan_memory import launch
from .utility import Planned, UtilityWork, layouts, load_kernel, planned, run_utility

_UNIT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where new tokens go.

    keys: [num_tokens], the key that each becomes. page_indices: int32, on the device. content: what
    equal appends have equal. has_positions: whether the keys are the caller's choice.
    """

    lengths: _C.BatchLengths
    keys: NDArray[np.int64]
    page_indices: torch.Tensor
    content: tuple[object, ...]
    has_positions: bool


def copy_rows(places: Places, given: Sequence[torch.Tensor], target: str) -> None:
    """Copy rows of k and v into k_pages and v_pages, which are `given` in this order, on a device.

    Raises CompileError, LaunchError.
    """
    views = [bytes_of_rows(t) for t in given]
    shapes, unit_bytes, num_pages = layouts(views), _unit_bytes(views), views[2].shape[0]

    def work() -> UtilityWork:
        spec = UtilitySpec("append_paged_kv", compiled_target(target), unit_bytes)
        return UtilityWork(
            load_kernel(spec), places.lengths, _items(places), shapes, num_pages=num_pages
        )

    signature = ("append_paged_kv", shapes, unit_bytes, num_pages, *places.content)
    run_utility(signature, target, given[0].device, work, _launch_tensors(places, views))


_NUMBER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class BesideCodes(NamedTuple):
    """What an append into pages of codes writes beside them, or must know of them.

    scales, zeros: [num_pages, page_size, num_kv_heads, groups of channels], or without the last dim
    for one group, written; None where rows come at given scales. has_zeros: whether codes are not
    symmetric. codebook: fp32 [16].
    """

    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    has_zeros: bool = False
    codebook: torch.Tensor | None = None

    def layouts(self) -> tuple[_Layout, _Layout, _Layout]:
        """What quantizers of kernels read: sizes, and strides in bytes, of each tensor."""
        book = 0 if self.codebook is None else 16
        dtype = 1 if self.has_zeros else 0
        return _number_layout(self.scales, 0), _number_layout(self.zeros, dtype), ((book,), (4,))

    def addresses(self) -> tuple[int, ...]:
        """Where they are; 0 for what does not exist."""
        own = (self.scales, self.zeros, self.codebook)
        return tuple(map(address_of, own))

    def allocations(self, name: str) -> list[tuple[str, torch.Tensor, bool]]:
        """Those of `LaunchTensors`, of k or v."""
        own = (("scales", self.scales, True), ("zeros", self.zeros, True),
               ("codebook", self.codebook, False))  # fmt: skip
        return [(f"{name}_{what}", t, writes) for what, t, writes in own if t is not None]


class Side(NamedTuple):
    """Pages of codes of k or of v; without a decoding they have values as they are.

    given: whether rows are at scales that the pages have already.
    """

    decoding: Decoding | None = None
    given: bool = False

    def beside(self, pages: Codes) -> BesideCodes:
        """What an append into pages of this kind writes beside their codes."""
        if not isinstance(pages, Stored):
            return _NONE
        scales, zeros = (None, None) if self.given else (pages.scales, pages.zeros)
        return BesideCodes(scales, zeros, pages.zeros is not None, pages.codebook)


_NONE = BesideCodes()


def side_of(name: str, pages: Codes) -> Side:
    """The kind of pages, called `name`. Raises InputError."""
    if not isinstance(pages, Stored):
        return Side()
    given = not pages.has_own_scales
    if not given and pages.codes.dim() != 4:
        raise InputError(f"{name} must be pages, [num_pages, page_size, num_kv_heads, ...]")
    return Side(pages.decoding, given)


def _number_layout(numbers: torch.Tensor | None, dtype: int) -> _Layout:
    """dtype: the last stride where there are no numbers to write."""
    if numbers is None:
        return (0, 0, 0, 0, 0), (0, 0, 0, 0, dtype)
    # Dims of one entry may have any stride.
    steps = [
        s * numbers.itemsize if n > 1 else 0
        for n, s in zip(numbers.shape, numbers.stride(), strict=True)
    ]
    of_group = [] if numbers.dim() == 4 else [0]
    sizes = (*numbers.shape, *([1] * len(of_group)), 1)
    return sizes, (*steps, *of_group, 1 + _NUMBER_DTYPES.index(numbers.dtype))


class Launched(NamedTuple):
    """A launch on the host, the dims of its variant and the pages of its tokens."""

    call: _C.BatchCall
    dims: Dims
    page_indices: torch.Tensor


class Changes:
    """Appends of rows that the hooks of a variant change, on tensors of one form, on any target.

    given: k, v, k_pages and v_pages. codes: what k_pages and v_pages have beside their codes.
    target: of the kernels; name: the variant's.
    """

    def __init__(
        self,
        places: Places,
        given: Sequence[torch.Tensor],
        codes: tuple[BesideCodes, BesideCodes],
        target: str,
        name: str,
    ) -> None:
        k, v, k_pages, v_pages = given
        self._places, self._target, self._name = places, target, name
        self._head_dims = (k.shape[2], v.shape[2])
        self._dtypes = KV_NAMES[k_pages.dtype], KV_NAMES[v_pages.dtype]
        self._new_dtype = KV_NAMES[k.dtype] if {*self._dtypes} & {*CODE_DTYPES} else ""
        self._shapes = layouts([bytes_of_rows(t) for t in (k, v, k_pages, v_pages)])
        self._shapes += tuple(layout for side in codes for layout in side.layouts())
        self._heads, self._num_pages = k.shape[1], k_pages.shape[0]
        lengths = places.lengths
        self.dims = Dims(
            lengths.num_requests, self._heads, self._heads, lengths.max_q_len,
            lengths.max_kv_len, *self._head_dims, k.device,
        )  # fmt: skip
        self._planned: dict[tuple[object, ...], Planned] = {}

    def run(
        self, given: Sequence[torch.Tensor], codes: Sequence[BesideCodes], bound: Bound
    ) -> Launched | None:
        """Write k and v, changed, into k_pages and v_pages; `given` and `codes` as at the start.
        Returns None where the target is a device's, emulated or not.

        bound: the variant, bound to `dims`. Raises CompileError, LaunchError, InputError for a
        variant with more params than a kernel takes, or that reads `fa.q_row` where positions are
        given.
        """
        known = bound.structure
        params, own, held = bind_tensors(known, bound.tensors)
        found = self._planned.get((known, own))
        if found is None:
            found = self._planned[known, own] = self._plan(known, own)
        call, block = found
        scalars = tuple(bound.scalars)
        if block is not None:
            views, names = [bytes_of_rows(t) for t in given], known.tensor_names
            tensors = _launch_tensors(self._places, views, held, params, scalars, names, codes)
            launch(block, call, tensors, 1.0)
            return None
        k, v, k_pages, v_pages = [t.data_ptr() for t in given]
        beside = [address for side in codes for address in side.addresses()]
        indices = self._places.page_indices
        call.launch(
            k, k_pages, v_pages, k_pages, 0, 1.0, torch.get_num_threads(),
            (*params, k, v, k_pages, v_pages, *beside), scalars, 0, 0, indices.data_ptr(),
        )  # fmt: skip
        return Launched(call, self.dims, indices)

    def _plan(self, known: Structure, own: Layouts) -> Planned:
        if self._places.has_positions and reads_builtin(known.ir, "q_row"):
            raise InputError(
                f"{self._name} reads fa.q_row, which finds a token by its key where new tokens are "
                "the last keys, but positions give them others; index by kv_idx or by "
                "fa.kv_slot(b, kv_idx) instead"
            )
        shapes = (*own, *self._shapes)

        def work() -> UtilityWork:
            kernel = _kernel(
                known, self._head_dims, self._dtypes, self._target, self._name, self._new_dtype
            )
            return UtilityWork(
                kernel, self._places.lengths, _items(self._places), shapes, self._head_dims,
                self._heads, num_pages=self._num_pages, scalar_kinds=known.scalar_kinds,
            )  # fmt: skip

        signature = (
            known, self._head_dims, self._dtypes, self._new_dtype, shapes, self._num_pages,
            *self._places.content,
        )  # fmt: skip
        return planned(signature, self._target, self.dims.device, work)


@lru_cache(maxsize=256)
def _kernel(
    known: Structure,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str],
    target: str,
    name: str,
    new_dtype: str,
) -> _C.Module:
    if not on_cpu(target):
        check_params(known)
    spec = append_kernel(known.ir, head_dims, dtypes, target, name, new_dtype)
    return load_kernel(spec)


def _launch_tensors(
    places: Places,
    views: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor] = (),
    param_addresses: tuple[int, ...] = (),
    scalars: tuple[int | float, ...] = (),
    names: Sequence[str] = (),
    codes: Sequence[BesideCodes] = (),
) -> LaunchTensors:
    k, v, k_pages, v_pages = views
    beside = [address for side in codes for address in side.addresses()]
    own = [side.allocations(name) for name, side in zip(("k", "v"), codes, strict=False)]
    return LaunchTensors(
        k, k_pages, v_pages, k_pages, None, [*params, *views],
        (*param_addresses, *map(address_of, views), *beside), scalars,
        page_indices=places.page_indices, num_params=len(params),
        allocations=[
            *((name, tensor, False) for name, tensor in zip(names, params, strict=True)),
            ("k", k, False),
            ("v", v, False),
            ("k_pages", k_pages, True),
            ("v_pages", v_pages, True),
            ("page_indices", places.page_indices, False),
            *itertools.chain(*own),
        ],
    )  # fmt: skip


def _items(places: Places) -> torch.Tensor:
    """Work items of up to 16 new tokens that become keys in a row: request, rows, keys."""
    items = []
    begin = 0
    for b, new_len in enumerate(places.lengths.q_len):
        row = 0
        while row < new_len:
            own = places.keys[begin + row : begin + min(new_len, row + APPEND_TOKENS)]
            breaks = np.flatnonzero(np.diff(own) != 1)
            count = int(breaks[0]) + 1 if len(breaks) else len(own)
            first = int(own[0])
            items.append((b, 0, 1, row, row + count, first, first + count, -1))
            row += count
        begin += new_len
    return torch.tensor(items, dtype=torch.int32, device="cpu")


def _unit_bytes(views: Sequence[torch.Tensor]) -> int:
    """The largest unit, up to 16 bytes, that divides all addresses, strides and row lengths."""
    bits = _UNIT_BYTES
    for view in views:
        bits |= view.data_ptr() | view.shape[-1]
        for size, stride in zip(view.shape[:-1], view.stride(), strict=False):
            bits |= stride if size > 1 else 0
    return bits & -bits
