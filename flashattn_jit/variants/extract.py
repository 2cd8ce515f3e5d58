"""What is read again on every call, as data, and the Python functions that read it.

A `Location` says where a hook finds a value and what must hold of it; a `Node` how a number follows
from others. This is the one module of the package that writes and runs Python source: every call
reads every location of its variant, and code that is made for them is the fastest way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

# --- locations -----------------------------------------------------------------------------------

ROOT, PARAMS, NOWHERE = -1, -2, -3
"""Where a location may start beside another one: the object that was visited, the values of the
declared params, and no place at all: its first step names an object."""

StepKind = Literal["attribute", "item", "cell", "class", "object", "call"]
"""Steps from one object to the next, with their operands: ``.name``, ``[key]``, the contents of the
cell ``[i]``, the class (`Held`), any object (`Held`), the result of a function (`Held`)."""

GuardKind = Literal[
    "type", "is", "alive", "same", "length", "keys", "lacks", "empty", "strided"
]  # fmt: skip
"""What must hold of the object at a location, with their operands: its type (`Held`), itself
(`Held`), the object of a weak reference (`Held`), the object at an earlier location, its length,
its keys (a tuple), a key that it lacks; that it is empty; that it is a strided tensor."""

Yields = Literal["", "tensor", "number", "value", "repr", "frozenset"]
"""What a location adds to the result: nothing, a tensor, a number, or a part of the structural key:
the value, its repr, its frozenset."""

LOST = (AttributeError, LookupError, TypeError, ValueError)
"""What reading a location raises that is gone."""


class Held:
    """An object by identity: equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


Step = tuple[StepKind, Any]
Guard = tuple[GuardKind, Any]


@dataclass(slots=True)
class Location:
    """A place that is read on every call.

    base: the index of the location it starts from, or ROOT, PARAMS or NOWHERE. Equal lists of
    locations make equal extractors.
    """

    base: int
    steps: tuple[Step, ...]
    guards: list[Guard] = field(default_factory=list)
    yields: Yields = ""


Extracted = tuple[Any, tuple[torch.Tensor, ...], tuple[float, ...]]
Extractor = Callable[[object, Sequence[object]], Extracted | None]


def stride_pattern(t: torch.Tensor) -> str:
    """Per dim ``0`` (broadcast), ``1`` (dense) or ``n``; dims of one element count as dense."""
    last = t.dim() - 1
    inner_dense = last >= 0 and (t.size(last) <= 1 or t.stride(last) == 1)
    out = ["1" if d == last else "n" for d in range(last + 1)]
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1:
            out[d] = "0" if stride == 0 else "n"
            if stride == 1 and (d == last or not inner_dense):
                out[d] = "1"
    return "".join(out)


# --- numbers -------------------------------------------------------------------------------------

Source = tuple[str, int] | tuple[str, int, int] | tuple[str, str]
"""What a number may be: ("number", i), ("size", tensor i, dim), ("dim", name of a Dims)."""

Node = tuple[Any, ...]
"""How a number follows from others: a `Source`, ("constant", x, its repr), or an operator of
`BINARY` or `UNARY` with the nodes of its operands."""

BINARY = ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^")
UNARY = {
    "__neg__": "(-{})", "__pos__": "(+{})", "__invert__": "(~{})", "__abs__": "abs({})",
    "__round__": "round({})", "__floor__": "floor({})", "__ceil__": "ceil({})",
    "__trunc__": "trunc({})",
}  # fmt: skip

Tensors = Sequence[torch.Tensor]
Numbers = Sequence[float]
Finish = Callable[[Tensors, Numbers], tuple[tuple[torch.Tensor, ...], tuple[float, ...]]]
"""From captured tensors and numbers to those of a kernel's slots."""


def constant(x: float) -> Node:
    """The node of a literal; 1, 1.0, True, 0.0 and -0.0 are five."""
    return "constant", x, repr(x)


def numbers_of(node: Node) -> set[int]:
    """The indices of the captured numbers that a node depends on."""
    if node[0] == "number":
        return {node[1]}
    return set[int]().union(*(numbers_of(x) for x in node[1:] if isinstance(x, tuple)))


def _number(node: Node) -> str:
    kind = node[0]
    if kind == "number":
        return f"n[{node[1]}]"
    if kind == "size":
        return f"t[{node[1]}].shape[{node[2]}]"
    if kind == "dim":
        return f"d.{node[1]}"
    if kind == "constant":
        return f"({node[2]})"
    operands = [_number(x) for x in node[1:]]
    return f"({f' {kind} '.join(operands)})" if kind in BINARY else UNARY[kind].format(*operands)


# --- functions -----------------------------------------------------------------------------------

