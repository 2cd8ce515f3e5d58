"""Evaluates a `Graph` with torch over broadcast index grids: an independent meaning of the IR.

A scalar node is a tensor that broadcasts to the grid; a vector node has one more dim, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.ir.dtypes import TORCH_DTYPES

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder, "fmod": torch.fmod, "pow": torch.pow,
    "minimum": torch.minimum, "maximum": torch.maximum, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "atan2": torch.atan2, "ge": torch.ge, "gt": torch.gt,
    "le": torch.le, "lt": torch.lt, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1), "prod": lambda x: x.prod(-1), "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1), "any": lambda x: x.any(-1), "all": lambda x: x.all(-1),
}  # fmt: skip


def evaluate(
    graph: ir.Graph,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
    builtin: Callable[[str, Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """The graph's result; checks that every node has the dtype and shape that it declares."""
    values: list[Tensor] = []
    for node in graph.nodes:
        args = [values[a] for a in node.args]
        shapes = [graph.nodes[a].shape for a in node.args]
        value = _evaluate(node, args, shapes, inputs, tensors, scalars, builtin)
        assert value.dtype == TORCH_DTYPES[node.dtype], (node, value.dtype)
        if node.shape:
            assert value.shape[-1] == node.shape[0], (node, value.shape)
        _check_dtypes(graph, node)
        values.append(value)
    return values[graph.output]


def _check_dtypes(graph: ir.Graph, node: ir.Node) -> None:
    """Arguments of an arithmetic node share a dtype, which is its own unless it compares."""
    args = [graph.nodes[a].dtype for a in node.args]
    if ir.OPS[node.op].kind != "map" or node.op == "cast":
        return
    if node.op == "where":
        assert args[0] == "bool" and args[1] == args[2] == node.dtype, node
    else:
        assert len(set(args)) == 1, (node, args)
        compares = node.op in ("ge", "gt", "le", "lt", "eq", "ne", "isnan", "isinf")
        assert node.dtype == ("bool" if compares else args[0]), node


def _evaluate(
    node: ir.Node, args: list[Tensor], shapes: list[tuple[int, ...]],
    inputs: Mapping[str, Tensor], tensors: Sequence[Tensor], scalars: Sequence[float],
    builtin: Callable[[str, Sequence[Tensor]], Tensor] | None,
) -> Tensor:  # fmt: skip
    op, dtype = node.op, TORCH_DTYPES[node.dtype]
    if op == "input":
        return inputs[str(node.attr("name"))]
    if op == "const":
        return torch.tensor(node.attr("value"), dtype=dtype)
    if op == "scalar":
        return torch.tensor(scalars[node.int_attr("slot")], dtype=dtype)
    if op == "iota":
        return torch.arange(node.int_attr("length"), dtype=dtype)
    if op == "gather":
        return gather(tensors[node.int_attr("slot")], args).to(dtype)
    if op == "lookup":
        *at, last = args
        return gather(tensors[node.int_attr("slot")], [*(i[..., None] for i in at), last]).to(dtype)
    if op == "searchsorted":
        table = tensors[node.int_attr("slot")]
        return torch.searchsorted(table, args[0].to(table.dtype), right=bool(node.attr("right")))
    if op in ("q_len", "kv_len", "q_row", "kv_slot"):
        assert builtin is not None
        return builtin(op, args).to(dtype)
    if op == "cast":
        return _cast(args[0], dtype)
    kind = ir.OPS[op].kind
    if kind == "map":
        wide = bool(node.shape)
        lifted = [a[..., None] if wide and not s else a for a, s in zip(args, shapes, strict=True)]
        return _map(op, lifted)
    if kind == "reduce":
        return _REDUCE[op](args[0]).to(dtype)
    return _rearrange(node, args, shapes)


def gather(t: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Indices wrap when negative, then are clamped."""
    at = []
    for d, i in enumerate(indices):
        i = torch.where(i < 0, i + t.shape[d], i).clamp(0, max(t.shape[d] - 1, 0))
        at.append(i.long())
    return t[tuple(torch.broadcast_tensors(*at))] if at else t


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x != 0 if dtype == torch.bool else x.to(dtype)


def _map(op: str, args: list[Tensor]) -> Tensor:
    if op == "where":
        return torch.where(*args)
    if op == "not":
        return torch.bitwise_not(args[0])
    if op in _BINARY:
        return _BINARY[op](*args)
    function: Callable[[Tensor], Tensor] = getattr(torch, "tanh" if op == "tanh_approx" else op)
    return function(args[0])


def _rearrange(node: ir.Node, args: list[Tensor], shapes: list[tuple[int, ...]]) -> Tensor:
    if node.op == "slice":
        start, step = node.int_attr("start"), node.int_attr("step")
        where = torch.arange(node.int_attr("length")) * step + start
        assert int(where.min()) >= 0 and int(where.max()) < args[0].shape[-1], node
        return args[0][..., where]
    if node.op == "broadcast":
        assert not shapes[0], node
        return args[0][..., None].expand(*args[0].shape, node.int_attr("length"))
    leading = torch.broadcast_shapes(*(a.shape[:-1] for a in args))
    full = [a.expand(*leading, a.shape[-1]) for a in args]
    if node.op == "cat":
        return torch.cat(full, -1)
    assert node.op == "interleave", node
    return torch.stack(full, -1).flatten(-2)


def grids(
    batch: int, heads: int, q_len: int, kv_len: int, q_offset: int = 0, group: int = 1
) -> dict[str, Any]:
    """Index inputs that broadcast to [batch, heads, q_len, kv_len]."""
    names = {"b": (batch, 0), "h": (heads, 1), "q_idx": (q_len, 2), "kv_idx": (kv_len, 3)}
    out: dict[str, Tensor] = {}
    for name, (size, dim) in names.items():
        shape = [1, 1, 1, 1]
        shape[dim] = size
        start = q_offset if name == "q_idx" else 0
        out[name] = (torch.arange(size, dtype=torch.int32) + start).view(shape)
    out["kv_h"] = (torch.arange(heads // group, dtype=torch.int32)).view(1, -1, 1, 1)
    return out
