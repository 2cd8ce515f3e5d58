"""A dense problem as the op would plan it, without running it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..errors import CompileError, InputError
from ..jit.module import find_kernel
from ..ops import _handles
from ..ops._dense import _geometry, bind_tensors, like_q_strides
from ..ops._launch import planned_call
from ..planner import Problem
from ..variants.bounds import MaskParams
from ..variants.dtypes import DTYPE_NAMES
from ..variants.params import Dims
from ..variants.spec import Bound


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes, strides and dtypes of a call; `q`, `k` and `v` may be on the meta device."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_len: tuple[int, ...]
    q_offset: tuple[int, ...]

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
            (d.q_len,) * d.batch, self.kv_len, d.num_q_heads, d.num_kv_heads, d.head_dim,
            d.head_dim_v, *(DTYPE_NAMES[t.dtype] for t in (self.q, self.k, self.v)),
        )  # fmt: skip

    def mask_params(self, bound: Bound) -> MaskParams:
        """What the mask reads."""
        d = self.dims
        return MaskParams(
            bound.tensors, bound.scalars, (d.q_len,) * d.batch, self.kv_len, self.q_offset,
            tuple(b * d.q_len for b in range(d.batch)), tuple(b * d.kv_len for b in range(d.batch)),
        )  # fmt: skip


def layout_of(
    q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None, q_offset: int | Tensor | str
) -> Layout:
    """The layout of a dense call's checked arguments."""
    batch, q_len, rows = q.shape[0], q.shape[2], k.shape[2]
    lengths = (rows,) * batch if kv_len is None else tuple(kv_len.tolist())
    if isinstance(q_offset, Tensor):
        offsets = tuple(q_offset.tolist())
    elif isinstance(q_offset, str):
        offsets = tuple(n - q_len for n in lengths)
    else:
        offsets = (q_offset,) * batch
    for name, values in (("kv_len", lengths), ("q_offset", offsets)):
        if len(values) != batch:
            raise InputError(f"{name} must be [batch={batch}], it has {len(values)} entries")
    return Layout(q, k, v, lengths, offsets)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The figures of a planned call."""

    num_work: int
    most_splits: int
    workspace_bytes: int
    total_cost: int
    critical_cost: int


def plan(layout: Layout, bound: Bound, name: str, target: str) -> Schedule | CompileError:
    """The schedule of the call, whose kernel is compiled if need be; or why it does not compile."""
    handle = _handles.remember(bound.handle, bound.ir, name)
    known = _handles.structure(handle)
    addresses, layouts = bind_tensors(known, bound.tensors)[:2]
    q, k, v = layout.q, layout.k, layout.v
    signature = (
        handle, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        like_q_strides(q, v.shape[3]), None, q.dtype, k.dtype, v.dtype, layout.kv_len,
        layout.q_offset, layouts, False, torch.get_num_threads(), target, None,
        bound.scalars if known.schedule_reads_scalars else None,
    )  # fmt: skip
    try:
        call = planned_call(_geometry(*signature), known, addresses)
    except CompileError as error:
        return error
    return Schedule(**{f.name: getattr(call, f.name) for f in fields(Schedule)})


def artifact_path(document: str) -> str | None:
    """Where the artifact of a kernel spec lies, when this process has loaded it."""
    module = find_kernel(document)
    return None if module is None else module.path
