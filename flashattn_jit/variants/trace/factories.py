"""Tensors that a hook creates: constants in the graph, or results of the prelude."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flashattn_jit.variants.capture.extract import HostTensor, leaves, map_tree
from flashattn_jit.variants.ir.dtypes import VALUE_DTYPES
from flashattn_jit.variants.trace.captured_tensors import index
from flashattn_jit.variants.trace.operations import (
    ELEMENTWISE,
    cast,
    const,
    op,
    stored,
    to_dtype,
    val,
)
from flashattn_jit.variants.trace.values import (
    HANDLERS,
    Captured,
    Number,
    Value,
    pinned,
    tracer,
    updated_by,
)

if TYPE_CHECKING:
    from flashattn_jit.variants.trace.tracer import Tracer

_MAKERS = frozenset({"tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones", "empty",
                     "arange", "linspace", "eye", "asarray", "logspace"})  # fmt: skip
# The second line: functions of `operator`.
_DYNAMIC = ELEMENTWISE | {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift",
                          "rshift", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq"}  # fmt: skip


def host_call(
    t: Tracer, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call whose arguments are all known at bind time; the prelude records it."""
    writes = updated_by(name) or name == "__setitem__" or kwargs.get("inplace")
    if args and type(args[0]) is Captured and writes:
        t.refuse_mutation(name)
    if name == "__getitem__":
        return index(t, args[0], args[1])
    if name in ("tensor", "as_tensor", "scalar_tensor") and type(args[0]) is Number:
        made = val(args[0])
        dtype = kwargs.get("dtype")
        natural = cast(made, "float32" if made.name == "float64" else "int64")
        return natural if dtype is None else to_dtype(natural, dtype)
    if name == "full" and len(args) > 1 and type(args[1]) is Number and not args[0]:
        return host_call(t, torch.tensor, "tensor", (args[1],), kwargs)
    if name in ("is_tensor", "is_floating_point", "numel", "is_same_size"):
        if name == "is_tensor":
            return type(args[0]) in (Value, Captured)
        return getattr(args[0], name)()
    if name in _MAKERS and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": t.device}
    if name not in _DYNAMIC:
        args, kwargs = map_tree((args, kwargs), pinned)
    result = t.run_host(func, args, kwargs)
    from_captures = any(type(x) in (Captured, Number) for x in leaves((args, kwargs)))
    return map_tree(result, lambda x: _wrap(t, x, from_captures))


def _wrap(t: Tracer, x: Any, from_captures: bool) -> Any:
    if not isinstance(x, HostTensor):
        return x
    dtype = VALUE_DTYPES.get(x.dtype)
    if not from_captures and not x.shape and dtype is not None:
        with torch._C.DisableTorchFunction():
            return const(x.tensor.item(), dtype)  # torch.tensor(3.0) inside a hook
    return Captured(x)


# --- factories that take a value of the hook ---------------------------------------------------


def _filled(shape: Any, value: Any, dtype: Any, like: Value) -> Value:
    sizes = tuple(int(n) for n in shape)
    if math.prod(sizes) > tracer().max_elements:
        tracer().refuse(f"a tensor of shape {list(sizes)}", "make it outside and capture it")
    filler = val(value)
    filler = stored(like, filler) if dtype is None else cast(filler, _dtype(dtype, like.name))
    return Value(filler.node, filler.name, sizes, bound=filler.bound)


def _dtype(dtype: Any, default: str) -> str:
    if dtype is None:
        return default
    name = VALUE_DTYPES.get(dtype)
    if name is None:
        tracer().refuse(f"a tensor of {dtype}", "use a real dtype of at most 64 bits")
    return name


@op("full_like", elementwise=False)
def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    x = val(input)
    return _filled(x.shape, fill_value, dtype, x)


@op("fill", elementwise=False)
def _fill(input: Any, value: Any) -> Value:
    return _full_like(input, value)


@op("zero", elementwise=False)
def _zero(input: Any) -> Value:
    return _full_like(input, 0)


@op("copy", elementwise=False)
def _copy(input: Any, src: Any, non_blocking: bool = False) -> Value:
    return val(src)


@op("new_full", elementwise=False)
def _new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    return _filled(size, fill_value, dtype, val(input))


def _new(fill_value: int, input: Any, *size: Any, **kwargs: Any) -> Value:
    sizes = size or (kwargs.pop("size", ()),)
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    return _new_full(input, shape, fill_value, **kwargs)


for _stem, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    op(f"{_stem}_like", elementwise=False)(partial(_full_like, fill_value=_value))
    op(f"new_{_stem}", elementwise=False)(partial(_new, _value))


@op("full", elementwise=False)
def _full(size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    return _filled(size, fill_value, dtype, val(fill_value))


def _refuse_list(data: Any) -> None:
    if isinstance(data, list | tuple):
        tracer().refuse("a tensor made of a list of values", "write `torch.stack([i, j])`")


@op("new_tensor", elementwise=False)
def _new_tensor(input: Any, data: Any, *, dtype: Any = None, **_: Any) -> Any:
    if isinstance(data, list | tuple) and not any(type(x) is Value for x in leaves(data)):
        return tracer().dispatch(torch.tensor, (data,), {"dtype": dtype or input.dtype})
    _refuse_list(data)
    return _filled(val(data).shape, data, dtype, val(input))


@op("tensor", "as_tensor", "scalar_tensor", elementwise=False)
def _as_tensor(data: Any, *, dtype: Any = None, **_: Any) -> Value:
    _refuse_list(data)
    x = val(data)
    return x if dtype is None else to_dtype(x, dtype)


@op("broadcast_tensors", elementwise=False)
def _broadcast_tensors(*tensors: Any) -> tuple[Value, ...]:
    values = [val(x) for x in tensors]
    shape = tracer().broadcast_shape([v.shape for v in values])
    return tuple(HANDLERS["expand"](v, shape) for v in values)


op("is_tensor", elementwise=False)(lambda x: True)
