"""The dense op: q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv] on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _C
from ..errors import InputError
from ..variants.bounds import build_tables
from . import _check, _handles
from ._handles import Structure
from ._launch import Geometry, launch, planned_call

_NO_LSE_STRIDE = (0, 0, 0)


def like_q_strides(q: torch.Tensor, head_dim_v: int) -> tuple[int, ...]:
    """Strides of a dense output in q's stride order, last dim contiguous, without gaps."""
    shape = (*q.shape[:3], head_dim_v)
    order = sorted(range(3), key=lambda d: (q.stride(d), -d))
    strides, reach = [0, 0, 0, 1], max(1, head_dim_v)
    for d in order:
        strides[d] = reach
        reach *= max(1, shape[d])
    return tuple(strides)


def result_dtype(q: torch.Tensor, partial: bool) -> torch.dtype:
    """q's dtype; partial states are fp32."""
    return torch.float32 if partial else q.dtype


def dense(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and compute (out, lse). lse is empty unless asked for."""
    out = torch.empty_strided(
        (*q.shape[:3], v.shape[-1]),
        like_q_strides(q, v.shape[-1]),
        dtype=result_dtype(q, partial),
    )
    lse = torch.empty(q.shape[:3] if return_lse else 0, dtype=torch.float32)
    dense_out(
        q, k, v, tensors, scalars, handle, scale, q_offset, q_offsets, kv_len,
        block_states, block_size, partial, target, out, lse if return_lse else None,
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
    batch, num_q_heads, q_rows, head_dim = q.shape
    num_kv_heads, kv_rows = k.shape[1], k.shape[2]
    lengths = (
        kv_rows if kv_len is None else _check.check_lengths("kv_len", kv_len, batch, 0, kv_rows)
    )
    offsets = q_offset if q_offsets is None else tuple(q_offsets.tolist())
    addresses, layouts, _alive = bind_tensors(known, tensors)
    values = scalar_values(known, scalars)
    num_threads = torch.get_num_threads()
    packed = (0,) if batch == 1 else tuple(range(0, batch * q_rows, q_rows)) if q_rows else 0
    packed_kv = (0,) if batch == 1 else tuple(range(0, batch * kv_rows, kv_rows)) if kv_rows else 0
    geometry = Geometry(
        handle,
        (q.dtype, k.dtype, v.dtype),
        num_q_heads,
        num_kv_heads,
        head_dim,
        v.shape[3],
        q_rows,
        lengths,
        offsets,
        batch,
        0,
        0,
        packed,
        packed_kv,
        (
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            out.stride()[:3],
            _NO_LSE_STRIDE if lse is None else lse.stride(),
        ),
        layouts,
        (0 if lse is None else _C.WRITE_LSE) | (_C.PARTIAL if partial else 0),
        num_threads,
        target,
        None
        if block_states is None
        else (tuple(block_states.shape), block_states.stride(), block_size[0], block_size[1]),
        values if known.schedule_reads_scalars else None,
    )
    planned = planned_call(geometry, known, addresses)
    launch(planned, q, k, v, out, lse, scale, addresses, values, num_threads, block_states)


def bind_tensors(
    known: Structure, tensors: Sequence[torch.Tensor]
) -> tuple[
    tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], Sequence[torch.Tensor]
]:
    """Addresses and layouts of the params and of the min/max tables that their mask needs.

    The tensors themselves come third: whoever launches must hold them, a table may have no other
    owner.
    """
    expected = len(known.ir.tensors)
    if len(tensors) != expected:
        raise InputError(f"the variant reads {expected} tensors, got {len(tensors)}")
    if not tensors:
        return (), (), ()
    if known.tables:
        tensors = [*tensors, *build_tables(known.tables, tensors)]
    return (
        tuple([t.data_ptr() if t.numel() else 0 for t in tensors]),
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
