"""Columns of rows as keys or values of their own: `v_in_k`, and the parts of latent rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import InputError
from ...formats import Codes, Formats, Stored
from ...variants.ir.dtypes import CODES4, row_dim, row_width


def check_values_in_keys(head_dim: int, head_dim_v: int, formats: Formats) -> None:
    """Raises InputError unless values can be the first columns of keys (v_in_k)."""
    if head_dim_v > head_dim:
        raise InputError(
            f"head_dim_v={head_dim_v} exceeds head_dim={head_dim}: with v_in_k values are the "
            "first head_dim_v columns of k"
        )
    keys, values = formats
    if keys != values:
        raise InputError("v_in_k=True: k and v are one tensor; give one kv_format, not a pair")
    if keys is None:
        return
    if keys.dtype is CODES4:
        raise InputError(
            f"v_in_k=True: {keys.name} packs channels i and i + head_dim / 2 into a byte, so the "
            "first columns cannot be read alone; use codes of 8 bits"
        )
    if keys.rotate:
        raise InputError("v_in_k=True: rows with rotate=True have no first columns; leave it out")


def latent_parts(rows: Tensor) -> tuple[Stored, Tensor]:
    """Latent rows of uint8 as the two tensors that they hold, views.

    They are those of FlashMLA's fp8 cache, which vLLM calls fp8_ds_mla: `BatchAttention` with
    v_in_k and kv_dtype=torch.uint8 reads them, `append_paged_latent` writes them.

    Args:
        rows: uint8 [..., num_kv_heads, 656], with a contiguous last dim and other strides that are
            multiples of 4.

    Returns:
        The latents [..., num_kv_heads, 512], an `fa.kv.Stored` of the format
        ``fa.kv.Format("e4m3", group=128)``, and the rotary parts [..., num_kv_heads, 64], bfloat16.

    Raises:
        InputError: another dtype, width or strides.

    Source: FlashMLA, https://github.com/deepseek-ai/FlashMLA, FP8 sparse decoding.

    Example:
        >>> latents, k_rope = fa.kv.latent_parts(pages)
    """
    if not isinstance(rows, Tensor) or rows.dtype is not torch.uint8 or row_dim(rows) != 576:
        has = (
            f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        )
        raise InputError(f"latent rows must be uint8 [..., num_kv_heads, 656], got {has}")
    codes, scales, k_rope = rows.split([512, 16, 128], -1)
    try:
        numbers, k_rope = scales.view(torch.float32), k_rope.view(torch.bfloat16)
    except RuntimeError as error:
        raise InputError(
            f"latent rows have strides {list(rows.stride())} and begin at byte "
            f"{rows.storage_offset()}: a contiguous last dim and multiples of 4 are needed"
        ) from error
    return Stored(codes.view(torch.float8_e4m3fn), numbers, group=128), k_rope


def columns(rows: Codes, first: int, count: int) -> Codes:
    """Channels [first, first + count) of rows, as a view.

    Raises InputError for rows of fewer channels, rotated rows, codes of 4 bits, and groups of
    channels that are cut.
    """
    if not isinstance(rows, Stored):
        if not isinstance(rows, Tensor) or not rows.dim() or row_dim(rows) < first + count:
            raise InputError(
                f"rows of keys must be a tensor [..., head_dim] of {first + count} columns or more"
            )
        if rows.dtype is not torch.uint8:
            return rows.narrow(-1, first, count)
        if (first, count) != (0, 512):
            raise InputError(
                f"latent rows have 512 values that can be read alone, not {count} from {first} on"
            )
        return rows.narrow(-1, 0, row_width(512, rows.dtype))
    dim, group = row_dim(rows.codes), rows.group
    if first + count > dim or rows.codes.dtype is CODES4 or rows.rotated:
        raise InputError(
            f"channels {first} to {first + count} of rows of {dim} cannot be read alone: codes of "
            "4 bits and rotated rows have no columns"
        )
    scales, zeros = rows.scales, rows.zeros
    if group is not None:
        if first % group or count % group:
            raise InputError(
                f"group={group} does not divide both {first} and {count}, the channels of the "
                "parts of rows; choose a group that does"
            )
        groups = slice(first // group, (first + count) // group)
        scales = _one_each(scales, dim // group)[..., groups]
        zeros = None if zeros is None else _one_each(zeros, dim // group)[..., groups]
    return replace(rows, codes=rows.codes.narrow(-1, first, count), scales=scales, zeros=zeros)


def _one_each(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """Scales or zero points, one a group, where one for all groups may be given."""
    return numbers.expand(*numbers.shape[:-1], groups)
