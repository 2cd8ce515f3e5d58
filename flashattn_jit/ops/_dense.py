"""The dense op: q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import _C
from ..errors import InputError
from ..variants.modes import need_values
from . import _check, _handles
from ._handles import Structure
from ._launch import Geometry, PlannedCall, launch, planned_call
from ._placement import on_cpu

_CPU = torch.device("cpu")

Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Sizes and strides of param tensors."""


def like_q_strides(q: torch.Tensor, head_dim_v: int) -> tuple[int, ...]:
    """Strides of a dense output in q's stride order, last dim contiguous, without gaps."""
    return _like(q.shape, q.stride(), head_dim_v)


def _like(shape: Sequence[int], strides: Sequence[int], last: int) -> tuple[int, ...]:
    order = sorted(range(3), key=lambda d: (strides[d], -d))
    out, reach = [0, 0, 0, 1], max(1, last)
    for d in order:
        out[d] = reach
        reach *= max(1, shape[d])
    return tuple(out)


_like_remembered = lru_cache(maxsize=4096)(_like)


def result_dtype(q: torch.Tensor, partial: bool) -> torch.dtype:
    """q's dtype; partial states are fp32."""
    return torch.float32 if partial else q.dtype


def dense(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The op: `attend`, with an empty lse unless it is asked for."""
    out, lse = attend(*arguments)
    return out, filled(lse, out)


def filled(lse: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An op's lse: empty, on the device of `like`, where there is none."""
    return like.new_empty(0, dtype=torch.float32) if lse is None else lse


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_offset: int,
    q_offsets: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    block_states: torch.Tensor | None,
    block_size: Sequence[int],
    return_lse: bool,
    partial: bool,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate and compute (out, lse); lse is None unless asked for."""
    # A constant takes 0.2 us less than asking a CPU tensor for its device.
    device = q.device if q.is_cuda else _CPU
    out = torch.empty_strided(
        (*q.shape[:3], v.shape[-1]),
        _like_remembered(q.shape, q.stride(), v.shape[-1]),
        dtype=result_dtype(q, partial),
        device=device,
    )
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device) if return_lse else None
    dense_out(
        q, k, v, tensors, scalars, handle, scale, q_offset, q_offsets, kv_len,
        block_states, block_size, partial, target, out, lse,
    )  # fmt: skip
    return out, lse


def dense_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    handle: int,
    scale: float,
    q_offset: int,
    q_offsets: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    block_states: torch.Tensor | None,
    block_size: Sequence[int],
    partial: bool,
    target: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Compute into `out` and, when given, `lse` [B, Hq, Sq] fp32."""
    known = _handles.structure(handle)
    lengths = (
        None
        if kv_len is None
        else _check.check_lengths("kv_len", kv_len, k.shape[0], 0, k.shape[2])
    )
    offsets = q_offset if q_offsets is None else tuple(q_offsets.tolist())
    addresses, layouts, params = bind_tensors(known, tensors)
    values = scalar_values(known, scalars)
    num_threads = torch.get_num_threads() if on_cpu(target) else 0
    mask = None
    if block_states is not None:
        mask = (tuple(block_states.shape), block_states.stride(), block_size[0], block_size[1])
    # The same information as the geometry, cheaper to make; a steady call stops here.
    signature = (
        handle, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(),
        None if lse is None else lse.stride(), q.dtype, k.dtype, v.dtype, lengths, offsets,
        layouts, partial, num_threads, target, mask,
        values if known.schedule_reads_scalars else None,
    )  # fmt: skip
    if not num_threads:
        from . import _device, _device_launch  # a process without a device need not have it

        call = _device_launch.LaunchTensors(
            q, k, v, out, lse, params, addresses, values, states=block_states,
            names=known.tensor_names, num_params=len(known.ir.tensors),
        )  # fmt: skip
        _device.run_signature(signature, _geometry, known, call, scale)
        return
    planned = _planned.get(signature)
    if planned is None:
        planned = planned_call(_geometry(*signature), known, addresses)
        if len(_planned) >= _KEPT_SIGNATURES:
            _planned.clear()
        _planned[signature] = planned
    launch(planned, q, k, v, out, lse, scale, addresses, values, num_threads, block_states)


_planned: dict[tuple[object, ...], PlannedCall] = {}
_KEPT_SIGNATURES = 4096


def _geometry(
    handle: int,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_stride: tuple[int, ...],
    k_stride: tuple[int, ...],
    v_stride: tuple[int, ...],
    out_stride: tuple[int, ...],
    lse_stride: tuple[int, ...] | None,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    lengths: tuple[int, ...] | None,
    offsets: int | tuple[int, ...],
    layouts: Layouts,
    partial: bool,
    num_threads: int,
    target: str,
    block_mask: tuple[tuple[int, ...], tuple[int, ...], int, int] | None,
    scalars: tuple[int | float, ...] | None,
) -> Geometry:
    """The geometry of a dense call: every request has the same rows, one after the other."""
    batch, num_q_heads, q_rows, head_dim = q_shape
    kv_rows = k_shape[2]
    return Geometry(
        handle=handle,
        dtypes=(q_dtype, k_dtype, v_dtype),
        num_q_heads=num_q_heads,
        num_kv_heads=k_shape[1],
        head_dim=head_dim,
        head_dim_v=v_shape[3],
        q_len=q_rows,
        kv_len=kv_rows if lengths is None else lengths,
        q_offset=offsets,
        num_requests=batch,
        q_row0=0,
        kv_row0=0,
        q_token0=tuple(b * q_rows for b in range(batch)),
        kv_token0=tuple(b * kv_rows for b in range(batch)),
        strides=tuple(
            (s[0], s[1], s[2])
            for s in (q_stride, k_stride, v_stride, out_stride, lse_stride or (0, 0, 0))
        ),
        params=layouts,
        flags=(0 if lse_stride is None else _C.WRITE_LSE) | (_C.PARTIAL if partial else 0),
        num_threads=num_threads,
        target=target,
        block_mask=block_mask,
        scalars=scalars,
    )


def bind_tensors(
    known: Structure, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], Layouts, Sequence[torch.Tensor]]:
    """Addresses and layouts of the params and of the min/max tables that their mask needs.

    The tensors themselves come third: whoever launches must hold them, a table may have no other
    owner.
    """
    expected = len(known.ir.tensors)
    if len(tensors) != expected:
        raise InputError(f"the variant reads {expected} tensors, got {len(tensors)}")
    if not tensors:
        return (), (), ()
    if any(t.is_neg() for t in tensors):  # lazy views, whose memory holds the other sign
        tensors = [t.resolve_neg() for t in tensors]
    if known.tables:
        from ..variants.range_table import build_tables  # few masks need it

        tensors = [*tensors, *build_tables(known.tables, tensors)]
    addresses = tuple([t.data_ptr() if t.numel() else 0 for t in tensors])
    if 0 in addresses:
        need_values("a tensor of the variant", "a kernel reads them", tensors)
    return (
        addresses,
        tuple([(tuple(t.shape), t.stride()) for t in tensors]),
        tensors,
    )


def scalar_values(known: Structure, scalars: torch.Tensor) -> tuple[int | float, ...]:
    """The scalar params as Python numbers of their declared kinds."""
    kinds = known.integer_scalars
    if not kinds:
        return ()
    values = scalars.tolist()
    if len(values) != len(kinds):
        raise InputError(f"the variant reads {len(kinds)} scalars, got {len(values)}")
    return tuple([int(x) if whole else x for whole, x in zip(kinds, values, strict=True)])
