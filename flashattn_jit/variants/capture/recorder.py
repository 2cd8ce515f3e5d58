"""The list of locations that a walk makes, and the values that are there now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.capture.extract import GuardKind, Held, Location, Step, Yields

MAX_LOCATIONS = 256
"""The most values that one hook may capture: beyond that it captures data, not parameters."""


@dataclass(slots=True)
class Values:
    """The values at the locations of a rebuilt hook, in extraction order.

    builtins: replacements for Python's builtins. made: the copies of objects, by the object's id.
    """

    tensors: Sequence[object]
    numbers: Sequence[object]
    builtins: Mapping[str, object]
    made: dict[int, Any] = field(default_factory=dict)


Build = Callable[[Values], Any]

# Types whose equal values may differ in a hook: 0.0 and -0.0, range(0, 3, 2) and range(0, 4, 2),
# {1} and {True}. (A slice is hashable only from Python 3.12 on, a set never.)
_KEY_FORMS: dict[type, Yields] = {
    float: "repr", complex: "repr", range: "repr", slice: "repr", set: "reprs", frozenset: "reprs",
}  # fmt: skip


def unique_name(name: str, taken: set[str]) -> str:
    """The name, with a number where it is in `taken`, to which the result is added."""
    candidate, i = name, 1
    while candidate in taken:
        i += 1
        candidate = f"{name}_{i}"
    taken.add(candidate)
    return candidate


class Recorder:
    """Locations in the order in which they are found.

    locations: those that an extractor reads. values: the objects there now. tensors, numbers: those
    that the extractor returns, in its order. consts: parts of the key.
    """

    def _reset(self) -> None:
        self.locations: list[Location] = []
        self.values: list[object] = []
        self.tensor_names: list[str] = []
        self.number_names: list[str] = []
        self.const_names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[float] = []
        self.consts: list[object] = []
        self.param_tensors: dict[int, str] = {}  # declared params by the index of their value
        self.param_numbers: dict[int, str] = {}
        self._taken: set[str] = set()

    def _mark(self) -> tuple[int, ...]:
        """How much has been found, for `_back_to`."""
        return tuple(len(found) for found in self._lists())

    def _back_to(self, mark: tuple[int, ...]) -> None:
        """Forget what has been found since the mark; names that it took stay taken."""
        for found, length in zip(self._lists(), mark, strict=True):
            del found[length:]

    def _lists(self) -> tuple[list[Any], ...]:
        return (
            self.locations, self.values, self.tensor_names, self.number_names, self.const_names,
            self.tensors, self.numbers, self.consts,
        )  # fmt: skip

    def yielding(self, what: Yields) -> list[int]:
        """The locations that yield tensors or numbers, in their order."""
        return [at for at, x in enumerate(self.locations) if x.yields == what]

    def _at(self, value: object, base: int, *steps: Step) -> int:
        """Add a location, at which `value` is now, and return its index."""
        if len(self.locations) >= 4 * MAX_LOCATIONS:
            raise TraceError(
                f"expected a hook that captures at most {MAX_LOCATIONS} values, this one reaches "
                "more through its containers and objects; capture a tensor instead"
            )
        self.locations.append(Location(base, steps))
        self.values.append(value)
        return len(self.locations) - 1

    def _guard(self, at: int, kind: GuardKind, operand: object = None) -> None:
        self.locations[at].guards.append((kind, operand))

    def _guard_type(self, at: int) -> None:
        self._guard(at, "type", Held(type(self.values[at])))

    def _unique(self, name: str) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
        return unique_name(f"_{name}" if name[0].isdigit() else name, self._taken)

    def _opaque(self, value: object, base: int, *steps: Step) -> Build:
        self._guard(self._at(value, base, *steps), "is", Held(value))
        return lambda p: value

    def _part_of_key(self, value: Any, name: str, at: int) -> Build:
        """A constant: a call with another value has another structure."""
        if value is None or value is Ellipsis:
            self._guard(at, "is", Held(value))
        else:
            self._guard_type(at)
            self.locations[at].yields = _KEY_FORMS.get(type(value), "value")
            self.consts.append(value)
            self.const_names.append(name or "value")
        return lambda p: value
