"""Small static vectors and rows: rearrangement, indexing, reductions.

A `Value` of logical shape (n, m, ...) is one flat vector node. Operations that only move elements
(slices, flips, transposes, stacks, rolls, views) are applied to an array of element numbers by the
torch method itself; `take` then turns the result into the fewest slices, interleaves and
concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashattn_jit.variants.capture.extract import leaves, map_tree
from flashattn_jit.variants.ir.ir import REDUCTIONS, is_float
from flashattn_jit.variants.trace.operations import (
    as_positions,
    binary,
    cast,
    common_dtype,
    emit,
    magnitude,
    node_shape,
    op,
    stored,
    to_dtype,
    val,
)
from flashattn_jit.variants.trace.positions import largest
from flashattn_jit.variants.trace.values import (
    Captured,
    Shape,
    Value,
    is_row_major,
    laid_out,
    tracer,
)

Numbers = npt.NDArray[np.int64]
MAX_PIECES = 64
"""The most slices of one rearrangement."""


def element_numbers(x: Value) -> Numbers:
    """The flat element numbers of `x` in its logical shape."""
    return np.arange(math.prod(x.shape)).reshape(x.shape)


def take(x: Value, numbers: Numbers) -> Value:
    """The elements of `x` at the flat `numbers`, in their shape."""
    node = x.node
    if tracer().emitter.node(node).shape:  # every element of a scalar is that scalar
        node = _take(node, numbers.ravel(), x.name)
    return Value(node, x.name, numbers.shape, bound=x.bound)


def _step(ns: Numbers) -> int | None:
    """The common difference of an arithmetic progression, else None."""
    if len(ns) == 1:
        return 1
    step = int(ns[1] - ns[0])
    return step if bool((np.diff(ns) == step).all()) else None


def _take(node: int, ns: Numbers, dtype: str) -> int:
    emitter = tracer().emitter
    source = emitter.node(node)
    count = len(ns)
    if not source.shape:
        if count == 1:
            return node
        return emitter.emit("broadcast", [node], dtype, (count,), length=count)
    if source.op == "broadcast":
        return _take(source.args[0], np.zeros_like(ns), dtype)
    if count == 1:
        return _element(node, int(ns[0]), dtype)
    step = _step(ns)
    if step == 0:
        return _take(_element(node, int(ns[0]), dtype), np.zeros_like(ns), dtype)
    if step is not None:
        return _slice(node, int(ns[0]), step, count, dtype)
    pieces, interleaved = _pieces(ns)
    if len(pieces) > MAX_PIECES:
        tracer().refuse(
            f"a rearrangement of {count} elements into {len(pieces)} pieces",
            "use slices, flip, roll, stack, cat or chunk",
        )
    parts = [_take(node, p, dtype) for p in pieces]
    if interleaved:
        return emitter.emit("interleave", parts, dtype, (count,))
    return concatenate(parts, dtype)


def _pieces(ns: Numbers) -> tuple[list[Numbers], bool]:
    runs: list[Numbers] = []
    start = 0
    while start < len(ns):
        stop = min(start + 2, len(ns))
        step = int(ns[stop - 1] - ns[start])
        while stop < len(ns) and int(ns[stop] - ns[stop - 1]) == step:
            stop += 1
        # Two elements with another difference than 1 may be the start of the next run.
        if stop - start == 2 and abs(step) != 1 and stop < len(ns):
            stop = start + 1
        runs.append(ns[start:stop])
        start = stop
    for ways in range(2, min(len(runs), len(ns) // 2 + 1)):
        if len(ns) % ways == 0 and all(_step(ns[w::ways]) is not None for w in range(ways)):
            return [ns[w::ways] for w in range(ways)], True
    return runs, False


def _element(node: int, i: int, dtype: str) -> int:
    emitter = tracer().emitter
    sliced = _slice(node, i, 1, 1, dtype)
    return sliced if not emitter.node(sliced).shape else emitter.emit("sum", [sliced], dtype, ())


def _slice(node: int, start: int, step: int, count: int, dtype: str) -> int:
    emitter = tracer().emitter
    source = emitter.node(node)
    length = source.shape[0]
    if start == 0 and step == 1 and count == length:
        return node
    if source.op == "slice":
        inner_start, inner_step = source.int_attr("start"), source.int_attr("step")
        new_start = inner_start + start * inner_step
        return _slice(source.args[0], new_start, step * inner_step, count, dtype)
    if source.op == "cat":
        # A slice inside one part of a concatenation is a slice of that part.
        offset = 0
        for part in source.args:
            size = emitter.node(part).shape[0] if emitter.node(part).shape else 1
            ends = (start - offset, start + (count - 1) * step - offset)
            if min(ends) >= 0 and max(ends) < size:
                if not emitter.node(part).shape:
                    return part
                return _slice(part, start - offset, step, count, dtype)
            offset += size
    if source.op == "interleave":
        ways = len(source.args)
        if step % ways == 0 or count == 1:
            part = source.args[start % ways]
            return _slice(part, start // ways, step // ways or 1, count, dtype)
    if count == 1:
        step = 1
    return emitter.emit("slice", [node], dtype, (count,), start=start, step=step, length=count)


def concatenate(parts: Sequence[int], dtype: str) -> int:
    """One flat vector of nodes; scalars are single elements."""
    emitter = tracer().emitter
    total = 0
    vectors = []
    for part in parts:
        shape = emitter.node(part).shape
        if not shape:
            part = emitter.emit("broadcast", [part], dtype, (1,), length=1)
        vectors.append(part)
        total += shape[0] if shape else 1
    if len(vectors) == 1:
        return parts[0]
    return emitter.emit("cat", vectors, dtype, (total,))


def expand(x: Value, shape: Shape) -> Value:
    """`x` broadcast to `shape`."""
    if tuple(x.shape) == tuple(shape):
        return x
    return take(x, np.broadcast_to(element_numbers(x), shape))


def full(x: Value) -> Value:
    """`x` with a vector node if it has several elements (arithmetic does not expand scalars)."""
    count = math.prod(x.shape)
    if count > 1 and not tracer().emitter.node(x.node).shape:
        node = _take(x.node, np.zeros(count, np.int64), x.name)
        return Value(node, x.name, x.shape, bound=x.bound)
    return x


# --- operations that only move elements ----------------------------------------------------------


def ints(*args: Any) -> tuple[int, ...]:
    """Sizes or dims given as arguments or as one sequence, specialised."""
    items = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    return tuple(int(i) for i in items)


def dims_of(dim: Any, rank: int) -> tuple[int, ...]:
    """The dims that `dim`, an int or a sequence, names in a value of `rank` dims, from 0 on.

    Raises what torch raises for dims that the value does not have, or that are named twice.
    """
    rank = max(rank, 1)
    dims: list[int] = []
    for d in ints(dim):
        if not -rank <= d < rank:
            raise IndexError(
                "Dimension out of range (expected to be in range of "
                f"[{-rank}, {rank - 1}], but got {d})"
            )
        if d % rank in dims:
            raise RuntimeError(f"dim {d % rank} appears multiple times in the list of dims")
        dims.append(d % rank)
    return tuple(dims)


def _moved(name: str, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of the Tensor method `name`, which torch applies to the element numbers."""
    args, kwargs = map_tree((args, kwargs), lambda x: x if x is None else int(x))
    return _rearranged(val(input), lambda numbers: getattr(numbers, name)(*args, **kwargs))


