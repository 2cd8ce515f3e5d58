"""Flat or cascade: whether keys that sequences share are read once for all of them.

The pages that a step's sequences share are looked for once for the same sequences: until one of
their tables changes before its end (`Sequence.version`), tables only grow behind what is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..ops.batch import BatchAttention
from ..ops.batch_base import BatchBase
from ..ops.cascade import CascadeAttention, cascade_levels
from ..ops.keys.level_pages import CascadeLevel
from ..ops.plan import Plan

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

    def __init__(self) -> None:
        self._shared: Shared | None = None
        self._decided: tuple[object, ...] = ()
        self._num_keys = 0
        self._cascades = False

    def levels(self, step: Step, group: int) -> list[CascadeLevel]:
        """The pages of a step as levels, the sequences' own last."""
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
        paged = step.paged(group)
        if isinstance(attention, BatchAttention):
            return attention.plan(step.q_indptr, paged, **mask_params)
        if not isinstance(attention, CascadeAttention):
            raise InputError(
                "attention must be an fa.BatchAttention or an fa.CascadeAttention, got "
                f"{type(attention).__name__}"
            )
        flat = [CascadeLevel(step.q_indptr, paged)]
        decided = (attention.number, _members(step))
        num_keys = int(paged.page_indptr[-1])
        if decided == self._decided and num_keys <= self._num_keys * _KEPT_GROWTH:
            levels = self.levels(step, group) if self._cascades else flat
            return attention.plan(levels, **mask_params)
        levels = self.levels(step, group)
        plan = attention.plan(flat, **mask_params)
        cascades = False
        if len(levels) > 1:
            expected = plan.predicted_ns
            plan = attention.plan(levels, **mask_params)
            cascades = plan.predicted_ns < expected
            if not cascades:
                plan = attention.plan(flat, **mask_params)
        self._decided, self._num_keys, self._cascades = decided, num_keys, cascades
        return plan


def _members(step: Step) -> tuple[object, ...]:
    """What the shared pages of a step depend on, and the rows that read them."""
    return tuple((seq.number, seq.version, count) for seq, count in step.counts())
