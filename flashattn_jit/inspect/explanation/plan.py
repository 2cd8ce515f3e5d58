"""The plan of a dense call that is explained, made as a call would make it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from ... import _C
from ...ops.arguments.calls import Requests, dense_lengths, read_lengths
from ...ops.launching.launches import plan_call
from ...ops.planning.batch_plan import Options
from ...planner.tiles import Problem
from ...variants.interval.tile_runs import MaskParams
from ...variants.ir.dtypes import DTYPE_NAMES
from ...variants.params import Dims
from ...variants.variant import Bound


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes, strides and dtypes of a call; `q`, `k` and `v` may be on the meta device."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: _C.BatchLengths

    @property
    def dims(self) -> Dims:
        """The sizes, for binding a variant."""
        batch, heads, q_len, head_dim = self.q.shape
        return Dims(
            batch, heads, self.k.shape[1], q_len, self.k.shape[2], head_dim, self.v.shape[3]
        )

    def problem(self) -> Problem:
        """The planner's view."""
        d = self.dims
        return Problem(
            (d.q_len,) * d.batch, tuple(self.lengths.kv_len), d.num_q_heads, d.num_kv_heads,
            d.head_dim, d.head_dim_v, *(DTYPE_NAMES[t.dtype] for t in (self.q, self.k, self.v)),
        )  # fmt: skip

    def mask_params(self, bound: Bound) -> MaskParams:
        """The params, lengths and positions that the mask reads."""
        d, lengths = self.dims, self.lengths
        return MaskParams(
            bound.tensors, bound.scalars, (d.q_len,) * d.batch, tuple(lengths.kv_len),
            tuple(lengths.q_offset), tuple(b * d.q_len for b in range(d.batch)),
            tuple(b * d.kv_len for b in range(d.batch)),
        )  # fmt: skip


def layout_of(
    q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None, q_offset: int | Tensor | str
) -> Layout:
    """The layout of a dense call. Raises InputError where kv_len or q_offset is wrong."""
    batch, q_len, rows = q.shape[0], q.shape[2], k.shape[2]
    read = read_lengths(batch, q_len, rows, kv_len, q_offset)
    return Layout(q, k, v, dense_lengths(batch, q_len, rows, *read))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The figures of a planned call, which can be copied and pickled; times are predicted."""

    num_work: int
    most_splits: int
    workspace_bytes: int
    total_ns: float
    critical_ns: float


def plan(layout: Layout, bound: Bound, name: str, target: str) -> Schedule:
    """The call's schedule; compiles its kernel if the cache lacks it. Raises CompileError."""
    d = layout.dims
    options = Options(
        d.num_q_heads, d.num_kv_heads, d.head_dim, d.head_dim_v, layout.q.dtype, layout.k.dtype,
        layout.v.dtype, d.device, target,
    )  # fmt: skip
    planned = plan_call(options, Requests(layout.lengths, d), bound, name).native
    return Schedule(**{f.name: getattr(planned, f.name) for f in fields(Schedule)})
