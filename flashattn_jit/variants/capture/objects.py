"""Objects that hooks capture: their attributes read with care, and copies of them."""

from __future__ import annotations

import copy
from typing import Any

ABSENT: Any = object()


def attribute(value: object, name: str) -> Any:
    """An attribute, or ABSENT. Hooks need not read it, so the errors of its class are no errors."""
    try:
        return getattr(value, name)
    except Exception:
        return ABSENT


class View:
    """Stands for a module or class whose attributes have been replaced."""

    def __init__(self, base: Any, attrs: dict[str, Any]) -> None:
        self.__dict__.update(attrs)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_base"](*args, **kwargs)


def shallow_copy(value: Any) -> Any:
    """An object of the same type with the same attributes."""
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
