"""Locations of captured values as paths that traced code reads, with the guards that it needs."""

from __future__ import annotations

import enum
import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...variants.capture.extract import NOWHERE, PARAMS, ROOT, GuardKind, Location, Step
from ...variants.capture.objects import static_attribute
from ...variants.capture.walk import Walk

ATTRIBUTE, ITEM = 0, 1
CONTENT = "cell_contents"
CELL = -4  # differs from all values of `Location.base`
Path = tuple[int, tuple[tuple[int, Any], ...]]
"""The access path to a value: attributes and items from the value of an earlier path (or ROOT).
CELL: the result of the function of that name in `CELLS`."""

# Values that a hook's structure depends on; the tracer guards on them when it reads them.
_FIXED = (types.FunctionType, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_lock = threading.Lock()


class _Cells:
    """Functions that read a cell, as attributes; see `Paths`."""


CELLS = _Cells()


class Paths:
    """The locations of a `Walk` as paths that traced code can read.

    params: the paths to values of declared params, by index of the param. cell_readers: read cells
    by calling functions that share them. Dynamo cannot read an attribute of a cell that the
    compiled function also closes over, but it can trace a call to a function that reads the cell.
    The identities of the hooks are then guarded, as a reader holds the cells of one hook.
    """

    def __init__(
        self,
        walk: Walk,
        *,
        params: Mapping[int, Path] = types.MappingProxyType({}),
        cell_readers: bool = False,
    ) -> None:
        self._walk = walk
        self._params = params
        self._cell_readers = cell_readers
        self.functions: list[int] = []
        self.made: list[Path] = []
        self._index: dict[int, int | None] = {ROOT: ROOT, NOWHERE: None}

    def fixed(self, kinds: tuple[type, ...] = _FIXED) -> tuple[int, ...]:
        """The indices of the paths to functions and constants, where a path exists."""
        found = []
        for at, (value, location) in enumerate(
            zip(self._walk.values, self._walk.locations, strict=True)
        ):
            no_value = any(kind == "empty" for kind, _ in location.guards)
            if isinstance(value, kinds) and not no_value:
                found.append(self.index(at))
        return tuple(i for i in found if i is not None)

    def keys(self) -> tuple[int, ...]:
        """The indices of the paths to dicts."""
        found = [at for at, _ in self._guards("keys") if isinstance(self._walk.values[at], dict)]
        return tuple(i for at in found if (i := self.index(at)) is not None)

    def absent(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The paths to objects, with the attributes that they do not have of their own."""
        found: dict[int, set[str]] = {}
        for at, names in (
            *((self._walk.locations[at].base, names) for at, names in self._guards("disjoint")),
            *self._guards("without"),
        ):
            # Dynamo does not compare attributes of functions.
            if names and not isinstance(self._walk.values[at], types.FunctionType):
                index, cls = self.index(at), type(self._walk.values[at])
                if index is not None:
                    found.setdefault(index, set()).update(
                        n for n in names
                        # Traced code reads these attributes, which would compute this one.
                        if not isinstance(static_attribute(cls, n), functools.cached_property)
                    )  # fmt: skip
        return tuple((index, tuple(sorted(names))) for index, names in found.items())

    def _guards(self, kind: GuardKind) -> list[tuple[int, Any]]:
        """The locations with guards of a kind, and the operands."""
        return [
            (at, operand)
            for at, location in enumerate(self._walk.locations)
            for own, operand in location.guards
            if own == kind
        ]

    def index(self, at: int) -> int | None:
        """The index of the path to a location; None if it has none."""
        if at not in self._index:
            self._index[at] = self._add(at)
        return self._index[at]

    def _add(self, at: int) -> int | None:
        location = self._walk.locations[at]
        if location.base == PARAMS:
            path = self._params.get(location.steps[0][1])
        else:
            base = self.index(location.base)
            if base is None or not location.steps:
                return base
            path = self._through_cell(location) or self._path(base, location.steps)
        if path is None:
            return None
        self.made.append(path)
        return len(self.made) - 1

    def _through_cell(self, location: Location) -> Path | None:
        """The path to a cell's content through a reader; None for other locations."""
        kind, key = location.steps[0]
        if not self._cell_readers or kind != "cell":
            return None
        function = self.index(self._walk.locations[location.base].base)
        assert function is not None
        if function not in self.functions:
            self.functions.append(function)
        closure = self._walk.values[location.base]
        return CELL, ((ATTRIBUTE, _cell_reader(closure[key])),)  # type: ignore[index]

    def _path(self, base: int, steps: Sequence[Step]) -> Path | None:
        found: list[tuple[int, Any]] = []
        for kind, key in steps:
            if kind == "attribute":
                found.append((ATTRIBUTE, key))
            elif kind == "item":
                found.append((ITEM, key))
            elif kind == "cell":
                found += [(ITEM, key), (ATTRIBUTE, CONTENT)]
            elif kind == "class":
                found.append((ATTRIBUTE, "__class__"))
            else:
                return None
        return base, tuple(found)


def _cell_reader(cell: types.CellType) -> str:
    """The name in `CELLS` of a function that returns the cell's content."""

    def reader(held: Any) -> Callable[[], Any]:
        def read() -> Any:
            return held

        return read

    twin = types.FunctionType(reader(None).__code__, globals(), "read_cell", None, (cell,))
    with _lock:
        name = f"cell_{len(CELLS.__dict__)}"
        setattr(CELLS, name, twin)
    return name
