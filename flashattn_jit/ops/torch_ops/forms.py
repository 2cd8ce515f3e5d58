"""Forms: what a value that a compiled function assigns is, next to the value before it.

Of a value in the compiler, numbers and tensors are unknown, and all else is known: constants,
functions, and how containers and objects are nested. A form has one level; `Real` stands for a
value that exists.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from ...variants.capture.recorder import MAX_LOCATIONS
from ...variants.capture.walk import CONSTANTS


class Real(NamedTuple):
    """An object that exists, as it is before the compiled function runs."""

    value: object


Form = tuple[Any, ...]
"""(kind, facts, names, forms): the forms of parts by name, which may be `Real`. ("int" | "float" |
"tensor" | "array",), ("constant", x), ("is", x), ("items", class), ("entries", class), ("method",
function), ("partial",), ("object", class) or ("unknown",)."""

_VALUES = ("int", "float", "tensor", "array")
_MAX_DEPTH = 16


class Change(enum.IntEnum):
    """What an assignment changes: nothing; numbers and tensors; more; the kind of a number."""

    NOTHING, VALUES, STRUCTURE, KIND = range(4)


def _form(kind: str, *facts: Any, parts: Any = ()) -> Form:
    parts = dict(parts)
    return kind, facts, tuple(parts), tuple(parts.values())


UNKNOWN = _form("unknown")


def form_of(x: object) -> Form:
    """The form of an object that exists."""
    if type(x) in (int, float):
        return _form(type(x).__name__)
    if isinstance(x, torch.Tensor):
        return _form("tensor")
    if isinstance(x, np.ndarray | np.generic):
        return _form("array")
    if isinstance(x, CONSTANTS):
        return _form("constant", x)
    if isinstance(x, tuple | list):
        return _form("items", type(x), parts=((i, Real(y)) for i, y in enumerate(x)))
    if isinstance(x, dict):
        return _form("entries", type(x), parts=((n, Real(y)) for n, y in x.items()))
    if isinstance(x, types.MethodType):
        return _form("method", x.__func__, parts={"self": Real(x.__self__)})
    if isinstance(x, functools.partial):
        return _partial(Real(x.func), map(Real, x.args), _values(x.keywords))
    if _has_plain_attributes(x):
        return _form("object", type(x), parts=_values(vars(x)))
    return _form("is", x)


def _values(named: dict[str, Any]) -> dict[str, Real]:
    return {name: Real(x) for name, x in named.items()}


def _partial(func: Any, args: Any, keywords: dict[str, Any]) -> Form:
    return _form("partial", parts={"func": func, **dict(enumerate(args)), **keywords})


def _has_plain_attributes(x: Any) -> bool:
    """Whether an object has all that it is in the dict of its attributes."""
    if isinstance(x, type | types.ModuleType | types.FunctionType | torch.nn.Module):
        return False
    bases = [cls for cls in type(x).__mro__ if cls not in (object, types.SimpleNamespace)]
    own_new = [cls.__dict__["__new__"] for cls in bases if "__new__" in cls.__dict__]
    is_of_c = any(not isinstance(new, staticmethod) for new in own_new)
    return hasattr(x, "__dict__") and not is_of_c and not any(
        cls.__dict__.get("__slots__") for cls in bases
    )  # fmt: skip


def symbolic_form(x: Any, mutations: Any, depth: int = 0) -> Form | Real:
    """The form of one of Dynamo's variables, without guards on its value.

    mutations: of the attributes of variables.
    """
    from torch._dynamo import variables

    def part(y: Any) -> Form | Real:
        return symbolic_form(y, mutations, depth + 1)

    if hasattr(x, "peek_value") and not x.is_realized():
        return Real(x.peek_value())
    x = x.realize()
    if depth > _MAX_DEPTH:
        return UNKNOWN
    if isinstance(x, variables.UserDefinedObjectVariable):
        return _symbolic_object(x, mutations, part)
    if isinstance(x, _containers()) and x.python_type() is not torch.Size:
        return _contents(x, x.python_type(), part)
    if isinstance(x, variables.UserMethodVariable):
        return _form("method", x.fn, parts={"self": part(x.obj)})
    if isinstance(x, variables.functions.FunctoolsPartialVariable):
        keywords = {name: part(y) for name, y in x.keywords.items()}
        return _partial(part(x.func), map(part, x.args), keywords)
    if x.is_python_constant():
        return form_of(x.as_python_constant())
    try:
        kind = x.python_type()
    except Exception:  # Dynamo knows none
        return UNKNOWN
    if kind in (int, float):
        return _form(kind.__name__)
    if issubclass(kind, torch.Tensor):
        return _form("tensor")
    return _form("array") if issubclass(kind, np.ndarray) else UNKNOWN


def symbolic_contents(x: Any, mutations: Any) -> Form | None:
    """The form of Dynamo's variable of a list or a dict; None for another variable."""
    base = getattr(x, "_base_vt", None) or x
    if not isinstance(base, _containers()):
        return None
    return _contents(base, x.python_type(), lambda y: symbolic_form(y, mutations, 1))


