"""The plan of a dense call that is explained, made as a call would make it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ... import _C
from ...ops.arguments.calls import Requests
from ...ops.launching.launches import plan_call
from ...ops.planning.batch_plan import Options
from ...planner.tiles import Problem
from ...variants.interval.tile_runs import MaskParams
from ...variants.ir.dtypes import KV_NAMES
from ...variants.params import Dims
from ...variants.variant import Bound


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a call, the dtypes of q, k and v, and the lengths of its requests."""

    dims: Dims
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    lengths: _C.BatchLengths

    def problem(self) -> Problem:
        """The planner's view."""
        d = self.dims
        return Problem(
            (d.q_len,) * d.batch, tuple(self.lengths.kv_len), d.num_q_heads, d.num_kv_heads,
            d.head_dim, d.head_dim_v, *(KV_NAMES[dtype] for dtype in self.dtypes),
        )  # fmt: skip

    def mask_params(self, bound: Bound) -> MaskParams:
        """The params, lengths and positions that the mask reads."""
        d, lengths = self.dims, self.lengths
        return MaskParams(
            bound.tensors, bound.scalars, (d.q_len,) * d.batch, tuple(lengths.kv_len),
            tuple(lengths.q_offset), tuple(b * d.q_len for b in range(d.batch)),
            tuple(b * d.kv_len for b in range(d.batch)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """The figures of a planned call, which can be copied and pickled; times are predicted."""

    num_work: int
    most_splits: int
    workspace_bytes: int
    total_ns: float
    critical_ns: float


def plan(layout: Layout, bound: Bound, name: str, target: str) -> Schedule:
    """The call's schedule, over contiguous [batch, heads, keys, dim].

    Compiles its kernel if the cache lacks it. Raises CompileError.
    """
    d = layout.dims
    options = Options(
        d.num_q_heads, d.num_kv_heads, d.head_dim, d.head_dim_v, *layout.dtypes, d.device, target
    )
    planned = plan_call(options, Requests(layout.lengths, d), bound, name, heads_apart=True).native
    return Schedule(**{f.name: getattr(planned, f.name) for f in fields(Schedule)})
