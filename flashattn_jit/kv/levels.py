"""Flat or cascade: whether keys that sequences share are read once for all of them.

The pages that a step's sequences share are looked for once for the same sequences: until one of
their tables changes before its end (`Sequence.version`), tables only grow behind what is shared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError
from ..ops.append import check_applied_once
from ..ops.batch import BatchAttention
from ..ops.batch_base import BatchBase
from ..ops.cascade import CascadeAttention, cascade_levels
from ..ops.keys.level_pages import CascadeLevel
from ..ops.plan import Plan
from ..torch_modes import on_host
from ..variants.params import Dims, declared_params
from .reclaim import Mask, MaskPages
from .spec import Group

if TYPE_CHECKING:
    from .step import Step

_KEPT_GROWTH = 1.15
"""A decision is made anew when the keys of the step have grown by this factor."""


class Shared(NamedTuple):
    """Levels of shared pages, and how many pages of each sequence's table they hold."""

    members: tuple[object, ...]
    levels: list[CascadeLevel]
    counts: NDArray[Any]


class StepPlanner:
    """Plans the steps of one group, and remembers what the same sequences share."""

    def __init__(self, group: Group, mask: MaskPages) -> None:
        self._group, self._mask = group, mask
        self._known: WeakKeyDictionary[BatchBase, Mask] = WeakKeyDictionary()
        self._shared: Shared | None = None
        self._decided: tuple[object, ...] = ()
        self._num_keys = 0
        self._cascades = False

    def levels(self, step: Step, group: int) -> list[CascadeLevel]:
        """The pages of a step as levels, the sequences' own last, then those of the tail."""
        return self._with_tail(step, group, self._full_pages(step, group))

    def _with_tail(self, step: Step, group: int, levels: list[CascadeLevel]) -> list[CascadeLevel]:
        tail, formats = step.tail_pages(group), self._group.formats
        if tail is None:
            return levels
        own = CascadeLevel(step.q_indptr, tail, kv_format=(None, None))
        return [*(replace(level, kv_format=formats) for level in levels), own]

    def _full_pages(self, step: Step, group: int) -> list[CascadeLevel]:
        members = _members(step)
        shared = self._shared
        if shared is None or shared.members != members:
            paged = step.paged(group)
            *levels, own = cascade_levels(step.q_indptr, paged)
            lengths = np.diff(paged.page_indptr.numpy().astype(np.int64))
            counts = lengths - np.diff(own.storage.page_indptr.numpy())  # type: ignore[union-attr]
            self._shared = Shared(members, levels, counts)
            return [*levels, own]
        return [*shared.levels, CascadeLevel(step.q_indptr, step.own_pages(group, shared.counts))]

    def plan(
        self, step: Step, attention: BatchBase, group: int, mask_params: dict[str, Any]
    ) -> Plan:
        """See `Step.plan`."""
        if not isinstance(attention, BatchAttention | CascadeAttention):
            raise InputError(
                "attention must be an fa.BatchAttention or an fa.CascadeAttention, got "
                f"{type(attention).__name__}"
            )
        mask_params = self._params(step, attention, group, mask_params)
        paged = step.paged(group)
        if isinstance(attention, BatchAttention):
            if self._group.has_tail:
                raise InputError(
                    f"group {group} has scales of channels, so that its newest keys are a level of "
                    "their own, which fa.BatchAttention does not read: pass an fa.CascadeAttention"
                )
            return attention.plan(step.q_indptr, paged, **mask_params)

        def planned(levels: list[CascadeLevel]) -> Plan:
            plan = attention.plan(levels, **mask_params)
            for number in (attention.number, None):
                step.num_levels[group, number] = len(levels)
            return plan

        flat = self._with_tail(step, group, [CascadeLevel(step.q_indptr, paged)])
        decided = (attention.number, _members(step))
        num_keys = int(paged.page_indptr[-1])
        if decided == self._decided and num_keys <= self._num_keys * _KEPT_GROWTH:
            return planned(self.levels(step, group) if self._cascades else flat)
        levels = self.levels(step, group)
        plan = planned(flat)
        cascades = False
        if len(levels) > len(flat):
            expected = plan.predicted_ns
            plan = planned(levels)
            cascades = plan.predicted_ns < expected
            if not cascades:
                plan = planned(flat)
        self._decided, self._num_keys, self._cascades = decided, num_keys, cascades
        return plan

    @on_host
    def _params(
        self, step: Step, attention: BatchBase, group: int, given: dict[str, Any]
    ) -> dict[str, Any]:
        """The params of the mask, with those of the group as defaults.

        Raises InputError for an attention that is not for the group's layers. The tensors that its
        mask reads are compared when it is first planned with them.
        """
        own, found = self._group, attention.options
        names = ["num_kv_heads", "head_dim", "head_dim_v"]
        for name in [*names, "num_q_heads"] if self._mask.reads_head else names:
            if getattr(own, name) != getattr(found, name):
                raise InputError(
                    f"attention has {name}={getattr(found, name)}, but group {group} has "
                    f"{getattr(own, name)}: plan each group with an attention for its layers"
                )
        if own.transform is not None:
            check_applied_once(own.transform, attention.variant, "the attention's variant")
        unset = {
            d.name
            for d in declared_params(attention.variant)
            if d.param.name not in d.owner.__dict__
        }
        defaults = {
            name: value.to(found.device) if isinstance(value, torch.Tensor) else value
            for name, value in own.mask_params.items()
            if name in unset
        }
        mask_params = {**defaults, **given}
        counts = step.counts()
        dims = Dims(
            len(counts), found.num_q_heads, found.num_kv_heads,
            max((n for _, n in counts), default=0),
            max((seq.group_len(group) + n for seq, n in counts), default=0),
            found.head_dim, found.head_dim_v, found.device,
        )  # fmt: skip
        mask = self._mask.of(attention.variant, dims, mask_params)
        known = self._known.get(attention)
        if mask is None or (known is not None and mask.is_same(known)):
            return mask_params
        if not self._mask.is_like(mask):
            assert own.variant is not None
            raise InputError(
                f"the mask of attention ({attention.variant.name}) or a param of it is not that of "
                f"group {group} ({own.variant.name}), which decides what pages are kept: give "
                'fa.kv.Group the variant of its layers, with mask_params, or reclaim="never"'
            )
        self._known[attention] = mask
        return mask_params


def _members(step: Step) -> tuple[object, ...]:
    """What the shared pages of a step depend on, and the rows that read them."""
    return tuple((seq.number, seq.version, count) for seq, count in step.counts())
