"""Wrong values of q_offset and kv_len: one table for calls of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.ops.launching import launches

INDPTR = torch.tensor([0, 3, 6])
DIMS = {"batch": 2, "num_q_heads": 2, "num_kv_heads": 2, "q_len": 3, "kv_len": 3, "head_dim": 16,
        "head_dim_v": 16}  # fmt: skip
SHAPE = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 16, "q_dtype": torch.float32}


def attention(**given: Any) -> object:
    q = torch.zeros(2, 2, 3, 16)
    return fa.attention(q, q, q, fa.Causal(), **given)


def varlen(**given: Any) -> object:
    q = torch.zeros(6, 2, 16)
    return fa.varlen_attention(q, q, q, INDPTR, INDPTR, fa.Causal(), **given)


def batch(**given: Any) -> object:
    return fa.BatchAttention(fa.Causal(), **SHAPE).plan(INDPTR, fa.Ragged(INDPTR), **given)


def cascade(**given: Any) -> object:
    levels = [fa.CascadeLevel(INDPTR, fa.Ragged(INDPTR))]
    return fa.CascadeAttention(fa.Causal(), **SHAPE).plan(levels, **given)


def explain(**given: Any) -> object:
    return fa.Causal().explain(dims=DIMS, **given)


CALLS = (attention, varlen, batch, cascade, explain)
OFFSETS: dict[str, tuple[Any, str]] = {
    "text": ("start", r'q_offset must be an int, a tensor \[\w+\] or "end", got \'start\''),
    "empty text": ("", r'q_offset must be an int, a tensor \[\w+\] or "end", got \'\''),
    "float": (1.5, r'q_offset must be an int, a tensor \[\w+\] or "end", got float'),
    "bool": (True, r'q_offset must be an int, a tensor \[\w+\] or "end", got bool'),
    "None": (None, r'q_offset must be an int, a tensor \[\w+\] or "end", got NoneType'),
    "list": ([0, 1], r'q_offset must be an int, a tensor \[\w+\] or "end", got list'),
    "array": (np.zeros((2, 2)), "q_offset=<ndarray> is outside of"),
    "high": (2**30 + 1, r"q_offset=1073741825 is outside of \[-2\*\*30, 2\*\*30\]"),
    "low": (-(2**30) - 1, r"q_offset=-1073741825 is outside of \[-2\*\*30, 2\*\*30\]"),
    "huge": (2**70, r"q_offset=1180591620717411303424 is outside of"),
    "numpy's": (np.int64(2**40), r"q_offset=1099511627776 is outside of"),
    "too many": (
        torch.zeros(3, dtype=torch.int64),
        r"q_offset (must be \[batch=2\]|has 3 entries)",
    ),
    "too few": (torch.zeros(1, dtype=torch.int64), r"q_offset (must be \[batch=2\]|has 1 entries)"),
    "no dim": (torch.tensor(1), r"q_offset must be .*, got [(\[][)\]]"),
    "two dims": (torch.zeros(2, 1, dtype=torch.int64), r"q_offset must be .*, got [(\[]2, 1[)\]]"),
    "floats": (
        torch.zeros(2),
        r"q_offset must be an int32 or int64 cpu tensor, got torch\.float32",
    ),
    "bools": (torch.zeros(2).bool(), r"q_offset must be an int32 or int64 cpu .* got torch\.bool"),
    "int16": (
        torch.zeros(2).short(),
        r"q_offset must be an int32 or int64 cpu .* got torch\.int16",
    ),
    "meta": (torch.zeros(2, dtype=torch.int64, device="meta"), r"q_offset must be .* on meta"),
    "entry": (torch.tensor([0, 2**31]), r"q_offset\[1\]=2147483648 is outside of"),
    "low entry": (torch.tensor([0, -(2**30) - 1]), r"q_offset\[1\]=-1073741825 is outside of"),
}
LENGTHS: dict[str, tuple[Any, str]] = {
    "int": (3, r"kv_len must be an int32 or int64 cpu tensor \[batch=2\], got the int 3; .*full"),
    "list": ([1, 2], "kv_len must be an int32 or int64 cpu tensor, got list"),
    "text": ("end", "kv_len must be an int32 or int64 cpu tensor, got str"),
    "too many": (torch.zeros(3, dtype=torch.int64), r"kv_len must be \[batch=2\], got \(3,\)"),
    "two dims": (torch.zeros(2, 1, dtype=torch.int64), r"kv_len must be \[batch=2\]"),
    "floats": (torch.zeros(2), r"kv_len must be an int32 or int64 cpu tensor, got torch\.float32"),
    "bools": (torch.zeros(2).bool(), r"kv_len must be an int32 or int64 cpu .* got torch\.bool"),
    "meta": (torch.zeros(2, dtype=torch.int64, device="meta"), r"kv_len must be .* on meta"),
    "negative": (torch.tensor([-1, 2]), r"kv_len\[0\]=-1 is outside of \[0, 3\]"),
    "longer than k": (torch.tensor([1, 4]), r"kv_len\[1\]=4 is outside of \[0, 3\]"),
    "huge": (torch.tensor([1, 2**40]), r"kv_len\[1\]=1099511627776 is outside of \[0, 3\]"),
}


def refused(call: Callable[..., object], says: str, **given: Any) -> None:
    before = len(launches._launches)
    with pytest.raises(fa.InputError, match=says):
        call(**given)
    assert len(launches._launches) == before


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(call: Callable[..., object], name: str) -> None:
    value, says = OFFSETS[name]
    refused(call, says, q_offset=value)


@pytest.mark.parametrize("call", [attention, explain], ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(call: Callable[..., object], name: str) -> None:
    value, says = LENGTHS[name]
    refused(call, says, kv_len=value)
    refused(call, says, kv_len=value, q_offset="end")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_offsets_at_the_ends_of_their_range_are_taken(call: Callable[..., object]) -> None:
    for offset in (2**30, -(2**30), np.int64(3), torch.tensor([-(2**30), 2**30])):
        call(q_offset=offset)
    call(q_offset=torch.tensor([5, 0], dtype=torch.int32))
    call(q_offset="end")
