"""Objects that a compiled function makes: with slots, frozen, with values computed once."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, ClassVar

import pytest
import torch

import flashattn_jit as fa
from tests.ops.torch_ops.test_compile import Compiled, dense

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


class SlottedNear:
    __slots__ = ("window",)

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, b, h, i, j):
        return i - j < self.window


class Derived(SlottedNear):
    """A slot and a dict, and a value that is computed once."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.more = window + 1

    @functools.cached_property
    def twice(self) -> int:
        return self.window * 2

    def __call__(self, b, h, i, j):
        return (i - j < self.twice) & (j - i < self.more)


@dataclasses.dataclass(frozen=True)
class Frozen:
    window: int
    more: int = 2
    scale: ClassVar[int] = 3

    def __call__(self, b, h, i, j):
        return (i - j) * self.scale < self.window * self.more


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    window: int

    def __call__(self, b, h, i, j):
        return i - j < self.window


class Near:
    def __init__(self, window: int) -> None:
        self.window = window


class Gain:
    def __init__(self, gain: float) -> None:
        self.gain = gain


MADE: dict[str, Any] = {
    "object with slots": lambda n: SlottedNear(n),
    "derived object with slots": lambda n: Derived(n),
    "attrgetter": lambda n: (lambda get, x: lambda b, h, i, j: i - j < get(x))(
        operator.attrgetter("window"), Near(n)
    ),
    "frozen dataclass": lambda n: Frozen(n),
    "frozen dataclass with slots": lambda n: FrozenSlots(n),
}


@pytest.mark.parametrize("name", MADE)
def test_made_inside(name: str) -> None:
    make = MADE[name]
    run = Compiled(lambda q, k, v, n: fa.attention(q, k, v, make(n)))
    for n in (5, 6, 7, 11):
        run(*dense(), n)
    assert run.graphs <= 2


def test_a_number_that_is_not_followed_is_an_error() -> None:
    """Not the placeholder that a variant is traced with."""

    def call(q, k, v, gain, name):
        settings = Gain(gain)
        return fa.attention(q, k, v, lambda s, b, h, i, j: s * getattr(settings, "".join(name)))

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for gain in (0.5, 0.5, 0.25):
        with pytest.raises(fa.VariantError, match="reads a number of the compiled function where"):
            compiled(*dense(), gain, ["ga", "in"])