def _rearranged(v: Value, arrange: Callable[[torch.Tensor], Any]) -> Any:
    """What `arrange` makes of the element numbers of `v`: views of it where torch's are views."""
    with torch._C.DisableTorchFunction():
        own = torch.from_numpy(element_numbers(v))
        memory = own if v.places is None else v.places
        moved = arrange(own)
        there = moved if memory is own else arrange(memory)
        if isinstance(moved, torch.Tensor):
            return _part(v, moved, there, memory)
        return tuple(_part(v, m, t, memory) for m, t in zip(moved, there, strict=True))


def _part(v: Value, numbers: torch.Tensor, places: torch.Tensor, memory: torch.Tensor) -> Value:
    if not numbers.numel():
        tracer().refuse("an empty part of a value", "take at least one element")
    made = take(v, numbers.numpy())
    if places.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        return v.with_view(made, places)
    if not places.is_contiguous():
        made.places = laid_out(made.shape, places.stride())
    return made


def _reshaped(name: str, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a method that copies where strides do not allow for a view."""
    v = val(input)
    moved = _moved(name, v, *args, **kwargs)
    if v.unknown_strides:
        _root(v).may_share = True
        if moved.root is None:  # it may be a view; neither is written any more
            with torch._C.DisableTorchFunction():
                v.with_view(moved, torch.from_numpy(element_numbers(moved)))
    return moved


@op("contiguous", elementwise=False)
def _contiguous(input: Any, *args: Any, **kwargs: Any) -> Value:
    v = val(input)
    if v.unknown_strides:
        return _reshaped("reshape", v, v.shape)  # type: ignore[no-any-return]
    return v if is_row_major(v) else take(v, element_numbers(v))


for _name in ("reshape", "flatten", "ravel"):
    op(_name, elementwise=False)(partial(_reshaped, _name))
for _name in (
    "unflatten", "unsqueeze", "squeeze", "expand",
    "broadcast_to", "t", "movedim", "moveaxis", "transpose", "swapaxes", "swapdims", "permute",
    "flip", "roll", "repeat_interleave", "repeat", "tile", "narrow", "select", "split_with_sizes",
    "chunk", "unbind", "detach",
):  # fmt: skip
    op(_name, elementwise=False)(partial(_moved, _name))


@op("view", elementwise=False)
def _view(input: Any, *shape: Any, **named: Any) -> Value:
    dtype = named.get("dtype", shape[0] if shape else None)
    if not isinstance(dtype, torch.dtype):
        return _moved("view", input, *shape, **named)  # type: ignore[no-any-return]
    v = val(input)
    if dtype != (v.half_dtype or v.dtype):
        tracer().refuse(
            f"`view({dtype})`, which reads the bits of other numbers",
            f"convert the numbers: `x.to({dtype})`, or view captured tensors before they are "
            "indexed",
        )
    return _moved("detach", v)  # type: ignore[no-any-return]


@op("view_as", "reshape_as", elementwise=False)
def _reshape_as(input: Any, other: Any) -> Value:
    return _reshaped("reshape", input, other.shape)  # type: ignore[no-any-return]


@op("alias", elementwise=False)
def _alias(input: Any) -> Value:
    return _moved("detach", input)  # type: ignore[no-any-return]


@op("expand_as", elementwise=False)
def _expand_as(input: Any, other: Any) -> Value:
    return _moved("expand", input, val(other).shape)  # type: ignore[no-any-return]


@op("split", elementwise=False)
def _split(
    tensor: Any, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> tuple[Value, ...]:
    size = split_size if split_size_or_sections is None else split_size_or_sections
    if size is None:
        raise TypeError("split() needs a split_size")
    return _moved("split", tensor, size, dim)  # type: ignore[no-any-return]


@op("__getitem__", elementwise=False)
def _getitem(input: Any, index: Any) -> Value:
    items = _static_index(index)
    return _rearranged(val(input), lambda numbers: numbers[items])  # type: ignore[no-any-return]


@op("cat", "concat", "concatenate", elementwise=False)
def _cat(tensors: Any, dim: int = 0) -> Value:
    return _join(tensors, np.concatenate, dim)


@op("stack", elementwise=False)
def _stack(tensors: Any, dim: int = 0) -> Value:
    return _join(tensors, np.stack, dim)


def _join(tensors: Any, arrange: Callable[..., Numbers], dim: int) -> Value:
    values = [val(x) for x in tensors]
    (axis,) = dims_of(dim, values[0].ndim + (arrange is np.stack))
    dtype, bound = common_dtype(*values), None
    positions = as_positions(dtype, values)
    if positions is not None:
        dtype, bound = "int32", largest(map(magnitude, positions))
    values = [full(v) for v in positions or [cast(v, dtype) for v in values]]
    arrays, offset = [], 0
    for v in values:
        arrays.append(element_numbers(v) + offset)
        offset += math.prod(v.shape)
    flat = Value(concatenate([v.node for v in values], dtype), dtype, (offset,), bound=bound)
    return take(flat, arrange(arrays, axis))


# --- indexing ----------------------------------------------------------------------------------


def _static_index(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    out: list[Any] = []
    for i in items:
        if isinstance(i, Value | Captured):
            tracer().refuse(
                "a computed value indexed by a tensor",
                "index the captured tensor itself: `t[q_idx]`; computed rows take static indices",
            )
        if isinstance(i, slice):
            if i.step is not None and int(i.step) <= 0:
                tracer().refuse("a slice with a negative step", "use `.flip(-1)`, as torch wants")
            parts = (i.start, i.stop, i.step)
            out.append(slice(*(None if p is None else int(p) for p in parts)))
        elif i is None or i is Ellipsis or isinstance(i, bool):
            out.append(i)
        elif isinstance(i, tuple | list):
            out.append([j if isinstance(j, bool) else int(j) for j in i])
        else:
            out.append(int(i))
    return tuple(out)


@op("__setitem__", elementwise=False)
def _setitem(input: Any, index: Any, value: Any) -> None:
    if type(input) is not Value:
        tracer().refuse_mutation("__setitem__")
    items, new = _static_index(index), val(value)
    rank = len(_places(input, items).shape)
    while new.ndim > rank and new.shape[0] == 1:  # as torch
        new = _moved("squeeze", new, 0)
    if _root(new) is _root(input):
        _refuse_overlap(_places(input, items), _places(new), copies=True)
    _put(input, items, new)


def _root(x: Value) -> Value:
    return x if x.root is None else x.root


def _places(x: Value, items: tuple[Any, ...] = (Ellipsis,)) -> Numbers:
    """The element numbers of ``x[items]`` in the value whose memory `x` shares."""
    with torch._C.DisableTorchFunction():
        places = torch.from_numpy(element_numbers(x)) if x.places is None else x.places
        return places[items].numpy()


def check_overlap(name: str, target: Value, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what torch does where the operation `name` in place reads other elements that it
    writes: the result would depend on the order."""
    if name in ("fill", "masked_fill"):  # torch reads their number before it writes
        return
    for x in leaves((args, kwargs)):
        if type(x) is Value and x is not target and _root(x) is _root(target):
            _refuse_overlap(_places(target), _places(x), copies=name == "copy")


def _refuse_overlap(written: Numbers, read: Numbers, copies: bool) -> None:
    read = np.broadcast_to(read, written.shape)
    # A copy of an element to itself changes nothing that another one reads.
    both = np.isin(written, read) if copies else np.isin(read, written)
    if (both & (read != written)).any():
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor "
            "refer to a single memory location"
        )


