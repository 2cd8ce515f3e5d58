"""Flat or cascade: whether keys that sequences share are read once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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


def plan_levels(step: Step, group: int, min_shared_pages: int) -> list[CascadeLevel]:
    """The levels of a step; see `Step.levels`."""
    return cascade_levels(step.q_indptr, step.paged(group), min_shared_pages)


class StepPlanner:
    """Plans the steps of one group, and remembers which kind of plan served the same sequences."""

    def __init__(self) -> None:
        self._members: tuple[object, ...] = ()
        self._num_keys = 0
        self._shares = False

    def plan(
        self, step: Step, attention: BatchBase, group: int, mask_params: Mapping[str, object]
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
        members = (attention.number, *((s.number, n) for s, n in step.counts()))
        num_keys = int(paged.page_indptr[-1])
        same = members == self._members and num_keys <= self._num_keys * _KEPT_GROWTH
        if same and not self._shares:
            return attention.plan(flat, **mask_params)
        levels = plan_levels(step, group, 1)
        if same or len(levels) == 1:
            return attention.plan(levels, **mask_params)
        flat_plan = attention.plan(flat, **mask_params)
        cascade_plan = attention.plan(levels, **mask_params)
        self._members, self._num_keys = members, num_keys
        self._shares = cascade_plan.predicted_ns < flat_plan.predicted_ns
        return cascade_plan if self._shares else attention.plan(flat, **mask_params)