def _containers() -> Any:
    from torch._dynamo import variables

    return variables.ListVariable | variables.TupleVariable | variables.ConstDictVariable


def _contents(x: Any, kind: type, part: Callable[[Any], Form | Real]) -> Form:
    if len(x.items) > MAX_LOCATIONS:
        return UNKNOWN
    if isinstance(x.items, list | tuple):
        return _form("items", kind, parts=enumerate(map(part, x.items)))
    if not all(key.vt.is_python_constant() for key in x.items):
        return UNKNOWN
    entries = {key.vt.as_python_constant(): part(y) for key, y in x.items.items()}
    return _form("entries", kind, parts=entries)


def _symbolic_object(x: Any, mutations: Any, part: Callable[[Any], Form | Real]) -> Form | Real:
    kind, base = x.python_type(), getattr(x, "_base_vt", None)
    if issubclass(kind, tuple | list | dict):
        return UNKNOWN if base is None else _contents(base, kind, part)
    assigned = {name: part(y) for name, y in mutations.get(x, {}).items()}
    if x.source is None and not x.is_python_constant():
        is_plain = _has_plain_attributes(x.value)
        return _form("object", kind, parts=assigned) if is_plain else UNKNOWN
    before = form_of(x.value)
    if not assigned or before[0] != "object":
        return Real(x.value)
    own = dict(zip(*before[2:], strict=True))
    return _form("object", kind, parts={**own, **assigned})


def compare(old: Form | Real, new: Form | Real, names: Collection[str]) -> Change:
    """What an assignment of `new` in place of `old` changes. names: attributes that are read."""
    return _Comparison(names).change(old, new)


class _Comparison:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._seen: dict[tuple[int, int], tuple[object, object]] = {}

    def change(self, old: Form | Real, new: Form | Real) -> Change:
        found = self._change(old, new)
        # An argument of the compiled function may be another one in a later call.
        return max(found, Change.VALUES) if isinstance(new, Real) else found

    def _change(self, old: Form | Real, new: Form | Real) -> Change:
        if isinstance(old, Real) and isinstance(new, Real):
            pair = id(old.value), id(new.value)
            is_object = form_of(old.value)[0] == "object"
            # Changes of an object's attributes are changes of their own.
            if pair in self._seen or is_object and old.value is new.value:
                return Change.NOTHING
            self._seen[pair] = old.value, new.value
        was = form_of(old.value) if isinstance(old, Real) else old
        now = form_of(new.value) if isinstance(new, Real) else new
        if {was[0], now[0]} == {"int", "float"}:
            return Change.KIND
        if was[0] != now[0] or was[0] == "unknown":
            return Change.STRUCTURE
        if was[0] in _VALUES:
            return Change.VALUES
        if was[0] == "constant":
            same = type(was[1][0]) is type(now[1][0]) and was[1] == now[1]
            return Change.NOTHING if same else Change.STRUCTURE
        if was[1][:1] and was[1][0] is not now[1][0]:
            return Change.STRUCTURE
        before, after = (dict(zip(*form[2:], strict=True)) for form in (was, now))
        if was[0] == "object":
            before, after = (
                {n: y for n, y in x.items() if n in self._names} for x in (before, after)
            )
            before = {n: before[n] for n in sorted(before)}
            after = {n: after[n] for n in sorted(after)}
        if tuple(before) != tuple(after):
            return Change.STRUCTURE
        found = [self.change(x, after[name]) for name, x in before.items()]
        return max(found, default=Change.NOTHING)
