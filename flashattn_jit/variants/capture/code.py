"""What code names, and the code that runs in a trace without having been visited.

A hook may run functions that `walk.Walk` cannot find by name: constructors, comparisons of
dataclasses, methods of enums, what the standard library calls. `Watch` finds them while a hook is
traced. The next walk over the hook's code visits them too, and its key has the values they read.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
import weakref
from collections.abc import Collection
from typing import Any

from flashattn_jit.variants.capture.objects import is_opaque_module

REBUILT = "__fajit_rebuilt__"
"""The global that tells the functions which a walk has made from those that they were made of."""

ALL_FIELDS = "__dataclass_fields__"
"""A name in code that reads all attributes of an object."""

EQUALS = "=="
"""Among the names of code that compares."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `code` and the functions inside it load as globals, and any other names."""
    loaded, every = set(), set(code.co_names)
    for ins in dis.get_instructions(code):
        if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(ins.argval)
        elif ins.opname == "COMPARE_OP" and ins.argval in ("==", "!="):
            every.add(EQUALS)
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


# --- code that was not visited -------------------------------------------------------------------


class Unvisited:
    """What a function ran without its having been visited. names: of attributes that it reads."""

    __slots__ = ("functions", "names")

    def __init__(self) -> None:
        self.functions: dict[types.CodeType, types.FunctionType] = {}
        self.names: frozenset[str] = frozenset()


_run_by: weakref.WeakKeyDictionary[types.CodeType, Unvisited] = weakref.WeakKeyDictionary()


def run_by(code: types.CodeType) -> Unvisited | None:
    """What this code has run in traces so far."""
    return _run_by.get(code)


class Watch:
    """Finds the functions of the user's that run in a trace, and that no walk has visited.

    known: the code that the walk visited without rebuilding it. found_any: whether another walk
    finds more.
    """

    def __init__(self, known: Collection[types.CodeType]) -> None:
        self._known = known
        self._opaque: set[str | None] = set()
        self.found_any = False

    def __enter__(self) -> Watch:
        self._previous: Any = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _call(self, frame: types.FrameType, event: str, argument: object) -> Any:
        module = frame.f_globals.get("__name__")
        if event == "call" and module not in self._opaque:
            if not is_opaque_module(module):
                if REBUILT not in frame.f_globals and frame.f_code not in self._known:
                    self._add_function(frame)
            elif module is not None and module.partition(".")[0] in sys.stdlib_module_names:
                self._add_names(frame)
            else:
                self._opaque.add(module)
        return None if self._previous is None else self._previous(frame, event, argument)

    def _add_function(self, frame: types.FrameType) -> None:
        caller = _rebuilt_caller(frame)
        if caller is None or not frame.f_code.co_flags & _OPTIMIZED:  # the body of a class
            return
        functions = _run_by.setdefault(caller, Unvisited()).functions
        if frame.f_code not in functions:
            functions[frame.f_code] = _function_of(frame)
            self.found_any = True

    def _add_names(self, frame: types.FrameType) -> None:
        """Of a function of the standard library that reads attributes of the user's objects."""
        above = frame.f_back
        if above is None or REBUILT not in above.f_globals:
            return
        names = names_in(frame.f_code)[1]
        if frame.f_globals["__name__"] == "dataclasses":
            names |= {ALL_FIELDS}
        seen = _run_by.setdefault(above.f_code, Unvisited())
        if not names <= seen.names:
            seen.names |= names
            self.found_any = True


_OPTIMIZED = 1  # inspect.CO_OPTIMIZED, of functions


def _rebuilt_caller(frame: types.FrameType) -> types.CodeType | None:
    """The code of the innermost function above a frame that a walk has made."""
    above = frame.f_back
    while above is not None and REBUILT not in above.f_globals:
        above = above.f_back
    return None if above is None else above.f_code


def _function_of(frame: types.FrameType) -> types.FunctionType:
    """The function that a frame runs, or one that reads the same variables."""
    code, scope = frame.f_code, frame.f_globals
    if code.co_freevars:
        for found in gc.get_referrers(code):
            if isinstance(found, types.FunctionType) and found.__globals__ is scope:
                return found
    cells = tuple(types.CellType(frame.f_locals.get(n)) for n in code.co_freevars)
    return types.FunctionType(code, scope, code.co_name, None, cells)
