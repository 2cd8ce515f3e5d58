"""The part of the visit that follows attributes: of objects, of users' modules and classes."""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashattn_jit.variants.captures import Walk

_OPAQUE_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "flashattn_jit"}
_NOT_CALLED_BY_HOOKS = frozenset({
    "__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__class_getitem__",
    "__setattr__", "__delattr__", "__repr__", "__str__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__sizeof__", "__dir__",
    "__subclasshook__", "__getnewargs__", "__replace__", "__getattribute__",
})  # fmt: skip
_C_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType,
                  types.ClassMethodDescriptorType, types.BuiltinFunctionType)  # fmt: skip
_ABSENT = object()


class Values:
    """What a rebuilt hook finds at its locations, in extraction order."""

    def __init__(self, tensors: Sequence[object], numbers: Sequence[object]) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self.made: dict[int, Any] = {}


Build = Callable[[Values], Any]


def is_opaque_module(name: str | None) -> bool:
    """Whether code of the module is taken as it is: what it reads does not change."""
    if name is None or name == "__main__" or name.startswith("flashattn_jit.variants.library"):
        return False
    return name.partition(".")[0] in _OPAQUE_PACKAGES


def visit_namespace(walk: Walk, value: Any, var: str) -> Build:
    """A user's module or class that a hook reads values from."""
    walk.saw_objects = True
    walk.guard(f"{var} is not {walk.const(value)}")
    walk.seen[id(value)] = (var, lambda p: value)
    before = len(walk.tensors) + len(walk.numbers)
    attrs: dict[str, Build] = {}
    for n in sorted(walk.names):
        if n.startswith("__") or not hasattr(value, n):
            continue
        item = getattr(value, n)
        if not isinstance(item, (property, types.ModuleType, *_C_DESCRIPTORS)):
            attrs[n] = walk.visit(item, f"{var}.{n}", n)
    if before == len(walk.tensors) + len(walk.numbers):
        return lambda p: value

    def build(p: Values) -> Any:
        return _View(value, {n: make(p) for n, make in attrs.items()})

    walk.seen[id(value)] = (var, build)
    return build


class _View:
    """Stands for a module or class whose attributes have been replaced."""

    def __init__(self, base: Any, attrs: dict[str, Any]) -> None:
        self.__dict__.update(attrs)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_base"](*args, **kwargs)


def visit_object(walk: Walk, value: Any, var: str, name: str) -> Build:
    """Any other object: the attributes that some reached code names, and its own methods."""
    walk.saw_objects = True
    cls = type(value)
    walk.guard(f"type({var}) is not {walk.const(cls)}")
    walk.alive.append(value)
    attrs: dict[str, Build] = {}
    methods: set[str] = set()
    special: dict[str, tuple[Callable[[Any], Any], Build]] = {}

    def build(p: Values) -> Any:
        if id(value) in p.made:
            return p.made[id(value)]
        new = _shallow_copy(value)
        p.made[id(value)] = new
        for n, make in attrs.items():
            made = make(p)
            _force_attr(new, n, types.MethodType(made, new) if n in methods else made)
        if special:
            overrides = {n: wrap(make(p)) for n, (wrap, make) in special.items()}
            # Without slots of its own, so that the layout is the same; past a frozen __setattr__.
            body = {"__fajit_view__": True, "__slots__": (), **overrides}
            object.__setattr__(new, "__class__", type(cls.__name__, (cls,), body))
        return new

    walk.seen[id(value)] = (var, build)
    params = walk.params.get(id(value), {})
    for n, (index, full_name, current) in params.items():
        tensors, numbers = len(walk.tensors), len(walk.numbers)
        attrs[n] = walk.visit(current, f"p[{index}]", full_name)
        walk.param_tensors.update((i, full_name) for i in range(tensors, len(walk.tensors)))
        walk.param_numbers.update((i, full_name) for i in range(numbers, len(walk.numbers)))
    wanted = walk.names | getattr(cls, "__fajit_names__", frozenset())
    if isinstance(value, torch.nn.Module):
        wanted |= {"forward"}
    own = getattr(value, "__dict__", {})
    for n in sorted(n for n in wanted if not n.startswith("__") and n not in params):
        static = _static(cls, n)
        if n in own:
            attrs[n] = walk.visit(own[n], f"{var}.{n}", n)
        elif isinstance(static, property):
            if static.fget is not None and _is_users(static.fget):
                special[n] = (property, walk.visit(static.fget, f"{walk.const(static)}.fget", ""))
        elif isinstance(static, types.FunctionType):
            if _is_users(static):
                attrs[n] = walk.visit(static, f"{walk.const(cls)}.{n}", "")
                methods.add(n)
                _visit_overridden(walk, cls, n, static)
        elif not isinstance(static, _C_DESCRIPTORS) and hasattr(value, n):
            attrs[n] = walk.visit(getattr(value, n), f"{var}.{n}", n)
    # What syntax calls is looked up on the class: `obj(x)`, `obj[i]`, `len(obj)`, `obj + 1`.
    for n in _dunder_names(cls):
        special[n] = (_unchanged, walk.visit(_static(cls, n), f"{walk.const(cls)}.{n}", ""))
        _visit_overridden(walk, cls, n, _static(cls, n))
    if not attrs and not special and not hasattr(cls, "__fajit_names__"):
        _guard_identity(walk, value, var)
    return build


def _visit_overridden(walk: Walk, cls: type, name: str, found: types.FunctionType) -> None:
    """What ``super().name`` reaches runs as it is, so the numbers that it reads are pinned."""
    if "__class__" not in found.__code__.co_freevars:
        return
    frozen, walk.frozen = walk.frozen, True
    for base in cls.__mro__:
        static = base.__dict__.get(name)
        if static is not found and _is_users(static):
            walk.visit(static, f"{walk.const(base)}.__dict__[{name!r}]", "")
    walk.frozen = frozen


def _guard_identity(walk: Walk, value: object, var: str) -> None:
    # A weak reference where possible, so that a plan does not keep the user's data alive.
    try:
        ref = weakref.ref(value)
    except TypeError:
        walk.guard(f"{var} is not {walk.const(value)}")
    else:
        walk.guard(f"{var} is not {walk.const(ref)}()")


def _is_users(fn: Any) -> bool:
    return isinstance(fn, types.FunctionType) and not is_opaque_module(fn.__module__)


def _dunder_names(cls: type) -> list[str]:
    names = {n for base in cls.__mro__ for n in base.__dict__ if n.startswith("__")}
    if hasattr(cls, "__dataclass_fields__"):
        names -= {"__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"}
    return sorted(n for n in names - _NOT_CALLED_BY_HOOKS if _is_users(_static(cls, n)))


def _unchanged(x: Any) -> Any:
    return x


def _static(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _ABSENT


def _shallow_copy(value: Any) -> Any:
    try:
        new = object.__new__(type(value))
    except TypeError:  # a type made in C that wants its own __new__
        return copy.copy(value)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    return new


def _force_attr(obj: Any, name: str, value: Any) -> None:
    # Past any __setattr__ of the user's: nn.Module's, a frozen dataclass'.
    if hasattr(obj, "__dict__"):
        obj.__dict__[name] = value
    else:
        object.__setattr__(obj, name, value)
