"""Wrong calls of `BatchAttention` and of plan(): which class was called, and what to write instead.

Python's own TypeError names the class that defines a method, and no remedy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ...errors import InputError

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
                    f"{called} has no option {', '.join(unknown)}; its options are {options}"
                )
            if missing := [name for name in needed if name not in kwargs]:
                raise InputError(f"{called} needs {', '.join(f'{name}=' for name in missing)}")
            return method(self, *args, **kwargs)

        return checked

    return decorate