_CONVERT = frozenset({"copy", "fill", "masked_fill", "hardtanh", "threshold"})
"""In-place operations that convert what they store, whatever its dtype."""


def check_dtype(name: str, target: Value, new: Value) -> None:
    """Raise what torch does where the operation `name` in place would lose the result's dtype."""
    if name == "float_power" and target.name != new.name:
        raise RuntimeError(f"the base of float_power_, of {target.dtype}, can't be cast to double")
    if name not in _CONVERT and not torch.can_cast(new.dtype, target.dtype):
        raise RuntimeError(
            f"result type {new.dtype} can't be cast to the desired output type {target.dtype}"
        )


def write(target: Value, new: Value) -> None:
    """Give `target` the value `new`, of its shape, in place: what shares its memory changes too."""
    if target.root is not None:
        _put(target, (Ellipsis,), new)
        return
    _check_memory(target)
    target.node, target.name, target.bound = new.node, new.name, new.bound
    _follow(target)


def _check_memory(root: Value) -> None:
    if root.may_share:
        tracer().refuse(
            "an in-place operation on what may share memory with a captured tensor, or with a "
            "reshaped value whose strides depend on one",
            "change a copy: `x = x.clone()`",
        )


def _put(target: Value, items: tuple[Any, ...], value: Value) -> None:
    root = _root(target)
    _check_memory(root)
    v = full(root)
    places = _places(target, items)
    if _has_repeated(places):
        if _has_repeated(_places(target)):
            tracer().refuse(
                "an in-place operation on a value that is expanded: elements share memory",
                "change a copy: `x = x.clone()`",
            )
        if math.prod(value.shape) != 1:
            tracer().refuse(
                "an assignment of several values with an index that occurs twice",
                "give every index once: torch does not say which value stays",
            )
    new = full(expand(stored(v, value), np.shape(places)))
    v = v if v.name == new.name else cast(v, new.name)
    bound = None if v.bound is None else largest((v.bound, magnitude(new)))
    count = math.prod(v.shape)
    both = concatenate([v.node, new.node], v.name)
    flat = Value(both, v.name, (count + places.size,), bound=bound)
    numbers = np.arange(count)
    numbers[places.ravel()] = count + np.arange(places.size)
    whole = take(flat, numbers.reshape(v.shape))
    root.node, root.name, root.bound = whole.node, v.name, bound
    _follow(root)


