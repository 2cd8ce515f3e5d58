"""What the ops return, as shapes alone: their implementations while a call is traced.

They refuse nothing: a wrong shape is an error of the run, with the message of the ordinary call.
"""

from __future__ import annotations

import torch

from ._launch import like_q_strides, result_dtype

Result = tuple[torch.Tensor, torch.Tensor]


def dense_shapes(q: torch.Tensor, v: torch.Tensor, partial: bool, with_lse: bool) -> Result:
    """(out, lse) of a dense call; lse is empty unless asked for."""
    if q.dim() != 4 or v.dim() != 4:
        return plain_shape(q, v), lse_shape(q, True)
    shape, strides = (*q.shape[:3], v.shape[3]), like_q_strides(q, v.shape[3])
    out = q.new_empty_strided(shape, strides, dtype=result_dtype(q.dtype, partial))
    return out, lse_shape(q, with_lse)


def packed_shapes(q: torch.Tensor, v: torch.Tensor, partial: bool, with_lse: bool) -> Result:
    """(out, lse) of a packed call; lse is empty unless asked for."""
    return plain_shape(q, v).to(result_dtype(q.dtype, partial)), lse_shape(q, with_lse)


def plain_shape(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q's rows with v's last dim: of packed calls, and a guess for what the run will refuse."""
    return q.new_empty((*q.shape[:-1], *v.shape[-1:]))


def lse_shape(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """A number for each row of q, or nothing."""
    return q.new_empty(q.shape[:-1] if wanted else (0,), dtype=torch.float32)
