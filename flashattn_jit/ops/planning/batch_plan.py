"""Planning: who computes what of a batch, for every kind of call.

A `Batch` is what is planned: requests, where their keys lie, which of them are visited. A
`Variation` is that batch planned for one structure of its variant and one alignment of its tensors:
the first is made by plan(), or by the first dense or packed call of its kind; another one by a run
whose params or tensors turn out to need other kernels. Making one has no effect on a device until
`commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ... import _C
from ...errors import InputError
from ...variants.binding import Bound, Structure
from ...variants.params import Dims
from ..arguments.calls import BlockMaskLayout, Call, bind_tensors
from ..keys.key_lists import KeyLists
from .kernels import Kernels, Options, Pair, native_kinds

# --- batches --------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """Where the keys of a batch lie.

    page_size: 0 when ragged. page_indices: of all levels, int32, on the device of the keys. pages:
    (least, greatest) page in use, None where that is not known. page_indptrs: of the requests, then
    of each level, for messages.
    """

    page_size: int
    page_indices: torch.Tensor | None
    pages: tuple[int, int] | None
    page_indptrs: Sequence[torch.Tensor] = ()


_RAGGED = Keys(0, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is planned.

    name: of the variant. num_levels: of shared keys. keeps_mask: the plan is for the params of the
    mask that it is made with, which stay; else for any, and a mask that reads tensors is costed by
    length.
    """

    kernels: Kernels
    name: str
    lengths: _C.BatchLengths
    dims: Dims
    keys: Keys = _RAGGED
    lists: KeyLists | None = None
    num_levels: int = 0
    block_mask: BlockMaskLayout | None = None
    keeps_mask: bool = True

    @property
    def options(self) -> Options:
        """Of the object that planned it."""
        return self.kernels.options


@dataclass(slots=True, eq=False)
class Variation:
    """A planned batch for one structure and one alignment.

    mask_tensors, mask_scalars: (slot, value) of what the mask reads, which a run does not change.
    block: the plan in device memory. launches: what runs of it launch, a `Launch` each.
    """

    batch: Batch
    known: Structure
    kernels: Pair
    native: _C.BatchPlan
    core: _C.BatchCall
    mask_params: frozenset[str]
    mask_tensors: tuple[tuple[int, torch.Tensor], ...]
    mask_scalars: tuple[tuple[int, int | float], ...]
    page_indices: torch.Tensor | None
    key_blocks: torch.Tensor | None
    classified: bool
    block: Any = None
    launches: dict[Call, Any] = field(default_factory=dict)
    pointers: tuple[int, int] = (0, 0)  # of page_indices and key_blocks

    def commit(self, state: Any) -> None:
        """Put the plan where its kernels run. state: the object's `DeviceState`, None on CPUs."""
        note_planned(self.kernels)
        if state is not None:
            for kernel in self.kernels:
                if kernel is not None:
                    state.prepare(kernel.module)
            self._stage(state)
            self.block = state.upload(self.core)
        self.page_indices = _with_address(self.page_indices)
        self.pointers = (_address(self.page_indices), _address(self.key_blocks))

    def _stage(self, state: Any) -> None:
        limits = self.batch.options.limits
        if self.page_indices is not None:
            indices, most = self.page_indices, self.page_indices.numel()
            if limits is not None:
                most = limits.max_pages
            if self.batch.options.cuda_graph:
                # What follows the batch's own entries is nobody's, and may be beyond the limits.
                indices = indices[: self.batch.lengths.num_page_indices]
            self.page_indices = state.stage("page_indices", indices, most)
        if self.key_blocks is not None:
            lists = self.batch.lists
            assert lists is not None
            self.key_blocks = state.stage("key_blocks", self.key_blocks, lists.entries)
        if self.batch.options.cuda_graph:
            names = self.known.ir.tensors
            self.mask_tensors = tuple(
                (slot, state.stage(names[slot].name, tensor, tensor.numel()))
                for slot, tensor in self.mask_tensors
            )

    def values(self, bound: Bound) -> tuple[Sequence[torch.Tensor], Sequence[int | float]]:
        """The tensors and numbers of a run: its own, but for those that the mask reads."""
        tensors: Sequence[torch.Tensor] = bound.tensors
        scalars: Sequence[int | float] = bound.scalars
        if self.mask_tensors:
            tensors = list(tensors)
            for slot, tensor in self.mask_tensors:
                tensors[slot] = tensor
        if self.mask_scalars:
            scalars = list(scalars)
            for slot, value in self.mask_scalars:
                scalars[slot] = value
        return tensors, scalars