def _has_repeated(numbers: Numbers) -> bool:
    return len(np.unique(numbers)) < numbers.size


def _follow(root: Value) -> None:
    """Read the views of a value again after it has changed."""
    for reference in root.views:
        view = reference()
        if view is not None and view.places is not None:
            with torch._C.DisableTorchFunction():
                places = view.places.numpy()
            now = take(root, places)
            view.node, view.name, view.bound = now.node, now.name, now.bound


# --- reductions: sums, extrema, dot products -----------------------------------------------------


def reduce(
    name: str, input: Any, dim: Any = None, keepdim: bool = False, *, to: str | None = None
) -> Value:
    """Reduce over `dim` (None or empty: all), converted `to` a dtype before."""
    v = full(val(input))
    v = cast(v, to) if to is not None else v
    rank = len(v.shape)
    dims = dims_of(() if dim is None else dim, rank) or tuple(range(rank))
    if rank == 0:
        return v
    kept = [d for d in range(rank) if d not in dims]
    shape = tuple(1 if d in dims else n for d, n in enumerate(v.shape)) if keepdim else tuple(
        v.shape[d] for d in kept
    )  # fmt: skip
    numbers = np.transpose(element_numbers(v), [*kept, *dims])
    numbers = numbers.reshape(math.prod(v.shape[d] for d in kept), -1)
    if len(numbers) == 1:
        row = take(v, numbers[0])
        if not node_shape(row.shape):
            return Value(row.node, v.name, shape, bound=v.bound)
        node = tracer().emitter.emit(name, [row.node], v.name, ())
        return Value(node, v.name, shape, bound=v.bound)
    if numbers.shape[1] <= numbers.shape[0]:
        parts = [take(v, column) for column in numbers.T]
        total = parts[0]
        for part in parts[1:]:
            total = emit(REDUCTIONS[name], (total, part), v.name)
        return Value(total.node, total.name, shape, bound=total.bound)
    nodes = [tracer().emitter.emit(name, [take(v, r).node], v.name, ()) for r in numbers]
    return Value(concatenate(nodes, v.name), v.name, shape, bound=v.bound)


