"""Wrong calls of batches and `varlen_attention`: what was called, and what to write instead.

Python's own TypeError names the class that defines a method, and no remedy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ...errors import InputError
from ...variants.counterparts import counterparts_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")
_Method = Callable[Concatenate[_S, _P], _R]


def by_name(what: str, instead: str) -> Callable[[_Method[_S, _P, _R]], _Method[_S, _P, _R]]:
    """A decorator for methods of one positional argument: calls with more, without a keyword
    argument that has no default, or with an unknown one raise InputError.

    what: what is called, with {} for the object's class. instead: what to write for more arguments.
    """

    def decorate(method: _Method[_S, _P, _R]) -> _Method[_S, _P, _R]:
        known = inspect.signature(method).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
        needed = [
            name
            for name, one in known.items()
            if one.kind is one.KEYWORD_ONLY and one.default is one.empty
        ]

        @functools.wraps(method)
        def checked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            called = what.format(type(self).__name__)
            if len(args) > 1:
                raise InputError(
                    f"{called} takes one positional argument, got {len(args)}; {instead}"
                )
            if not takes_any and (unknown := [name for name in kwargs if name not in known]):
                options = ", ".join(name for name in known if name != "self")
                raise InputError(
                    f"{called} has no option {', '.join(unknown)}{counterparts_of(unknown)}; its "
                    f"options are {options}"
                )
            if missing := [name for name in needed if name not in kwargs]:
                raise InputError(f"{called} needs {', '.join(f'{name}=' for name in missing)}")
            return method(self, *args, **kwargs)

        return checked

    return decorate


def needs_arguments(what: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: calls without an argument that has no default raise InputError, which says what
    stands for the arguments of other libraries.

    what: what is called.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        needed = [
            name
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
        ]
        count = len(needed)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) < count:
                missing = [name for name in needed[len(args) :] if name not in kwargs]
                if missing:
                    others = counterparts_of([name for name in kwargs if name not in needed])
                    raise InputError(f"{what} needs {', '.join(missing)}{others}")
            return function(*args, **kwargs)

        return checked

    return decorate
