"""Oracles of the interval form: the IR interpreted pair by pair, its C++ text compiled alone, and
`classify_grid`, which classifies every tile separately.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashattn_jit.variants.capture.extract import stride_pattern
from flashattn_jit.variants.interval.cpp import format_clause, format_term, lower_classify
from flashattn_jit.variants.interval.range_tables import build_tables
from flashattn_jit.variants.interval.simplify import Program, range_tables, simplify
from flashattn_jit.variants.interval.tile_runs import Grid, MaskParams
from flashattn_jit.variants.ir.ir import HOOK_INPUTS, Graph, GraphBuilder, TensorParam
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import Variant, as_variant
from tests.harness.abi import TensorParam as TensorStructure

from .tile_states import classify_boxes

ROOT = Path(__file__).parents[3]
ANY_SIZE = Dims()
_DTYPES = {d: getattr(np, d if d != "bool" else "bool_") for d in (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")}  # fmt: skip


@dataclass(frozen=True)
class Mask:
    """A traced mask and what it captured."""

    graph: Graph
    params: MaskParams
    tensors: tuple[TensorParam, ...]


def traced(fn: Any, dims: Dims = ANY_SIZE, **lengths: Any) -> Mask:
    """Trace a mask_mod or bind a variant. lengths: the per-request fields of `MaskParams`."""
    return bound(as_variant(fn), dims, {}, **lengths)


def bound(variant: Variant, dims: Dims, params: Mapping[str, object], **lengths: Any) -> Mask:
    """The mask of a variant with the params of a call; every pair is kept if it has no mask."""
    call = variant.bind(dims, params)
    graph = call.ir.hook("mask_mod")
    if graph is None:
        builder = GraphBuilder(HOOK_INPUTS["mask_mod"])
        graph = builder.finish(builder.add("const", dtype="bool", value=True))
    return Mask(graph, MaskParams(call.tensors, call.scalars, **lengths), call.ir.tensors)


def format_program(program: Program) -> Iterator[str]:
    """The interval form as lines such as ``keep if 0 <= q_idx - kv_idx <= scalar0 - 1``."""
    for name, clauses in (("keep", program.keep), ("drop", program.drop)):
        if not clauses:
            yield f"{name} never"
        for clause in clauses:
            yield f"{name} if {format_clause(program, clause)}"
    for node, low, high in program.guards:
        yield f"assuming {low} <= {format_term(program.nodes, node)} <= {high}"


def described(tensors: Sequence[torch.Tensor]) -> tuple[TensorParam, ...]:
    """The params as the C++ lowering takes them."""
    return tuple(
        TensorParam(f"t{i}", str(t.dtype).removeprefix("torch."), t.ndim, stride_pattern(t),
                    (-1,) * t.ndim)
        for i, t in enumerate(tensors)
    )  # fmt: skip


def classify_grid(graph: Graph, params: MaskParams, grid: Grid) -> Any:
    """The states of tiles, uint8 [B', H', query tiles, key tiles]; B' and H' as in `TileRuns`."""
    program = simplify(graph)
    heads = [
        [(x, x) for x in range(begin, end)] if program.uses(name) else [(begin, end - 1)]
        for name, begin, end in (("b", grid.b_begin, grid.b_end), ("h", grid.h_begin, grid.h_end))
    ]
    spans = [
        [(low, min(low + tile, end) - 1) for low in range(begin, end, tile)]
        for begin, end, tile in (
            (grid.q_begin, grid.q_end, grid.tile_q),
            (grid.kv_begin, grid.kv_end, grid.tile_kv),
        )
    ]
    axes = (*heads, *spans)
    boxes = np.array([np.ravel(box) for box in itertools.product(*axes)], np.int64)
    return classify_boxes(graph, params, boxes.reshape(-1, 8)).reshape([len(a) for a in axes])


# --- pair by pair ---------------------------------------------------------------------------------


def evaluate(graph: Graph, params: MaskParams, **indices: Any) -> Any:
    """Evaluates the IR as torch would on index arrays that broadcast; integers wrap."""
    values: list[Any] = []
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            args = [values[a] for a in node.args]
            values.append(_node(graph, node, args, params, indices))
    return values[graph.output]


def _node(graph: Graph, node: Any, args: list[Any], params: MaskParams, indices: Any) -> Any:
    dtype = _DTYPES[node.dtype]
    if node.op == "input":
        return np.asarray(indices[node.attr("name")], dtype)[..., None]
    if node.op == "const":
        return np.full(max(1, *node.shape, 1), node.attr("value"), dtype)
    if node.op == "scalar":
        return np.full(1, params.scalars[node.attr("slot")], dtype)
    if node.op == "iota":
        return np.arange(node.attr("length"), dtype=dtype)
    if node.op == "gather":
        return _gather(params.tensors[node.attr("slot")], args, bool(node.shape), dtype)
    if node.op == "searchsorted":
        array = params.tensors[node.attr("slot")].numpy()
        return np.searchsorted(array, args[0], side="right" if node.attr("right") else "left")
    if node.op in ("q_len", "kv_len"):
        return np.asarray(getattr(params, node.op), dtype)[args[0]]
    if node.op == "q_row":
        base = np.asarray(params.q_token0, np.int64) - np.asarray(params.q_offset, np.int64)
        return base[args[0]] + args[1]
    if node.op == "kv_slot":
        return np.asarray(params.kv_token0, np.int64)[args[0]] + args[1]
    if node.op == "slice":
        start, step, length = (node.attr(a) for a in ("start", "step", "length"))
        return args[0][..., [start + step * i for i in range(length)]]
    if node.op in ("cat", "interleave"):
        arrays = np.broadcast_arrays(*args) if node.op == "interleave" else args
        if node.op == "interleave":
            return np.stack(arrays, -1).reshape(*arrays[0].shape[:-1], -1)
        shape = np.broadcast_shapes(*(a.shape[:-1] for a in arrays))
        return np.concatenate([np.broadcast_to(a, (*shape, a.shape[-1])) for a in arrays], -1)
    if node.op == "broadcast":
        return np.broadcast_to(args[0], (*args[0].shape[:-1], node.attr("length")))
    reduce = {"sum": np.sum, "prod": np.prod, "amax": np.max, "amin": np.min, "any": np.any,
              "all": np.all}.get(node.op)  # fmt: skip
    if reduce is not None:
        length = (graph.nodes[node.args[0]].shape or (1,))[0]
        wide = np.broadcast_to(args[0], (*args[0].shape[:-1], length))
        return reduce(wide, axis=-1, keepdims=True).astype(dtype)
    return np.asarray(_MAPS[node.op](*args)).astype(dtype)


def _gather(tensor: torch.Tensor, indices: list[Any], row: bool, dtype: Any) -> Any:
    array = (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()
    at = []
    for index, size in zip(indices, array.shape, strict=False):
        index = index.astype(np.int64)[..., 0]
        if size == 0:
            return np.zeros((*index.shape, array.shape[-1] if row else 1), dtype)
        at.append(np.clip(np.where(index < 0, index + size, index), 0, size - 1))
    picked = np.asarray(array[tuple(at)])
    return picked.astype(dtype) if row else picked.astype(dtype)[..., None]


def _shift(left: bool) -> Callable[[Any, Any], Any]:
    def shift(a: Any, b: Any) -> Any:
        bits = 8 * a.dtype.itemsize
        ok = (b >= 0) & (b < bits)
        if left:
            return np.where(ok, a << np.where(ok, b, 0), 0)
        return a >> np.where(ok, b, bits - 1)

    return shift


def _nonzero(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Integer division by zero gives 0."""

    def divide(a: Any, b: Any) -> Any:
        if a.dtype.kind == "f":
            return function(a, b)
        return np.where(b == 0, 0, function(a, np.where(b == 0, 1, b)))

    return divide