def note_planned(kernels: Pair) -> None:
    """What is planned with counts as run, for `fa.record_manifest`.

    A later process plans with these again, whether or not a run then needs others.
    """
    for kernel in kernels:
        if kernel is not None and kernel.module is not None:
            kernel.module.note_run()


def _with_address(indices: torch.Tensor | None) -> torch.Tensor | None:
    """Where lists name no key of requests without pages, nothing is read, but from somewhere."""
    return indices if indices is None or indices.numel() else indices.new_zeros(1)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


# --- planning -------------------------------------------------------------------------------------


def vary(
    batch: Batch,
    bound: Bound,
    unaligned: bool,
    mask_values: Mapping[str, torch.Tensor | int | float] | None = None,
) -> Variation:
    """Plan a batch for what a variant was bound to.

    mask_values: what the mask reads by name, where the batch was planned before.

    Raises:
        InputError: the batch is beyond the limits.
        CompileError: a kernel was needed that no cache has, and the compiler failed.
    """
    options, kernels, lists = batch.options, batch.kernels, batch.lists
    known = bound.structure
    if not options.cpu:
        from ..device.cuda import check_params  # a process without a device need not have it

        check_params(known)
    mask = known.ir.hook("mask_mod")
    slots = known.mask_slots
    tensors, scalars = list(bound.tensors), list(bound.scalars)
    if mask_values is not None:
        for params, values, which in (
            (known.ir.tensors, tensors, slots[0]), (known.ir.scalars, scalars, slots[1]),
        ):  # fmt: skip
            for slot in which:
                values[slot] = mask_values.get(params[slot].name, values[slot])  # type: ignore
    blocks = batch.block_mask
    num_kv_heads = options.num_kv_heads
    if blocks is not None and blocks.head_stride != 0:
        num_kv_heads = options.num_q_heads  # heads that visit different blocks share no tile
    needs = kernels.needs(
        batch.lengths, options.num_q_heads // num_kv_heads, 0 if lists is None else lists.q_block,
        batch.keys.page_size > 0, batch.num_levels > 0, blocks is not None, unaligned,
    )  # fmt: skip
    pair = kernels.pair(known, needs, batch.name)
    classify = mask is not None and lists is None and _can_be_costed(batch, known, tensors)
    mask_args: dict[str, Any] = {}
    if classify:
        addresses, layouts, _held = bind_tensors(known, tensors)
        mask_args = {
            "tensors": addresses, "layouts": layouts, "scalars": tuple(scalars),
            "scalar_kinds": known.scalar_kinds, "mask_is_contiguous": known.mask_is_contiguous,
            "mask_reads_request": known.mask_reads_request,
        }  # fmt: skip
    try:
        native = _C.BatchPlan(
            batch.lengths,
            native_kinds(pair),
            lists=None if lists is None else lists.native(),
            classify=classify,
            limits=None if options.limits is None else options.limits.native(),
            num_levels=batch.num_levels,
            num_kv_heads=num_kv_heads,
            row_block=0 if blocks is None else blocks.q_block,
            **kernels.plan_options(pair),
            **mask_args,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    core = _C.BatchCall(
        native,
        batch.lengths,
        (pair[0] and pair[0].module, pair[1] and pair[1].module),
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v,
        key_block=lists.key_block if lists else 0,
        num_key_blocks=lists.entries if lists else 0,
    )
    kept = slots if batch.keeps_mask else ((), ())
    return Variation(
        batch, known, pair, native, core, bound.mask_params,
        tuple((slot, tensors[slot]) for slot in kept[0]),
        tuple((slot, scalars[slot]) for slot in kept[1]),
        batch.keys.page_indices, lists.key_blocks if lists else None, classify,
    )  # fmt: skip


def _can_be_costed(batch: Batch, known: Structure, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the interval form of the mask may say what the work costs.

    It says nothing of the blocks of a block mask, whose full ones are visited whatever the mask
    says. Tensors on a device are not read.
    """
    if batch.block_mask is not None:
        return False
    if not batch.keeps_mask:
        return known.costed_by_mask
    return all(tensors[slot].device.type == "cpu" for slot in known.mask_slots[0])


def mask_values(planned: Variation) -> dict[str, torch.Tensor | int | float]:
    """What the mask of a planned batch reads, by the name of its slot."""
    ir = planned.known.ir
    found: dict[str, torch.Tensor | int | float] = {
        ir.tensors[slot].name: tensor for slot, tensor in planned.mask_tensors
    }
    found.update((ir.scalars[slot].name, value) for slot, value in planned.mask_scalars)
    return found


__all__ = [
    "Batch",
    "Keys",
    "Variation",
    "mask_values",
    "note_planned",
    "vary",
]
