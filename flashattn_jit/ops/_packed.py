"""The packed op: requests of any length laid end to end, q [Nq, Hq, D], k and v [Nk, Hkv, D]."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .. import _C
from . import _handles
from ._dense import bind_tensors, result_dtype, scalar_values
from ._launch import Geometry, launch, planned_call
from ._placement import on_cpu


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    q_offsets: torch.Tensor,
    return_lse: bool,
    partial: bool,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and compute (out, lse). lse is empty unless asked for."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]), dtype=result_dtype(q, partial))
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    packed_out(
        q, k, v, tensors, scalars, handle, scale, q_indptr, kv_indptr, q_offsets,
        partial, target, out, lse if return_lse else None,
    )  # fmt: skip
    return out, lse


def packed_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    q_offsets: torch.Tensor,
    partial: bool,
    target: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Compute into `out` [Nq, Hq, Dv] and, when given, `lse` [Nq, Hq] fp32."""
    known = _handles.structure(handle)
    q_starts, kv_starts = q_indptr.tolist(), kv_indptr.tolist()
    addresses, layouts, params = bind_tensors(known, tensors)
    values = scalar_values(known, scalars)
    num_threads = torch.get_num_threads() if on_cpu(target) else 0
    q_row0, kv_row0 = tuple(q_starts[:-1]), tuple(kv_starts[:-1])
    geometry = Geometry(
        handle,
        (q.dtype, k.dtype, v.dtype),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        _differences(q_starts),
        _differences(kv_starts),
        tuple(q_offsets.tolist()),
        len(q_row0),
        q_row0,
        kv_row0,
        q_row0,
        kv_row0,
        (
            (0, q.stride(1), q.stride(0)),
            (0, k.stride(1), k.stride(0)),
            (0, v.stride(1), v.stride(0)),
            (0, out.stride(1), out.stride(0)),
            (0, 0, 0) if lse is None else (0, lse.stride(1), lse.stride(0)),
        ),
        layouts,
        (0 if lse is None else _C.WRITE_LSE) | (_C.PARTIAL if partial else 0),
        num_threads,
        target,
        None,
        values if known.schedule_reads_scalars else None,
    )
    if not num_threads:
        from . import _device, _device_launch  # a process without a device need not have it

        call = _device_launch.LaunchTensors(
            q, k, v, out, lse, params, addresses, values,
            names=known.tensor_names, num_params=len(known.ir.tensors),
        )  # fmt: skip
        _device.run(geometry, known, call, scale)
        return
    planned = planned_call(geometry, known, addresses)
    launch(planned, q, k, v, out, lse, scale, addresses, values, num_threads)


def _differences(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(starts))
