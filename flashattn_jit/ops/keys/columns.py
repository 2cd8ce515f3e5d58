"""Columns of rows as keys or values of their own: `v_in_k`, and the parts of latent rows."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...errors import InputError
from ...formats import Codes, Formats, Stored
from ...variants.ir.dtypes import CODES4, row_dim


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


def columns(rows: Codes, first: int, count: int) -> Codes:
    """Channels [first, first + count) of rows, as a view.

    Raises InputError for rows of fewer channels, rotated rows, codes of 4 bits, and groups of
    channels that are cut.
    """
    if not isinstance(rows, Stored):
        if not isinstance(rows, Tensor) or not rows.dim() or rows.shape[-1] < first + count:
            raise InputError(
                f"rows of keys must be a tensor [..., head_dim] of {first + count} columns or more"
            )
        return rows.narrow(-1, first, count)
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
        scales = scales.narrow(-1, first // group, count // group)
        zeros = None if zeros is None else zeros.narrow(-1, first // group, count // group)
    return replace(rows, codes=rows.codes.narrow(-1, first, count), scales=scales, zeros=zeros)
