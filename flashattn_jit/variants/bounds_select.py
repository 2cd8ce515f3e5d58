"""Which interval function evaluates each node: one table for both lowerings.

`intervals` (numpy) and ``fajit/interval*.h`` (C++) implement the functions under the names chosen
here: ``i_`` integers, ``f_`` reals, ``t_`` conditions. Loads and sums are the lowerings' own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .bounds_terms import INT_RANGE
from .ir import Node

OWN = ("input", "linear", "gather", "searchsorted", "q_len", "kv_len", "q_row", "kv_slot", "bit")
"""Operations that each lowering handles itself."""

_INT_WRAPS = {"add", "sub", "mul", "neg", "abs", "floordiv", "truncdiv", "remainder", "fmod", "shl",
              "shr", "and", "or", "xor"}  # fmt: skip
_INT_MAPS = _INT_WRAPS | {"minimum", "maximum", "sign"}
_REAL_MAPS = {
    "add", "sub", "mul", "div", "neg", "abs", "sign", "minimum", "maximum", "floor", "ceil",
    "round", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh",
    "sigmoid", "erf", "atan", "sinh", "floordiv", "remainder",
}  # fmt: skip
_COMPARISONS = {"ge", "gt", "le", "lt", "eq", "ne"}
_LOGIC = {"and": "and", "or": "or", "xor": "xor", "ne": "xor", "mul": "and", "add": "or",
          "minimum": "and", "maximum": "or"}  # fmt: skip
_REARRANGED = ("cat", "interleave", "slice", "broadcast", "amax", "amin")


@dataclass(frozen=True, slots=True)
class Step:
    """Call `name` on the values of nodes `args`, then on the numbers `extra`.

    wrap: the dtype's range, to which an integer result that leaves it is set. negate: the condition
    is inverted afterwards.
    """

    name: str
    args: tuple[int, ...] = ()
    extra: tuple[int | float, ...] = ()
    wrap: tuple[int, int] | None = None
    negate: bool = False


def kind(dtype: str) -> str:
    """``t`` (condition), ``i`` (integer) or ``f`` (real)."""
    return "t" if dtype == "bool" else "i" if dtype in INT_RANGE else "f"


def single_precision(node: Node) -> int:
    """1 if results of the node are rounded to float32, else 0."""
    return int(node.dtype == "float32")


def select(nodes: tuple[Node, ...], term: int) -> Step:
    """The call that evaluates node `term`, which is none of `OWN`."""
    node = nodes[term]
    own = kind(node.dtype)
    if node.op == "top":
        return _top(node)
    if node.op == "const":
        return Step(f"{own}_const", extra=(_number(node),))
    if node.op == "scalar":
        return Step(f"{own}_scalar", extra=(node.int_attr("slot"),))
    if node.op == "iota":
        return Step(f"{own}_range", extra=(node.int_attr("length"),))
    arg = nodes[node.args[0]]
    if node.op in _REARRANGED:
        return Step(f"{own}_hull", node.args)
    if node.op == "where":
        return Step(f"{own}_where", node.args)
    if node.op == "cast":
        return _cast(node, kind(arg.dtype))
    if own == "t":
        return _condition(node, kind(arg.dtype))
    if own == "i":
        return _integer(node, arg)
    if node.op == "sum":
        return Step("f_sum", node.args, (arg.shape[0], single_precision(node)))
    if node.op in _REAL_MAPS:
        return Step(f"f_{node.op}", node.args, (single_precision(node),))
    return _top(node)


def _top(node: Node) -> Step:
    extra = INT_RANGE[node.dtype] if kind(node.dtype) == "i" else ()
    return Step(f"{kind(node.dtype)}_top", extra=extra)


def _number(node: Node) -> int | float:
    value = node.attr("value")
    assert isinstance(value, int | float)
    if kind(node.dtype) != "f":
        return int(value)
    return ctypes.c_float(value).value if single_precision(node) else float(value)


def _cast(node: Node, source: str) -> Step:
    own = kind(node.dtype)
    if source == own:
        if own == "i":
            return Step("i_hull", node.args, wrap=INT_RANGE[node.dtype])
        if own == "f":
            return Step("f_round_to", node.args, (single_precision(node),))
        return Step("t_hull", node.args)
    if own == "t":
        return Step(f"t_from_{source}", node.args)
    if own == "i":
        wrap = INT_RANGE[node.dtype]
        return Step(f"i_from_{source}", node.args, wrap if source == "f" else ())
    return Step(f"f_from_{source}", node.args, (single_precision(node),))


def _condition(node: Node, source: str) -> Step:
    if node.op == "not":
        return Step("t_hull", node.args, negate=True)
    if node.op in ("any", "all"):
        return Step(f"t_from_{source}", node.args)
    if source == "t" and (node.op in _LOGIC or node.op == "eq"):
        return Step(f"t_{_LOGIC.get(node.op, 'xor')}", node.args, negate=node.op == "eq")
    if node.op in _COMPARISONS and source != "t":
        return Step(f"{source}_{node.op}", node.args)
    if node.op in ("isnan", "isinf") and source == "f":
        return Step(f"f_{node.op}", node.args)
    return Step("t_top")


def _integer(node: Node, arg: Node) -> Step:
    own = INT_RANGE[node.dtype]
    if node.op == "sum" and kind(arg.dtype) == "i":
        return Step("i_scale", node.args, (arg.shape[0],), own)
    if node.op in _INT_MAPS and kind(arg.dtype) == "i":
        return Step(f"i_{node.op}", node.args, wrap=own if node.op in _INT_WRAPS else None)
    return _top(node)
