"""Operators and methods of values and captured tensors, and the layout of what they return."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flashattn_jit.torch_modes import outside_modes
from flashattn_jit.variants.capture.extract import leaves, map_tree
from flashattn_jit.variants.trace.values import (
    HALVES,
    HANDLERS,
    Captured,
    Handler,
    Shape,
    Value,
    is_row_major,
    laid_out,
    plain,
    tracer,
    updated_by,
)

# For isinstance, a `Number` is the int or float that it stands for.
_OPERANDS = (Value, Captured, int, float, torch.Tensor, np.generic, type(None))


def _method(name: str, handler: Handler) -> Callable[..., Any]:
    if name.startswith("__") and name not in ("__getitem__", "__setitem__"):

        def operator(self: Any, *others: Any) -> Any:
            if others and not isinstance(others[0], _OPERANDS):
                return NotImplemented  # another class may define the reflected operator
            return _as_in_torch(name, handler(self, *others), (self, *others))

        return operator

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            tracer().refuse(f"`{name}(out=...)`", "use the returned value")
        return run_handler(name, handler, (self, *args), kwargs)

    return method


def _inplace(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer()._handle(name, (self, *args), kwargs)

    return method


def run_handler(name: str, handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The handler's result. Raises TypeError for arguments that do not fit the function `name`."""
    kwargs = {_NUMPY_NAMES.get(key, key): value for key, value in kwargs.items()}
    try:
        return _as_in_torch(name, handler(*args, **kwargs), args, kwargs)
    except TypeError:
        try:  # Python's own message names the handler
            inspect.signature(handler).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        raise


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # that torch's functions take too
RETURN_ARGUMENTS = frozenset({
    "to", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
    "type", "type_as", "contiguous", "cpu", "cuda", "requires_grad_", "lift_fresh", "resolve_conj",
    "resolve_neg", "positive", "__pos__", "as_tensor",
})  # fmt: skip
"""What may return its argument, as torch does: in-place operations on the result change both."""


def _as_in_torch(
    name: str, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The result of the function `name`: a tensor of its own where torch's is, with its strides.

    They decide whether ``reshape`` of the result is a view of it or a copy.
    """
    if type(result) is not Value:
        return result
    tensors = [x for x in leaves((args, dict(kwargs))) if type(x) in (Value, Captured)]
    values = [x for x in tensors if type(x) is Value]
    unknown = any(x.ndim > 1 if type(x) is Captured else x.unknown_strides for x in tensors)
    of_half = any(x.torch_dtype in HALVES for x in tensors)
    root = result.root
    if any(result is x for x in values) or (root is None and result.may_share):
        if name in RETURN_ARGUMENTS:
            return result
    elif root is not None:
        if root.may_share or any(root is (x if x.root is None else x.root) for x in values):
            return result  # a view
    elif result.places is None and not of_half and (
        result.ndim < 2 or (not unknown and all(map(is_row_major, values)))
    ):  # fmt: skip
        return result
    made = result.now()
    made.half_dtype = result.half_dtype
    if made.ndim > 1 or of_half:
        shape, stride, dtype = _in_torch(name, args, kwargs)
        if shape != made.shape:
            made.unknown_strides = made.ndim > 1
        else:
            made.unknown_strides = unknown and made.ndim > 1
            made.places = laid_out(made.shape, stride) if made.ndim > 1 else None
            if of_half:
                made.half_dtype = dtype if dtype in HALVES else None
    return made


def _in_torch(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Shape | None, Sequence[int], torch.dtype | None]:
    """The shape, strides and dtype of torch's result for tensors like the arguments, of ones.

    No shape where torch refuses them.
    """

    def stand_in(x: Any) -> Any:
        if type(x) is Value:
            strides = () if x.places is None else x.places.stride()
            extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=False))
            ones = torch.ones(max(extent, math.prod(x.shape)), dtype=x.torch_dtype, device="cpu")
            return ones.as_strided(x.shape, strides) if strides else ones.view(x.shape)
        if type(x) is Captured:
            one = torch.ones(1, dtype=x.torch_dtype, device="cpu")  # the tensor may be large
            return one.expand([x.host.shape[d] for d in x.free])
        return plain(x)

    owners = (operator, torch.Tensor) if name.startswith("__") else (torch, torch.Tensor, F)
    found = [f for f in (getattr(owner, name, None) for owner in owners) if callable(f)]
    for function in found:
        with outside_modes(), torch._C.DisableTorchFunction():
            try:
                given, named = map_tree((tuple(args), dict(kwargs)), stand_in)
                made = function(*given, **named)
            except Exception:  # another owner's function may take the arguments
                continue
            if isinstance(made, torch.Tensor):
                return made.shape, made.stride(), made.dtype
    return None, (), None


def _captured(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer().dispatch(function, (self, *args), kwargs)

    return method


def _missing(self: Value, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    if name == "T":
        return HANDLERS["permute"](self, *reversed(range(self.ndim)))
    if name == "mT":
        return HANDLERS["transpose"](self, -2, -1)
    if hasattr(torch.Tensor, name):
        if (updated_by(name) or name) in HANDLERS:
            return lambda *args, **kwargs: tracer()._handle(name, (self, *args), kwargs)
        tracer().refuse_op(f"Tensor.{name}")
    raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def attach() -> None:
    """Give `Value` and `Captured` all operators and methods that have a handler."""
    for name, handler in HANDLERS.items():
        dunder = name.startswith("__")
        if dunder and updated_by(name):
            setattr(Value, name, _inplace(name))
        elif dunder or hasattr(torch.Tensor, name):
            setattr(Value, name, _method(name, handler))
        if dunder and hasattr(torch.Tensor, name):
            setattr(Captured, name, _captured(name))
    Value.__getattr__ = _missing  # type: ignore[attr-defined]
    Value.where = lambda self, condition, other: run_handler(  # type: ignore[attr-defined]
        "where", HANDLERS["where"], (condition, self, other), {}
    )
    for cls in (Value, Captured):
        # The operators of numpy scalars on the left then return NotImplemented.
        cls.__array_ufunc__ = None  # type: ignore[union-attr]
