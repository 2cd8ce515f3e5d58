"""Objects that hooks capture, and what code names: classes, attributes, copies."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from flashattn_jit.errors import TraceError

ABSENT: Any = object()

_OPAQUE_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "flashattn_jit"}
_NOT_CALLED_BY_HOOKS = frozenset({
    "__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__class_getitem__",
    "__setattr__", "__delattr__", "__repr__", "__str__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__sizeof__", "__dir__",
    "__subclasshook__", "__getnewargs__", "__replace__", "__getattribute__",
})  # fmt: skip


def is_opaque_module(name: str | None) -> bool:
    """Whether the module's code is not visited, because the values that it reads do not change."""
    if name is None or name == "__main__" or name.startswith("flashattn_jit.variants.library"):
        return False
    return name.partition(".")[0] in _OPAQUE_PACKAGES


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `code` and the functions inside it load as globals, and any other names."""
    loaded, every = set(), set(code.co_names)
    for ins in dis.get_instructions(code):
        if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(ins.argval)
    consts = list(code.co_consts)
    while consts:
        const = consts.pop()
        if isinstance(const, types.CodeType):
            inner = names_in(const)
            loaded |= inner[0]
            every |= inner[1]
        elif isinstance(const, str) and const.isidentifier():
            every.add(const)  # getattr(config, "window"), vars(config)["window"]
        elif isinstance(const, tuple | frozenset):
            consts += const
    return frozenset(loaded), frozenset(every)


_FINDERS = frozenset({"getattr", "hasattr", "vars", "dir", "__dict__"})


def asks_for_absent(code: types.CodeType) -> bool:
    """Whether code may see that an attribute is absent: by a function, or by an exception."""
    return (
        not _FINDERS.isdisjoint(code.co_names)
        or bool(getattr(code, "co_exceptiontable", True))  # Python 3.10 has none
        or any(asks_for_absent(c) for c in code.co_consts if isinstance(c, types.CodeType))
    )


def attribute(value: object, name: str) -> Any:
    """An attribute, or ABSENT. Hooks need not read it, so the errors of its class are no errors."""
    try:
        return getattr(value, name)
    except Exception:
        return ABSENT


def uncompiled(fn: Any) -> Any:
    """The function or module that `torch.compile` was given; anything else unchanged."""
    if torch.compiler.is_dynamo_compiling():
        return fn
    own = attribute(fn, "__dict__")
    if type(own) is not dict:
        return fn
    original = own.get("_torchdynamo_orig_callable")
    if original is None and type(fn).__name__ == "OptimizedModule":
        original = own.get("_modules", own).get("_orig_mod")
    return fn if original is None else original


def is_absent(value: object, name: str) -> bool:
    """Whether an attribute is absent; that of a property, which is code, counts as present."""
    if isinstance(static_attribute(type(value), name), property | functools.cached_property):
        return False
    return attribute(value, name) is ABSENT


def lacks(value: object, names: Iterable[str]) -> bool:
    """Whether all these attributes are absent."""
    return all(attribute(value, name) is ABSENT for name in names)


class View:
    """Stands for a module or class whose attributes have been replaced."""

    def __init__(self, base: Any) -> None:
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_base"](*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or self.__dict__["_base"] == other

    def __hash__(self) -> int:
        return hash(self.__dict__["_base"])

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.__dict__["_base"])

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(subclass, self.__dict__["_base"])


def shallow_copy(value: Any) -> Any:
    """An object of the same type with the same attributes."""
    try:
        new = object.__new__(type(value))
    except TypeError:  # a type made in C that wants its own __new__
        try:
            return copy.copy(value)
        except TypeError as error:
            raise TraceError(
                f"a hook captures an object of {type(value).__name__}, which cannot be copied "
                f"({error}); capture the values that the hook reads"
            ) from None
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    return new


def is_users(fn: Any) -> bool:
    """Whether this is a function of the user's."""
    return isinstance(fn, types.FunctionType) and not is_opaque_module(fn.__module__)


def dunder_names(cls: type) -> list[str]:
    """The special methods of a class that are the user's and that a hook may call."""
    names = {n for base in cls.__mro__ for n in base.__dict__ if n.startswith("__")}
    if hasattr(cls, "__dataclass_fields__"):
        names -= {"__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"}
    return sorted(n for n in names - _NOT_CALLED_BY_HOOKS if is_users(static_attribute(cls, n)))


def names_of_getter(getter: operator.attrgetter[Any] | operator.methodcaller) -> frozenset[str]:
    """The attributes that a getter of the module operator reads."""
    named = [x for x in getter.__reduce__()[1] if isinstance(x, str)]
    return frozenset(part for name in named for part in name.split("."))


def sequence_like(value: Any, items: list[Any]) -> Any:
    """A list or tuple of the same type, with the same attributes and other items."""
    kind: Any = type(value)
    if kind in (list, tuple):
        return kind(items)
    if isinstance(value, list):
        new = list.__new__(kind)
        list.extend(new, items)
    else:
        try:
            new = tuple.__new__(kind, items)
        except TypeError:  # a type made in C
            return kind(items)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return new


def is_plain_number(value: object) -> bool:
    """Whether a value is an int or a float of a user's class that adds nothing to it."""
    if not isinstance(value, int | float) or getattr(value, "__dict__", None):
        return False
    cls = type(value)
    added = {n for base in cls.__mro__ if base not in (int, float, object) for n in base.__dict__}
    return all(n.startswith("__") for n in added) and not dunder_names(cls)


def static_attribute(cls: type, name: str) -> Any:
    """What a class has under a name, itself or by inheritance, as it is stored; else ABSENT."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def positional_names(fn: Any) -> tuple[str, ...] | None:
    """The positional arguments without defaults that `fn` takes; None: any number of them."""
    if type(fn) is types.FunctionType:
        code = fn.__code__
        if code.co_flags & inspect.CO_VARARGS:
            return None
        return code.co_varnames[: code.co_argcount - len(fn.__defaults__ or ())]
    if isinstance(fn, torch.nn.Module):
        return positional_names(fn.forward)
    bound = fn.__func__ if type(fn) is types.MethodType else type(fn).__call__
    if type(bound) is types.FunctionType:
        names = positional_names(bound)
        return None if names is None else names[1:]
    try:
        signature = inspect.signature(fn)
    except Exception:  # it compares objects, and asks for their attributes, by the user's code
        return None
    kinds = list(signature.parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in kinds):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple([p.name for p in kinds if p.kind in positional and p.default is p.empty])
