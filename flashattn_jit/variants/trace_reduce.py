"""Reductions of small static vectors and rows: sums, extrema, norms, dot products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashattn_jit.variants.ir import is_float
from flashattn_jit.variants.trace_ops import (
    as_float,
    binary,
    cast,
    emit,
    node_shape,
    op,
    to_dtype,
    val,
)
from flashattn_jit.variants.trace_values import Captured, Value, tracer
from flashattn_jit.variants.trace_vectors import concatenate, element_numbers, full, ints, take


def reduce(name: str, input: Any, dim: Any, keepdim: bool, dtype: str | None = None) -> Value:
    """Reduce over `dim` (None: all)."""
    v = full(val(input))
    v = cast(v, dtype) if dtype is not None else v
    rank = len(v.shape)
    if rank == 0:
        return v
    dims = tuple(range(rank)) if dim is None or dim == () else ints(dim)
    dims = tuple(d % rank for d in dims)
    kept = [d for d in range(rank) if d not in dims]
    shape = tuple(1 if d in dims else n for d, n in enumerate(v.shape)) if keepdim else tuple(
        v.shape[d] for d in kept
    )  # fmt: skip
    numbers = np.transpose(element_numbers(v), [*kept, *dims])
    numbers = numbers.reshape(math.prod(v.shape[d] for d in kept), -1)
    if len(numbers) == 1:
        row = take(v, numbers[0])
        if not node_shape(row.shape):
            return Value(row.node, v.name, shape)
        node = tracer().emitter.emit(name, [row.node], v.name, ())
        return Value(node, v.name, shape)
    pairwise = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum",
                "any": "or", "all": "and"}[name]  # fmt: skip
    if numbers.shape[1] <= numbers.shape[0]:
        parts = [take(v, column) for column in numbers.T]
        total = parts[0]
        for part in parts[1:]:
            total = emit(pairwise, (total, part), v.name)
        return Value(total.node, v.name, shape)
    nodes = [tracer().emitter.emit(name, [take(v, r).node], v.name, ()) for r in numbers]
    return Value(concatenate(nodes, v.name), v.name, shape)


@op("sum", elementwise=False)
def _sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    v = val(input)
    if dtype is not None:
        v = to_dtype(v, dtype)
    return reduce("sum", v, dim, keepdim, None if is_float(v.name) else "int64")


@op("prod", elementwise=False)
def _prod(input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    v = val(input)
    return reduce("prod", v, dim, keepdim, None if is_float(v.name) else "int64")


@op("mean", elementwise=False)
def _mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    v = val(input)
    if dtype is not None:
        v = as_float(v)
    if not is_float(v.name):
        tracer().refuse("mean of integers", "convert with `.float()` first")
    total = reduce("sum", v, dim, keepdim)
    count = math.prod(v.shape) // max(math.prod(total.shape), 1)
    return binary("mul", total, 1.0 / count) if _is_power_of_two(count) else emit(
        "div", (total, cast(val(float(count)), total.name)), total.name
    )  # fmt: skip


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _extremum(name: str, pair: str, input: Any, *args: Any, **kw: Any) -> Any:
    other = args[0] if args else kw.get("other")
    if isinstance(other, Value | Captured):
        return binary(pair, input, other)
    if args or "dim" in kw:
        tracer().refuse(f"`{name[1:]}` with a dim, which also gives indices", f"use `.{name}(dim)`")
    return reduce(name, input, None, False)


@op("max", elementwise=False)
def _max(input: Any, *args: Any, **kw: Any) -> Any:
    return _extremum("amax", "maximum", input, *args, **kw)


@op("min", elementwise=False)
def _min(input: Any, *args: Any, **kw: Any) -> Any:
    return _extremum("amin", "minimum", input, *args, **kw)


@op("amax", elementwise=False)
def _amax(input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return reduce("amax", input, dim, keepdim)


@op("amin", elementwise=False)
def _amin(input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return reduce("amin", input, dim, keepdim)


@op("any", elementwise=False)
def _any(input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return reduce("any", input, dim, keepdim, "bool")


@op("all", elementwise=False)
def _all(input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return reduce("all", input, dim, keepdim, "bool")


@op("dot", "vdot", "inner", "linalg_vecdot", elementwise=False)
def _dot(input: Any, other: Any, dim: int = -1) -> Value:
    a, b = val(input), val(other)
    if len(a.shape) != 1 or len(b.shape) != 1:
        tracer().refuse("dot of values that are not vectors", "index down to one dim")
    return _sum(binary("mul", a, b))


@op("matmul", "__matmul__", "mm", "mv", "bmm", "einsum", "linear", elementwise=False)
def _matmul(input: Any, other: Any = None, *args: Any) -> Value:
    a, b = (val(x) if isinstance(x, Value) or _is_row(x) else None for x in (input, other))
    if a is not None and b is not None and len(a.shape) == len(b.shape) == 1:
        return _dot(a, b)
    return tracer().refuse(
        "a matrix product", "only dot products of small vectors exist inside a hook; "
        "multiply before the call and capture the result"
    )  # fmt: skip


def _is_row(x: Any) -> bool:
    return isinstance(x, Captured) and x.ndim == 1


@op("norm", "linalg_norm", "linalg_vector_norm", elementwise=False)
def _norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None,
    out: Any = None, dtype: Any = None,
) -> Any:  # fmt: skip
    x = as_float(input)
    power = ord if ord is not None else p
    if power is None or power == "fro" or power == 2:
        total = reduce("sum", binary("mul", x, x), dim, keepdim)
        return emit("sqrt", (total,), total.name)
    size = emit("abs", (x,), x.name)
    if power == math.inf:
        return reduce("amax", size, dim, keepdim)
    if power == 1:
        return reduce("sum", size, dim, keepdim)
    return tracer().refuse(f"a norm of order {power}", "use order 1, 2 or inf")


@op("var", "std", elementwise=False)
def _var(input: Any, *args: Any, **kw: Any) -> Any:
    return tracer().refuse(
        "var and std", "write the mean of squares: `((x - x.mean(-1, keepdim=True)) ** 2).mean(-1)`"
    )
