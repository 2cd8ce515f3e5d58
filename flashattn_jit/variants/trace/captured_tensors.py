"""The indexing of captured tensors: loads in the graph, or calls of the prelude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from flashattn_jit.variants.capture.extract import HostTensor, map_tree
from flashattn_jit.variants.ir.dtypes import VALUE_DTYPES
from flashattn_jit.variants.ir.ir import category
from flashattn_jit.variants.trace.operations import cast, op, val
from flashattn_jit.variants.trace.values import HALVES, Captured, Number, Value, pinned, tracer

if TYPE_CHECKING:
    from flashattn_jit.variants.trace.tracer import Tracer

_WHOLE = slice(None)
_ONE_VECTOR = (
    "index with one element per dim; in a hook of rows one index may be a vector of integers "
    "(`t[b, q_idx, numbers]`), with an element for every other dim"
)


def materialise(t: Tracer, c: Captured) -> HostTensor:
    """The prelude tensor of a captured tensor whose indices are all known at bind time."""
    if all(i is None for i in c.index):
        return c.host
    where = tuple(_WHOLE if i is None else i for i in c.index)
    return t.run_host(torch.Tensor.__getitem__, (c.host, where), {})  # type: ignore[no-any-return]


def index(t: Tracer, c: Captured, items: Any) -> Captured | Value:
    """``c[items]``: indexed lazily by values of the hook, else a view that the prelude makes."""
    parts = list(items) if isinstance(items, tuple) else [items]
    if not c.on_host or any(isinstance(p, Value) for p in parts):
        parts = [_vector(t, p) for p in parts]
    vectors = [i for i, p in enumerate(parts) if isinstance(p, Value) and math.prod(p.shape) != 1]
    if vectors:
        return _lookup(t, c, parts, vectors[0])
    parts = [_scalar_index(t, p) for p in parts]
    if not any(isinstance(p, Value) for p in parts):
        if not c.on_host or all(type(p) in (int, Number) for p in parts):
            return _assign(t, c, parts)
        pinned = tuple(_pinned(p) for p in parts)
        return Captured(t.run_host(torch.Tensor.__getitem__, (materialise(t, c), pinned), {}))
    return _assign(t, c, parts)


def _vector(t: Tracer, part: Any) -> Any:
    """A list or a 1-D tensor of integers as a value, which a hook of rows may have as an index."""
    if isinstance(part, list) and part and all(type(i) in (int, Number) for i in part):
        part = Captured(t.run_host(torch.tensor, ([int(i) for i in part],), {}))
    if isinstance(part, Captured) and part.ndim == 1:
        dtype = VALUE_DTYPES.get(part.dtype, "bool")
        return load(t, part) if _is_integer(dtype) else part
    return part


def _lookup(t: Tracer, c: Captured, parts: list[Any], at: int) -> Value:
    """``c[..., x, ...]`` with a vector x: an element for each of its entries, in hooks of rows."""
    x = parts.pop(at)
    _check_integer(t, x, "use integers: `table[row.to(torch.int32)]`")
    others = [_scalar_index(t, p) for p in parts]
    if not t.of_row or len(x.shape) != 1 or len(parts) + 1 != len(c.free) or any(
        p is None or p is Ellipsis or isinstance(p, slice) for p in parts
    ):  # fmt: skip
        t.refuse("an index that is a vector", _ONE_VECTOR)
    axis = c.free[at]
    order = [*(d for d in range(len(c.index)) if d != axis), axis]
    if order != sorted(order):  # a view with that dim at the end
        host = t.run_host(torch.Tensor.permute, (c.host, tuple(order)), {})
        c = Captured(host, tuple([c.index[d] for d in order]))
    c = _assign(t, c, [*others, _WHOLE])
    dtype = VALUE_DTYPES.get(c.host.dtype)
    if dtype is None or c.free != (len(c.index) - 1,):
        t.refuse(f"a lookup in {c.host.name!r}, of {c.host.dtype}", "look up in the last dim")
    nodes = [*(_index_node(t, i) for i in c.index[:-1]), x.node]
    slot = t.tensor_slot(c.host, {})
    return Value(
        t.emitter.emit("lookup", nodes, dtype, (math.prod(x.shape),), slot=slot), dtype, x.shape
    )


def _check_integer(t: Tracer, x: Value, remedy: str) -> None:
    if not _is_integer(x.name):
        t.refuse(f"an index of dtype {x.name}", remedy)


def _is_integer(dtype: str) -> bool:
    return dtype != "bool" and category(dtype) == 1


def _pinned(part: Any) -> Any:
    if isinstance(part, Captured):
        return materialise(tracer(), part)
    return map_tree(part, pinned) if isinstance(part, slice) else pinned(part)


def _scalar_index(t: Tracer, part: Any) -> Any:
    """An element of an index tuple; 0-dim captured tensors become values."""
    if isinstance(part, Captured) and part.ndim == 0:
        part = load(t, part)
    if isinstance(part, Captured) and not part.on_host:
        t.refuse(
            "an index that is itself a row of a tensor", "index with one element: `t[rows[q, 0]]`"
        )
    if isinstance(part, Value):
        _check_integer(
            t, part, "use an integer index; a boolean one would give a shape that depends on data"
        )
        if math.prod(part.shape) != 1:
            t.refuse("an index that is a vector", _ONE_VECTOR)
    return part


def _assign(t: Tracer, c: Captured, parts: list[Any]) -> Captured:
    """`c` with indices for its free dims; slices narrow the host tensor."""
    free = list(c.free)
    given = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if given > len(free):
        t.refuse(
            f"{given} indices for {c.host.name!r}, which has {len(free)} dims left",
            "give at most one index per dim",
        )
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    if at is not None:
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
        elif isinstance(part, Value):  # as it is now: it may be changed in place
            where[dim] = part.now()
        elif type(part) in (int, Number):
            where[dim] = part
        elif isinstance(part, bool | torch.Tensor | list | Captured):
            t.refuse("an index that mixes positions with lists or masks", _ONE_VECTOR)
        else:
            where[dim] = int(part)
    return Captured(host, tuple(where))


def load(t: Tracer, c: Captured) -> Value:
    """The indexed element, or the free dims as a short vector, as a value of the hook."""
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
    made = Value(t.emitter.emit("gather", nodes, dtype, inner, slot=slot), dtype, shape)
    made.may_share, made.unknown_strides = True, len(shape) > 1  # in torch it is a view
    made.half_dtype = c.host.dtype if c.host.dtype in HALVES else None
    return made


def _index_node(t: Tracer, i: Any) -> int:
    if type(i) is int:
        return t.emitter.const(i, "int64" if abs(i) >= 2**31 else "int32")
    return val(i).node


@op("embedding", elementwise=False)
def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Captured | Value:
    t = tracer()
    if max_norm is not None:
        t.refuse("an embedding with max_norm", "it writes to the weight; scale that before")
    if not isinstance(weight, Captured):
        t.refuse("an embedding of a computed weight", "capture the weight: `weight[index]`")
    return index(t, weight, input)


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
