"""Captured tensors while tracing: indexing, loads, and what is left to the prelude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from flashattn_jit.variants.dtypes import VALUE_DTYPES
from flashattn_jit.variants.ir import category
from flashattn_jit.variants.trace_host import HostTensor
from flashattn_jit.variants.trace_ops import cast, op, val
from flashattn_jit.variants.trace_values import Captured, Number, Value, tracer

if TYPE_CHECKING:
    from flashattn_jit.variants.trace import Tracer

_WHOLE = slice(None)


def materialise(t: Tracer, c: Captured) -> HostTensor:
    """A captured tensor whose indices are known at bind time, as one tensor of the prelude."""
    if all(i is None for i in c.index):
        return c.host
    where = tuple(_WHOLE if i is None else i for i in c.index)
    return t.run_host(torch.Tensor.__getitem__, (c.host, where), {})  # type: ignore[no-any-return]


def index(t: Tracer, c: Captured, items: Any) -> Captured:
    """``c[items]``: tensors of the hook index lazily, anything else is a view of the prelude."""
    parts = list(items) if isinstance(items, tuple) else [items]
    parts = [_scalar_index(t, p) for p in parts]
    if not any(isinstance(p, Value) for p in parts):
        if not c.on_host or all(type(p) in (int, Number) for p in parts):
            return _assign(t, c, parts)
        pinned = tuple(_pinned(p) for p in parts)
        return Captured(t.run_host(torch.Tensor.__getitem__, (materialise(t, c), pinned), {}))
    return _assign(t, c, parts)


def _pinned(part: Any) -> Any:
    if isinstance(part, Captured):
        return materialise(tracer(), part)
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)
        return slice(*(b.pin() if type(b) is Number else b for b in bounds))
    return part.pin() if type(part) is Number else part


def _scalar_index(t: Tracer, part: Any) -> Any:
    """An element of an index tuple; 0-dim captured tensors become values."""
    if isinstance(part, Captured) and part.ndim == 0:
        part = load(t, part)
    if isinstance(part, Captured) and not part.on_host:
        t.refuse(
            "an index that is itself a row of a tensor", "index with one element: `t[rows[q, 0]]`"
        )
    if isinstance(part, Value):
        if part.name == "bool" or category(part.name) != 1:
            t.refuse(
                f"an index of dtype {part.name}",
                "use an integer index; a boolean one would give a shape that depends on data",
            )
        if math.prod(part.shape) != 1:
            t.refuse("an index that is a vector", "index with one element at a time")
    return part


def _assign(t: Tracer, c: Captured, parts: list[Any]) -> Captured:
    """Give the free dims of `c` their indices, narrowing or adding dims of the host first."""
    free = list(c.free)
    given = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if given > len(free):
        t.refuse(
            f"{given} indices for {c.host.name!r}, which has {len(free)} dims left",
            "give at most one index per dim",
        )
    if Ellipsis in [p for p in parts if p is Ellipsis]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts = [*parts[:at], *[_WHOLE] * (len(free) - given), *parts[at + 1 :]]
    host, where = c.host, list(c.index)
    for part in parts:
        if part is None:
            t.refuse("`None` in an index next to a tensor", "add the dim before: `t[:, None]`")
        dim = free.pop(0)
        if isinstance(part, slice):
            if part != _WHOLE:
                cut = (*[_WHOLE] * dim, _pinned(part))
                host = t.run_host(torch.Tensor.__getitem__, (host, cut), {})
        elif isinstance(part, Value) or type(part) in (int, Number):
            where[dim] = part
        elif isinstance(part, bool | torch.Tensor | list | Captured):
            t.refuse(
                "an index that mixes positions with lists or masks",
                "index with one element per dim",
            )
        else:
            where[dim] = int(part)
    return Captured(host, tuple(where))


def load(t: Tracer, c: Captured) -> Value:
    """The element, or the last dims as a short vector, as a value of the hook."""
    dtype = VALUE_DTYPES.get(c.host.dtype)
    if dtype is None:
        t.refuse(
            f"{c.host.name!r}, a tensor of {c.host.dtype}",
            "capture bool, uint8, int8 to int64, half, bfloat16, float8, float32 or float64",
        )
    host, where = c.host, list(c.index)
    free = list(c.free)
    shape = tuple(int(host.shape[d]) for d in free)
    count = math.prod(shape)
    if free:
        if count > t.max_elements or count == 0:
            t.refuse(
                f"{count} elements of {host.name!r} (shape {list(shape)}) at once",
                f"index it down: a hook of this kind holds vectors of at most {t.max_elements} "
                "elements",
            )
        t.pin_sizes(host, free)
        indexed = [d for d in range(len(where)) if d not in free]
        if free != list(range(len(indexed), len(where))):
            host = t.run_host(torch.Tensor.permute, (host, (*indexed, *free)), {})
            where = [where[d] for d in indexed] + [None] * len(free)
        if len(free) > 1:
            host = t.run_host(torch.Tensor.flatten, (host, len(indexed)), {})
            where = [*where[: len(indexed)], None]
        if count == 1:
            where[-1] = 0
    nodes = [_index_node(t, i) for i in where if i is not None]
    sizes = {len(where) - 1: count} if count > 1 else {}
    slot = t.tensor_slot(host, sizes)
    inner = (count,) if count > 1 else ()
    node = t.emitter.emit("gather", nodes, dtype, inner, slot=slot)
    return Value(node, dtype, shape)


def _index_node(t: Tracer, i: Any) -> int:
    if type(i) is int:
        return t.emitter.const(i, "int64" if abs(i) >= 2**31 else "int32")
    return val(i).node


@op("searchsorted", elementwise=False)
def _searchsorted(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Any = None,
) -> Value:  # fmt: skip
    t = tracer()
    if side is not None:
        right = side == "right"
    if not isinstance(sorted_sequence, Captured) or not sorted_sequence.on_host or (
        sorted_sequence.ndim != 1 or sorter is not None
    ):  # fmt: skip
        t.refuse(
            "searchsorted in something that is not a captured 1-D tensor",
            "capture the sorted tensor, one dim, without a sorter",
        )
    host = materialise(t, sorted_sequence)
    dtype = VALUE_DTYPES.get(host.dtype)
    x = val(input)
    if dtype is None or math.prod(x.shape) != 1:
        t.refuse("searchsorted of a vector", "search one value at a time")
    if category(x.name) != category(dtype) or category(dtype) == 2:
        x = cast(x, dtype)
    slot = t.tensor_slot(host, {})
    node = t.emitter.emit("searchsorted", [x.node], "int64", (), slot=slot, right=right)
    found = Value(node, "int64", x.shape)
    return cast(found, "int32") if out_int32 else found


@op("bucketize", elementwise=False)
def _bucketize(
    input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _searchsorted(boundaries, input, out_int32=out_int32, right=right)