def _total(
    name: str, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    v = val(input)
    if dtype is not None:
        v = to_dtype(v, dtype)
    return reduce(name, v, dim, keepdim, to=None if dtype or is_float(v.name) else "int64")


@op("mean", elementwise=False)
def _mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    v = val(input)
    if dtype is not None:
        v = to_dtype(v, dtype)
    if not is_float(v.name):
        tracer().refuse("mean of integers", "convert with `.float()` first")
    total = reduce("sum", v, dim, keepdim)
    count = math.prod(v.shape) // max(math.prod(total.shape), 1)
    if count.bit_count() == 1:  # a power of two: the product is exact
        return binary("mul", total, 1.0 / count)
    return emit("div", (total, cast(val(float(count)), total.name)), total.name)


def _extremum(name: str, pair: str, input: Any, *args: Any, **kw: Any) -> Any:
    other = args[0] if args else kw.get("other")
    if isinstance(other, Value | Captured):
        return binary(pair, input, other)
    if args or "dim" in kw:
        tracer().refuse(f"`{name[1:]}` with a dim, which also gives indices", f"use `.{name}(dim)`")
    return reduce(name, input)


def _truth(name: str, input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    v = val(input)
    if dim is not None and not ints(dim):
        found = cast(v, "bool")  # as in torch, `any` and `all` over no dims reduce nothing
    else:
        found = reduce(name, v, dim, keepdim, to="bool")
    return cast(found, v.name) if v.name == "uint8" else found


for _name in ("sum", "prod"):
    op(_name, elementwise=False)(partial(_total, _name))
for _name in ("amax", "amin"):
    op(_name, elementwise=False)(partial(reduce, _name))
    op(_name[1:], elementwise=False)(partial(_extremum, _name, REDUCTIONS[_name]))
for _name in ("any", "all"):
    op(_name, elementwise=False)(partial(_truth, _name))


@op("dot", "vdot", "inner", "linalg_vecdot", elementwise=False)
def _dot(input: Any, other: Any, dim: int = -1) -> Value:
    a, b = val(input), val(other)
    if len(a.shape) != 1 or len(b.shape) != 1:
        tracer().refuse("dot of values that are not vectors", "index down to one dim")
    return _total("sum", binary("mul", a, b))


@op("matmul", "__matmul__", "mm", "mv", "bmm", elementwise=False)
def _matmul(input: Any, other: Any = None, *args: Any) -> Value:
    if all(isinstance(x, Value | Captured) and x.ndim == 1 for x in (input, other)):
        return _dot(input, other)
    return tracer().refuse(
        "a matrix product", "only dot products of small vectors exist inside a hook; "
        "multiply before the call and capture the result"
    )  # fmt: skip
