"""Hooks, variants and objects that a compiled function makes itself, of a tensor and a number."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import and_masks

import flashattn_jit as fa
from tests.ops.torch_ops.compiled import Window

Tensor = torch.Tensor

BIAS = torch.linspace(0.1, 0.4, 4)


def biased(score: Any, h: Any) -> Any:
    return score + BIAS[h]


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


class Declared(fa.Variant):
    """Params, attributes of its own __init__, a property, globals."""

    table: Tensor = fa.tensor("num_q_heads")
    window: int = fa.scalar(30)

    def __init__(self, table: Tensor, window: int) -> None:
        self.table, self.window = table, window
        self.steps = (window, 2.0)

    @property
    def twice(self) -> int:
        return self.window * 2

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return biased(score, h) * self.table[h] + self.steps[1]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < self.twice) & (kv_idx - q_idx < self.steps[0])


class Near:
    """A callable object that is a mask; its method is another mask."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, b, h, i, j):
        return i - j < self.window

    def ahead(self, b, h, i, j):
        return j - i < self.window


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


@dataclasses.dataclass(frozen=True)
class Settings:
    gain: float
    table: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    window: int


BEFORE = Declared(torch.linspace(0.5, 1.0, 4), 9)
ALIBI = fa.ALiBi(slopes=torch.linspace(0.2, 0.8, 4))
NEAR = Near(7)


class Row(NamedTuple):
    step: int
    table: Tensor


def closure(table: Tensor, n: int) -> Any:
    def helper(score, h, gain=n, *, shift=0.5):
        return score * gain + table[h] * shift

    def score_mod(score, b, h, i, j):
        return helper(biased(score, h), h) + (j - i)

    return score_mod


def recursive(table: Tensor, n: int) -> Any:
    def power(x, i):
        return x if i == 1 else x * power(x, i - 1)

    return lambda s, b, h, i, j: power(s, 3) * n


def changed_later(table: Tensor, n: int) -> Any:
    window = n
    mask_mod = lambda b, h, i, j: i - j < window  # noqa: E731
    window += 2
    return mask_mod


def containers(table: Tensor, n: int) -> Any:
    settings, held = Settings(n / 2, table), {"n": n, "tables": [table, table * 2]}
    slotted = Slotted(n)
    return fa.variant(
        score_mod=lambda s, b, h, i, j: s * settings.gain + held["tables"][1][h] * held["n"],
        mask_mod=lambda b, h, i, j: i - j < slotted.window,
    )


def assigned(table: Tensor, n: int) -> Any:
    variant = fa.SlidingWindow(3)
    variant.window = n + 1
    return variant


MADE: dict[str, Callable[[Tensor, int], Any]] = {
    "closure": closure,
    "lambda": lambda t, n: lambda s, b, h, i, j: s + t[h] * n,
    "recursion": recursive,
    "cell that changes": changed_later,
    "partial": lambda t, n: functools.partial(lambda w, b, h, i, j: i - j < w, n),
    "partial of a global": lambda t, n: functools.partial(causal),
    "wrapped": lambda t, n: functools.wraps(causal)(
        lambda b, h, i, j: causal(b, h, i, j) & (i - j < n)
    ),
    "and_masks": lambda t, n: and_masks(causal, lambda b, h, i, j: i - j < n),
    "object": lambda t, n: Near(n),
    "method": lambda t, n: Near(n).ahead,
    "method of a global": lambda t, n: NEAR.ahead,
    "containers": containers,
    "array": lambda t, n: (lambda a: lambda s, b, h, i, j: s + a[h] * n)(np.arange(4.0)),
    "computed": lambda t, n: closure(torch.exp(t) * 2, n),
    "named tuple": lambda t, n: (lambda x: lambda s, b, h, i, j: s + x.table[h] * x[0])(Row(n, t)),
    "result of torch": lambda t, n: (lambda x: lambda s, b, h, i, j: s + x[0] * n)(t.max(0)),
    "None": lambda t, n: (lambda x: lambda s, b, h, i, j: s * n if x is None else s + x[h])(None),
    "class": lambda t, n: fa.SlidingWindow(n),
    "class by keyword": lambda t, n: Window(window=n, slopes=t),
    "class with __init__": lambda t, n: Declared(t, n),
    "default of a param": lambda t, n: fa.ALiBi(),
    "assigned": assigned,
    "variant": lambda t, n: fa.variant(score_mod=closure(t, n), mask_mod=Near(n)),
    "and": lambda t, n: fa.SlidingWindow(n) & fa.SoftCap(cap=9.0) & fa.ALiBi(slopes=t),
    "and of functions": lambda t, n: causal & fa.variant(closure(t, n)) & (
        lambda b, h, i, j: i - j < n
    ),
    "approximate": lambda t, n: fa.SoftCap(cap=9.0, approximate=True) & fa.SlidingWindow(n),
    "approximate function": lambda t, n: lambda s, b, h, i, j: t[h] * n * fa.tanh_approx(s),
    "or, named": lambda t, n: fa.SlidingWindow(n).named("a") | fa.SlidingWindow(n + 3).named("b"),
    "inverted": lambda t, n: fa.SlidingWindow(n).__invert__(),
    "with one from before": lambda t, n: Declared(t, n) & BEFORE.named("before"),
    "with a library one from before": lambda t, n: fa.SlidingWindow(n) & ALIBI,
    "closure over one from before": lambda t, n: lambda s, b, h, i, j: ALIBI.score_mod(
        s, b, h, i, j
    ) + t[h] * n,
    "sink": lambda t, n: fa.variant(normalizer=fa.Softmax(sink=t)),
    "library sink": lambda t, n: fa.Sink(sink=t) & fa.SlidingWindow(n),
    "rope": lambda t, n: fa.RoPE(500000.0) & fa.SlidingWindow(n),
    "t5": lambda t, n: fa.RelativeBias(t.repeat(32, 1), max_distance=64),
    "object with slots": lambda t, n: SlottedNear(n),
    "derived object with slots": lambda t, n: Derived(n),
    "attrgetter": lambda t, n: (lambda get, x: lambda b, h, i, j: i - j < get(x))(
        operator.attrgetter("window"), Near(n)
    ),
    "frozen dataclass": lambda t, n: Frozen(n),
    "frozen dataclass with slots": lambda t, n: FrozenSlots(n),
    "text": lambda t, n: fa.variant(score_mod=fa.cpp("return score + 0.5f * (kv_idx - q_idx);")),
}  # fmt: skip
