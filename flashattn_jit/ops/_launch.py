"""From checked tensors to a launched kernel: problem, plan, module, call; remembered by structure.

`Geometry` is everything that a plan depends on. The first call with a geometry plans and, where
needed, compiles; a later one is a dictionary look-up and a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import _C
from ..codegen.spec import KernelSpec
from ..codegen.target import LANES
from ..errors import InputError
from ..jit.module import load_stepping
from ..planner.tiles import Problem, choose, item_rows, requests_of
from ..variants.dtypes import DTYPE_NAMES
from ..variants.ir import unscaled_integers
from ._handles import Structure
from ._recent import Recent

_MIN_CHUNK = 256  # keys; a shorter split costs more in merging than it gains
_L2_BYTES = _C.cache_sizes()[1]


class Geometry(NamedTuple):
    """All that a plan depends on. Strides are (request, head, row) in elements."""

    handle: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_len: int | tuple[int, ...]
    kv_len: int | tuple[int, ...]
    q_offset: int | tuple[int, ...]
    num_requests: int
    q_row0: int | tuple[int, ...]  # first rows of packed tensors; 0 when dense
    kv_row0: int | tuple[int, ...]
    q_token0: int | tuple[int, ...]
    kv_token0: int | tuple[int, ...]
    strides: tuple[tuple[int, int, int], ...]  # q, k, v, out, lse
    params: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # sizes, strides; then tables
    flags: int
    num_threads: int
    target: str
    # (strides, q block, kv block, number of blocks) of a block mask
    block_mask: tuple[tuple[int, ...], tuple[int, ...], int, int] | None
    scalars: tuple[int | float, ...] | None  # only where the schedule depends on them
    # Of CUDA and emulated targets. aligned: the base addresses are multiples of 16 bytes.
    device: torch.device | None = None
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A planned problem: its kernel, its schedule, and the native call that runs them."""

    spec: KernelSpec
    call: _C.Call
    workspace_bytes: int
    num_work: int
    partial_rows: int
    most_splits: int
    total_cost: int
    critical_cost: int


_calls: Recent[Geometry, PlannedCall] = Recent(1024)


def planned_call(geometry: Geometry, known: Structure, addresses: Sequence[int]) -> PlannedCall:
    """The planned call of a geometry, from memory or made now.

    `addresses` are those of the params and their tables in this call; planning does not read them.

    Raises:
        InputError: int8 keys or values, which no hook of the variant scales.
        CompileError: a new kernel was needed and the compiler failed.
    """
    planned = _calls.get(geometry)
    if planned is None:
        planned = _calls.keep(geometry, _plan(geometry, known, addresses))
    return planned


def _plan(g: Geometry, known: Structure, addresses: Sequence[int]) -> PlannedCall:
    features = ("block_mask",) if g.block_mask is not None else ()
    if wrong := unscaled_integers(known.ir.has, *g.dtypes[1:]):
        raise InputError(wrong)
    spec = choose(known.ir, planner_problem(g), g.target, features, known.name)
    _, module = load_stepping(requests_of(spec))
    call, schedule = native_call(
        g, known, spec, module, addresses,
        tile_q=item_rows(spec, _L2_BYTES),
        row_granule=LANES[spec.target] if spec.tile_kind == "prefill" else 1,
        min_chunk=_MIN_CHUNK,
        num_workers=g.num_threads,
    )  # fmt: skip
    return PlannedCall(
        spec,
        call,
        call.workspace_bytes,
        schedule["num_work"],
        schedule["partial_rows"],
        schedule["most_splits"],
        schedule["total_cost"],
        schedule["critical_cost"],
    )


def planner_problem(g: Geometry) -> Problem:
    """The planner's view of a geometry."""
    return Problem(
        _each(g.q_len, g.num_requests), _each(g.kv_len, g.num_requests),
        g.num_q_heads, g.num_kv_heads, g.head_dim, g.head_dim_v,
        DTYPE_NAMES[g.dtypes[0]], DTYPE_NAMES[g.dtypes[1]], DTYPE_NAMES[g.dtypes[2]],
    )  # fmt: skip


def native_problem(g: Geometry, known: Structure) -> _C.Problem:
    """The runtime's view of a geometry. Raises ValueError for what no kernel may be given."""
    return _C.Problem(
        num_requests=g.num_requests,
        num_q_heads=g.num_q_heads,
        num_kv_heads=g.num_kv_heads,
        head_dim=g.head_dim,
        head_dim_v=g.head_dim_v,
        q_len=g.q_len,
        kv_len=g.kv_len,
        q_row0=g.q_row0,
        kv_row0=g.kv_row0,
        q_offset=g.q_offset,
        q_token0=g.q_token0,
        kv_token0=g.kv_token0,
        q_stride=g.strides[0],
        k_stride=g.strides[1],
        v_stride=g.strides[2],
        out_stride=g.strides[3],
        lse_stride=g.strides[4],
        tensors=g.params,
        scalar_kinds=known.scalar_kinds,
        block_mask=g.block_mask,
    )


def native_call(
    g: Geometry,
    known: Structure,
    spec: KernelSpec,
    module: _C.Module,
    addresses: Sequence[int],
    *,
    tile_q: int,
    row_granule: int,
    min_chunk: int,
    num_workers: int,
    device: bool = False,
) -> tuple[_C.Call, _C.Schedule]:
    """A geometry's call and its schedule: see csrc/scheduler/schedule.h for the options."""
    problem = native_problem(g, known)
    # A block mask's full blocks are visited whatever the mask says of them.
    classify = known.costed_by_mask and g.block_mask is None
    schedule = _C.schedule(
        module if classify else None,
        problem,
        tile_q=tile_q,
        row_granule=row_granule,
        tile_kv=spec.tile_kv,
        min_chunk=min_chunk,
        num_workers=num_workers,
        share_heads=heads_share_tiles(g),
        classify=classify,
        device=device,
        tensors=tuple(addresses),
        scalars=g.scalars or (0,) * len(known.integer_scalars),
    )
    work, merge_work = schedule["work"], schedule["merge_work"]
    call = _C.Call(module, problem, work, merge_work, schedule["partial_rows"], g.flags)
    return call, schedule


def heads_share_tiles(g: Geometry) -> bool:
    """Whether the query heads of one key head share a tile: unless the blocks they visit differ."""
    return g.block_mask is None or g.block_mask[1][1] == 0


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * count


def launch(
    planned: PlannedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    addresses: tuple[int, ...],
    scalars: tuple[int | float, ...],
    num_threads: int,
    states: torch.Tensor | None = None,
) -> None:
    """Run a planned call on the tensors that it was planned for. The GIL is released meanwhile."""
    workspace = None
    if planned.workspace_bytes:
        workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device="cpu")
    address = q.data_ptr()
    planned.call.launch(
        address,
        # Without keys their address is 0, which kernels refuse; they will not read this one.
        k.data_ptr() or address,
        v.data_ptr() or address,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        scale,
        num_threads,
        addresses,
        scalars,
        0 if workspace is None else workspace.data_ptr(),
        0 if states is None else states.data_ptr(),
    )
