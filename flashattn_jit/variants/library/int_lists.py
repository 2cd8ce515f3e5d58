"""Checks lists of ints that functions of the library take, entry by entry."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from flashattn_jit.errors import InputError
from flashattn_jit.torch_modes import need_values


def int_list(name: str, values: object, why: str) -> list[int]:
    """The entries of a sequence, array or tensor of one dim as ints that fit 64 bits.

    why: what needs the values of a tensor, for the error message.

    Raises:
        InputError: `values` is something else, or an entry is no int (a float, a bool, text, None)
            or does not fit; the message names the entry.
    """
    if isinstance(values, Tensor):
        need_values(name, why, (values,))
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1:
            raise InputError(f"{name} must have one dim, got shape {list(values.shape)}")
        values = values.tolist()
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise InputError(
            f"{name} must be a sequence of ints or an int tensor of one dim, got "
            f"{type(values).__name__}"
        )
    return [_int(name, index, value) for index, value in enumerate(values)]


def _int(name: str, index: int, value: object) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InputError(
            f"{name}[{index}] must be an int, got {type(value).__name__}; convert it with int()"
        )
    if not -(2**63) <= number < 2**63:
        raise InputError(f"{name}[{index}] does not fit 64 bits")
    return number