def _truncdiv(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return np.trunc(a / b)
    q = a // b
    return q + ((q < 0) & (q * b != a))


_MAPS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "floordiv": _nonzero(np.floor_divide), "truncdiv": _nonzero(_truncdiv),
    "remainder": _nonzero(np.remainder), "fmod": _nonzero(np.fmod), "pow": np.power,
    "minimum": np.minimum, "maximum": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "shl": _shift(True), "shr": _shift(False), "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "not": np.invert, "exp": np.exp, "log": np.log,
    "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "floor": np.floor,
    "tanh_approx": np.tanh,
    "ceil": np.ceil, "round": np.rint, "trunc": np.trunc, "ge": np.greater_equal,
    "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal,
    "isnan": np.isnan, "isinf": np.isinf, "where": np.where, "cast": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "exp2": np.exp2, "log2": np.log2,
    "log1p": np.log1p, "expm1": np.expm1, "log10": np.log10, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh,
    "erf": lambda x: np.asarray(torch.erf(torch.as_tensor(x))),
}  # fmt: skip


def dense_mask(mask: Mask, grid: Grid) -> Any:
    """Whether the mask keeps each pair, bool [B, H, Sq, Skv]."""
    axes = np.ix_(
        np.arange(grid.b_begin, grid.b_end),
        np.arange(grid.h_begin, grid.h_end),
        np.arange(grid.q_begin, grid.q_end),
        np.arange(grid.kv_begin, grid.kv_end),
    )
    names = ("b", "h", "q_idx", "kv_idx")
    kept = evaluate(mask.graph, mask.params, **dict(zip(names, axes, strict=True)))
    shape = np.broadcast_shapes(*(a.shape for a in axes))
    return np.broadcast_to(np.asarray(kept)[..., 0] != 0, shape)