_SCOPE = {
    "__builtins__": {}, "LOST": LOST, "strided": torch.strided,
    "pattern": stride_pattern, "frozenset": frozenset, "len": len, "repr": repr, "tuple": tuple,
    "type": type, "abs": abs, "round": round, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc, "inf": math.inf, "nan": math.nan,
}  # fmt: skip

_FAILS: dict[GuardKind, str] = {
    "type": "type({0}) is not {1}", "is": "{0} is not {1}", "alive": "{0} is not {1}()",
    "same": "{0} is not {1}", "length": "len({0}) != {1}", "keys": "tuple({0}) != {1}",
    "lacks": "{1} in {0}", "empty": "{0}", "strided": "{0}.layout is not strided or {0}.is_nested",
}  # fmt: skip
"""When guards fail, of the texts of a location and an operand."""

_KEYS = {"value": "{}", "repr": "repr({})", "frozenset": "frozenset({})"}


def _function(header: str, body: Sequence[str], scope: dict[str, Any]) -> Any:
    """The function of a header such as ``f(x)`` and the lines of its body."""
    text = "\n    ".join([f"def {header}:", *body])
    made = {**_SCOPE, **scope}
    exec(compile(text, "<flashattn_jit captures>", "exec"), made)
    return made[header.partition("(")[0]]


def _tuple(items: Collection[str]) -> str:
    return f"({', '.join(items)},)" if items else "()"


class _Constants:
    """Objects that a function refers to, by the names that it finds them under."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self._names: dict[Held, str] = {}

    def text(self, x: Any) -> str:
        """A literal, or a name of the object."""
        value = x.value if isinstance(x, Held) else x
        if value is None or value is Ellipsis or type(value) in (int, str):
            return repr(value)
        name = self._names.setdefault(Held(value), f"k{len(self._names)}")
        self.scope[name] = value
        return name


def extractor(locations: Sequence[Location]) -> Extractor:
    """The function (root, params) -> (structural key, tensors, numbers) that reads the locations.

    It returns None where a guard fails or a location is gone: there it is another structure.
    """
    constants = _Constants()
    bases = {x.base for x in locations}
    bases.update(operand for x in locations for kind, operand in x.guards if kind == "same")
    names = {ROOT: "v", PARAMS: "p", NOWHERE: ""}
    lines: list[str] = []
    keys: list[str] = []
    found_tensors: list[str] = []
    found_numbers: list[str] = []
    for i, location in enumerate(locations):
        text = names[location.base]
        for kind, operand in location.steps:
            if kind == "attribute":
                text = f"{text}.{operand}"
            elif kind == "item":
                text = f"{text}[{constants.text(operand)}]"
            elif kind == "cell":
                text = f"{text}[{operand}].cell_contents"
            elif kind == "call":
                text = f"{constants.text(operand)}({text})"
            else:
                text = constants.text(operand)
        if location.steps and (i in bases or location.yields or len(location.guards) != 1):
            lines.append(f"x{i} = {text}")
            text = f"x{i}"
        names[i] = text
        failed = [
            _FAILS[kind].format(text, names[operand] if kind == "same" else constants.text(operand))
            for kind, operand in location.guards
        ]
        if failed:
            lines.append(f"if {' or '.join(failed)}: return None")
        if location.yields == "tensor":
            # Most tensors are contiguous, and asking for that is fast: their rank says it all.
            pattern = f"{text}.dim() if {text}.is_contiguous() else pattern({text})"
            keys += [f"{text}.dtype", pattern]
            found_tensors.append(text)
        elif location.yields == "number":
            found_numbers.append(text)
        elif location.yields:
            keys.append(_KEYS[location.yields].format(text))
    lines.append(f"return {_tuple(keys)}, {_tuple(found_tensors)}, {_tuple(found_numbers)}")
    body = ["try:", *(f"    {line}" for line in lines), "except LOST:", "    return None"]
    return _function("extract(v, p)", body, constants.scope)  # type: ignore[no-any-return]


def calculator(nodes: Sequence[Node]) -> Callable[..., tuple[Any, ...]]:
    """The function (tensors, numbers, dims or nothing) -> the values of the nodes."""
    return _function(  # type: ignore[no-any-return]
        "calculate(t, n, d=None)", [f"return {_tuple([_number(x) for x in nodes])}"], {}
    )


def finisher(
    tensors: Sequence[int | Callable[[Tensors, Numbers], torch.Tensor]], numbers: Sequence[Node]
) -> Finish:
    """The function of a kernel's slots: tensors are captured ones by their index, or made by
    functions of the same arguments."""
    scope = {f"step{i}": make for i, make in enumerate(tensors) if not isinstance(make, int)}
    texts = [f"t[{x}]" if isinstance(x, int) else f"step{i}(t, n)" for i, x in enumerate(tensors)]
    values = [_number(x) for x in numbers]
    return _function(  # type: ignore[no-any-return]
        "finish(t, n)", [f"return {_tuple(texts)}, {_tuple(values)}"], scope
    )
