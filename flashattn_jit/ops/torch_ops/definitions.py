"""Torch ops that stand for calls: their schemas, and how one is defined.

Whoever listens to torch's dispatcher, or makes a graph, sees a call as one op (`as_op`). Its
inputs are tensors and numbers; all else is a site (`sites`), which it names by an int.
Implementations (`ops/op_implementations.py`) make the ordinary call, with all its checks.

`Library.define` and `impl` are used rather than `custom_op`: a call through them costs 5 us less
than half of the decorator's 12 us (measured on 2 cores, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ...errors import InputError
from ...torch_modes import VMAP_MESSAGE, outside_modes
from . import sites
from .sites import Call

Tensor = torch.Tensor
Results = Sequence[Tensor]

LIBRARY = torch.library.Library("flashattn_jit", "DEF")
KEYS = ("CPU", "CUDA")
"""Dispatch keys of the implementations; the target that a call names says what runs."""

with outside_modes():
    NO_FLOATS = torch.empty(0, dtype=torch.float64, device="cpu")


class Op(NamedTuple):
    """An op of a call. Its `flags` are what its shapes depend on beside shapes: of attention and
    batches (partial, with_lse), of flex (want_lse, want_max), of SDPA (enable_gqa,)."""

    run: Callable[[Tensor, Tensor, Tensor, Call, Tensor | None], Results]
    shapes: Callable[[Tensor, Tensor, Tensor, Sequence[bool]], Results]
    returns: str
    has_out: bool = False


_OPS: dict[str, Op] = {}
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, Tensor floats, SymInt[] ints, int site, "
    "bool[] flags"
)


def ordinary(name: str, q: Any, k: Any, v: Any, call: Call, out: Any) -> Results:
    """The results of an op's call, without the op."""
    return _OPS[name].run(q, k, v, call, out)


def define(
    schema: str, run: Callable[..., object], shapes: Callable[..., object], returns: str
) -> None:
    """Define an op: its schema, its implementation and its fake implementation."""
    name = schema.partition("(")[0]
    LIBRARY.define(f"{schema} -> {returns}")
    for key in KEYS:
        LIBRARY.impl(name, run, key)
    LIBRARY.impl(name, refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"flashattn_jit::{name}", shapes, lib=LIBRARY)


def define_call(name: str, op: Op) -> None:
    """Define the op of a call, and its form with `out` where it has one."""
    _OPS[name] = op

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
        tensors, floats, ints, site, _, *out = rest
        # A package of AOTInductor (torch 2.13) gives None for an empty list.
        call = sites.call_of(site, tensors or (), floats, ints or ())
        return op.run(q, k, v, call, *(out or (None,)))

    def shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
        return op.shapes(q, k, v, rest[4])

    if op.returns == "Tensor":
        define(f"{name}({_INPUTS})", lambda *x: run(*x)[0], lambda *x: shapes(*x)[0], op.returns)
    else:
        define(f"{name}({_INPUTS})", run, shapes, op.returns)
    if op.has_out:
        define(
            f"{name}_out({_INPUTS}, Tensor(a!) out)",
            lambda *x: run(*x)[1], lambda *x: shapes(*x)[1], "Tensor",
        )  # fmt: skip


def refuse_vmap(*args: object) -> NoReturn:
    """What the ops do under `torch.vmap`."""
    raise InputError(VMAP_MESSAGE)
