"""Tensors that a hook makes: constants in the graph, or results of the prelude."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashattn_jit.variants.dtypes import VALUE_DTYPES
from flashattn_jit.variants.trace_host import HostTensor, map_tree
from flashattn_jit.variants.trace_nodes import index
from flashattn_jit.variants.trace_ops import ELEMENTWISE, cast, const, to_dtype, val
from flashattn_jit.variants.trace_values import Captured, Number, Value, tracer

if TYPE_CHECKING:
    from flashattn_jit.variants.trace import Tracer

_MAKERS = frozenset({"tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones", "empty",
                     "arange", "linspace", "eye", "asarray", "logspace"})  # fmt: skip
# The second line: functions of `operator`.
_DYNAMIC = ELEMENTWISE | {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift",
                          "rshift", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq"}  # fmt: skip


def host_call(
    t: Tracer, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call whose arguments are all known at bind time: recorded in the prelude."""
    name = name or getattr(func, "__name__", "")
    if name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy"):
        t.refuse_value({"item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()"}.get(
            name, {"__bool__": "bool", "__index__": "index"}.get(name, f"{name.strip('_')}()")
        ))  # fmt: skip
    if args and type(args[0]) is Captured and _writes(name):
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
        return _answer(name, args)
    if name in _MAKERS and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": t.device}
    if name not in _DYNAMIC:
        args = map_tree(args, _pinned)
        kwargs = map_tree(kwargs, _pinned)
    result = t.run_host(func, args, kwargs)
    from_captures = _has_captures((args, kwargs))
    return map_tree(result, lambda x: _wrap(t, x, from_captures))


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or name == "__setitem__" or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    )  # fmt: skip


def _pinned(x: Any) -> Any:
    return x.pin() if type(x) is Number else x


def _has_captures(tree: Any) -> bool:
    found = False

    def look(x: Any) -> Any:
        nonlocal found
        found = found or type(x) in (Captured, Number)
        return x

    map_tree(tree, look)
    return found


def _wrap(t: Tracer, x: Any, from_captures: bool) -> Any:
    if not isinstance(x, HostTensor):
        return x
    dtype = VALUE_DTYPES.get(x.dtype)
    if not from_captures and not x.shape and dtype is not None:
        with torch._C.DisableTorchFunction():
            return const(x.tensor.item(), dtype)  # torch.tensor(3.0) inside a hook
    return Captured(x)


def _answer(name: str, args: tuple[Any, ...]) -> Any:
    if name == "is_tensor":
        return type(args[0]) in (Value, Captured)
    return getattr(args[0], name)()


# --- factories that take a value of the hook ---------------------------------------------------


def _filled(shape: Any, value: float, dtype: str) -> Value:
    sizes = tuple(int(n) for n in shape)
    if math.prod(sizes) > tracer().max_elements:
        tracer().refuse(f"a tensor of shape {list(sizes)}", "make it outside and capture it")
    return Value(const(value, dtype).node, dtype, sizes)


def _dtype(dtype: Any, default: str) -> str:
    if dtype is None:
        return default
    name = VALUE_DTYPES.get(dtype)
    if name is None:
        tracer().refuse(f"a tensor of {dtype}", "use a real dtype of at most 64 bits")
    return name


def _shape(sizes: tuple[Any, ...]) -> Any:
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _register() -> dict[str, Callable[..., Any]]:
    factories: dict[str, Callable[..., Any]] = {}
    for stem, value in {"zeros": 0, "ones": 1, "empty": 0}.items():

        def like(input: Any, *, dtype: Any = None, _value: int = value, **_: Any) -> Value:
            x = val(input)
            return _filled(x.shape, _value, _dtype(dtype, x.name))

        def new(input: Any, *size: Any, dtype: Any = None, _value: int = value, **kw: Any) -> Value:
            shape = _shape(size or (kw.get("size", ()),))
            return _filled(shape, _value, _dtype(dtype, val(input).name))

        factories[f"{stem}_like"] = like
        factories[f"new_{stem}"] = new
    factories["full_like"] = _full_like
    factories["new_full"] = _new_full
    factories["new_tensor"] = _new_tensor
    factories["full"] = _full
    factories["tensor"] = factories["as_tensor"] = factories["scalar_tensor"] = _as_tensor
    factories["is_tensor"] = lambda x: True
    factories["broadcast_tensors"] = _broadcast_tensors
    return factories


def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    x = val(input)
    value = cast(val(fill_value), _dtype(dtype, x.name))
    return Value(value.node, value.name, x.shape)


def _new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    value = cast(val(fill_value), _dtype(dtype, val(input).name))
    return Value(value.node, value.name, tuple(int(n) for n in size))


def _new_tensor(input: Any, data: Any, *, dtype: Any = None, **_: Any) -> Value:
    return cast(val(data), _dtype(dtype, val(data).name))


def _full(size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    x = val(fill_value)
    value = cast(x, _dtype(dtype, x.name))
    return Value(value.node, value.name, tuple(int(n) for n in size))


def _as_tensor(data: Any, *, dtype: Any = None, **_: Any) -> Value:
    x = val(data)
    return x if dtype is None else to_dtype(x, dtype)


def _broadcast_tensors(*tensors: Any) -> tuple[Value, ...]:
    values = [val(x) for x in tensors]
    shape = tracer().broadcast_shape([v.shape for v in values])
    return tuple(tracer().expand(v, shape) for v in values)


FACTORIES = _register()
