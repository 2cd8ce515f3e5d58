"""Torch ops that represent calls: their schemas and definitions.

Dispatch modes, profilers and tracers see a call as one op (`as_op`). Its inputs are tensors and
numbers; everything else is a site (`sites`), which an int identifies. Implementations
(`ops/op_implementations.py`) make the ordinary call, with all its checks.

`Library.define` and `impl` are used instead of `custom_op`: a call through them costs 5 us less
than half of the decorator's 12 us (measured on 2 cores, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ...errors import InputError
from ...torch_modes import VMAP_MESSAGE, outside_modes
from . import sites
from .sites import UserCall

Tensor = torch.Tensor
Results = Sequence[Tensor]

LIBRARY = torch.library.Library("flashattn_jit", "DEF")
with outside_modes():
    NO_FLOATS = torch.empty(0, dtype=torch.float64, device="cpu")


class Op(NamedTuple):
    """The op of a kind of call. Shapes of results depend on the inputs' and on `flags`: (partial,
    with_lse) of attention and batches, (want_lse, want_max) of flex, (enable_gqa,) of SDPA."""

    run: Callable[[Tensor, Tensor, Tensor, UserCall, Tensor | None, Tensor | None], Results]
    shapes: Callable[[Tensor, Tensor, Tensor, Sequence[bool]], Results]
    returns: str
    has_out: bool = False


OPS: dict[str, Op] = {}
"""The ops by name."""

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, Tensor floats, SymInt[] ints, int site, "
    "bool[] flags"
)


def define(
    schema: str, run: Callable[..., object], shapes: Callable[..., object], returns: str
) -> None:
    """Define an op: its schema, its implementation and its fake implementation."""
    name = schema.partition("(")[0]
    LIBRARY.define(f"{schema} -> {returns}")
    for key in ("CPU", "CUDA"):  # the call's target decides what runs
        LIBRARY.impl(name, run, key)
    LIBRARY.impl(name, refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"flashattn_jit::{name}", shapes, lib=LIBRARY)


def define_call(name: str, op: Op) -> None:
    """Define the op of a call, and its form with given results where it has one."""
    OPS[name] = op

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
        tensors, floats, ints, site, _, *given = rest
        # An AOTInductor package (torch 2.13) passes None for an empty list.
        call = sites.call_of(site, tensors or (), floats, ints or ())
        return op.run(q, k, v, call, *(given or (None, None)))

    def shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
        return op.shapes(q, k, v, rest[4])

    if op.returns == "Tensor":
        define(f"{name}({_INPUTS})", lambda *x: run(*x)[0], lambda *x: shapes(*x)[0], op.returns)
    else:
        define(f"{name}({_INPUTS})", run, shapes, op.returns)
    if op.has_out:

        def written(found: Results, *given: Tensor | None) -> Results:
            """The results, empty where they are given: those are not returned."""
            pairs = zip(found, given, strict=True)
            return tuple([x if t is None else x.new_empty(0) for x, t in pairs])

        define(
            f"{name}_out({_INPUTS}, Tensor(a!)? out, Tensor(b!)? lse)",
            lambda *x: written(run(*x), *x[-2:]), lambda *x: written(shapes(*x), *x[-2:]),
            op.returns,
        )  # fmt: skip


def refuse_vmap(*args: object) -> NoReturn:
    """The implementation of all ops under `torch.vmap`: an InputError."""
    raise InputError(VMAP_MESSAGE)
