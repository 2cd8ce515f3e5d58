"""Attaches operators and Tensor methods to the proxies, from the tables of handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashattn_jit.variants import (
    trace_composite,
    trace_load,
    trace_reduce,
    trace_unary,
    trace_vectors,
)
from flashattn_jit.variants.trace_factory import FACTORIES
from flashattn_jit.variants.trace_ops import HANDLERS
from flashattn_jit.variants.trace_values import Captured, Value, tracer

# `Number` answers isinstance as the int or float that it stands for.
_OPERANDS = (Value, Captured, int, float, torch.Tensor, np.generic, type(None))


def _method(name: str) -> Callable[..., Any]:
    handler = HANDLERS.get(name) or FACTORIES[name]
    if name.startswith("__") and name not in ("__getitem__", "__setitem__"):

        def operator(self: Any, *others: Any) -> Any:
            if others and not isinstance(others[0], _OPERANDS):
                return NotImplemented  # another class may define the reflected operator
            return handler(self, *others)

        return operator

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            tracer().refuse(f"`{name}(out=...)`", "use the returned value")
        return handler(self, *args, **kwargs)

    return method


def _inplace(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer()._handle(name, (self, *args), kwargs)

    return method


def _captured(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer().dispatch(function, (self, *args), kwargs)

    return method


def _missing(self: Value, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    if name in ("T", "mT"):
        return HANDLERS["t"](self)
    if hasattr(torch.Tensor, name):
        base = name[:-1] if name.endswith("_") else name
        if base in HANDLERS:
            return lambda *args, **kwargs: tracer()._handle(name, (self, *args), kwargs)
        tracer().refuse_op(f"Tensor.{name}")
    raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def attach() -> None:
    """Give `Value` and `Captured` every operator and method that has a handler."""
    for name in (*HANDLERS, *FACTORIES):
        dunder = name.startswith("__")
        if dunder and name.startswith("__i") and f"__{name[3:]}" in HANDLERS:
            setattr(Value, name, _inplace(name))
        elif dunder or hasattr(torch.Tensor, name):
            setattr(Value, name, _method(name))
        if dunder and hasattr(torch.Tensor, name):
            setattr(Captured, name, _captured(name))
    Value.__getattr__ = _missing  # type: ignore[attr-defined]
    Value.where = lambda self, condition, other: HANDLERS["where"](condition, self, other)  # type: ignore[attr-defined]
    for cls in (Value, Captured):
        # numpy scalars on the left then return NotImplemented, and our operators are asked.
        cls.__array_ufunc__ = None  # type: ignore[union-attr]


_REGISTERED = (
    trace_composite,
    trace_load,
    trace_reduce,
    trace_unary,
    trace_vectors,
)  # importing them fills HANDLERS
attach()