def brute_force(mask: Mask, grid: Grid) -> Any:
    """The exact state of every tile, uint8 [B, H, query tiles, key tiles]."""
    kept = dense_mask(mask, grid)
    rows = range(0, kept.shape[2], grid.tile_q)
    columns = range(0, kept.shape[3], grid.tile_kv)
    out = np.zeros((*kept.shape[:2], len(rows), len(columns)), np.uint8)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            tile = kept[:, :, r : r + grid.tile_q, c : c + grid.tile_kv]
            out[:, :, i, j] = np.where(tile.all((2, 3)), 2, tile.any((2, 3)))
    return out


# --- C++ ------------------------------------------------------------------------------------------


_DRIVER = """
#include <fajit/interval.h>
using namespace fajit;
{functions}
typedef int (*Classify)(const Context&, Interval, Interval, Interval, Interval);
static const Classify table[] = {{ {names} }};
extern "C" void classify_boxes(int which, const fajit_tensor* tensors, int num_tensors,
                               const uint64_t* scalars, const int32_t* lengths, int num_requests,
                               const int64_t* boxes, int64_t count, uint8_t* states) {{
  fajit_args args = {{}};
  args.tensors = tensors;
  args.num_tensors = num_tensors;
  args.scalars = scalars;
  args.num_requests = num_requests;
  args.q_len = lengths;
  args.kv_len = lengths + num_requests;
  args.q_offset = lengths + 2 * num_requests;
  args.q_token0 = lengths + 3 * num_requests;
  args.kv_token0 = lengths + 4 * num_requests;
  const Context c(&args);
  for (int64_t i = 0; i < count; ++i) {{
    const int64_t* x = boxes + 8 * i;
    states[i] = table[which](c, {{x[0], x[1]}}, {{x[2], x[3]}}, {{x[4], x[5]}}, {{x[6], x[7]}});
  }}
}}
"""


def read_values(mask: Mask, tables: bool) -> tuple[list[torch.Tensor], Any, Any, int]:
    """What the C++ of a mask reads: tensors and, if asked for, their tables; uint64 scalars, at
    least one; int32 lengths [5, requests or 1]; the number of requests."""
    params = mask.params
    tensors = list(params.tensors)
    if tables:
        tensors += build_tables(range_tables(mask.graph), params.tensors)
    scalars = np.array(
        [np.asarray(s, np.float64 if isinstance(s, float) else np.int64).view(np.uint64)
         for s in params.scalars] or [0], np.uint64)  # fmt: skip
    fields = (params.q_len, params.kv_len, params.q_offset, params.q_token0, params.kv_token0)
    count = len(params.kv_len)
    lengths = np.zeros((5, max(1, count)), np.int32)
    for row, values in zip(lengths, fields, strict=True):
        row[: len(values)] = values
    return tensors, scalars, lengths, count


class Compiled:
    """The C++ lowerings of several masks in one shared object."""

    def __init__(
        self, masks: Sequence[Mask], folder: Path, flags: Sequence[str] = ("-O1",)
    ) -> None:
        functions, names = [], []
        for i, mask in enumerate(masks):
            body = lower_classify(mask.graph, mask.tensors)
            names.append(f"f{i}")
            functions.append(
                f"static int f{i}(const Context& c, Interval b, Interval h, Interval q, "
                f"Interval k) {{\n{body}\n}}"
            )
        source, library = folder / "classify.cpp", folder / "classify.so"
        source.write_text(_DRIVER.format(functions="\n".join(functions), names=", ".join(names)))
        subprocess.run(
            ["g++", "-std=c++17", *flags, "-Wall", "-Wno-unused-parameter", "-Werror", "-shared",
             "-fPIC", f"-I{ROOT / 'csrc/include'}", str(source), "-o", str(library)],
            check=True,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(library))

    def states(self, which: int, mask: Mask, boxes: Any, tables: bool = True) -> Any:
        """uint8 states of `boxes`, int64 [N, 8]: b, h, q, k as lo, hi."""
        tensors, scalars, lengths, count = read_values(mask, tables)
        array = (TensorStructure * max(1, len(tensors)))()
        for entry, t in zip(array, tensors, strict=False):
            entry.describe(t)
        boxes = np.ascontiguousarray(boxes, np.int64)
        states = np.zeros(len(boxes), np.uint8)
        self._library.classify_boxes(
            which, array, len(tensors), _pointer(scalars), _pointer(lengths), count,
            _pointer(boxes), ctypes.c_int64(len(boxes)), _pointer(states),
        )  # fmt: skip
        return states


def _pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
