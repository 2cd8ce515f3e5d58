"""Values that hooks read through containers of users' classes, getters and names in tuples; types
and comparisons of captured objects; objects that hooks make; decorated functions."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,no-any-return,type-arg"

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import operator
import threading
import types
import weakref
from typing import ClassVar

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import TraceError
from tests.variants.capture.captures_oracle import value


@dataclasses.dataclass(order=True)
class Config:
    x: float = 2.0
    y: float = 1.0

    def made_like(self):
        return type(self)(self.x, self.y)


class Attributes(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Weights(list):
    gain = 3.0


CONFIG = Config()
OPEN, WEIGHTS = Attributes(w=2.0), Weights([1.0])
WEIGHTS.gain = 4.0
read_x = operator.attrgetter("x")

READS = {
    "names in a tuple": lambda s, b, h, q, k: s * sum(getattr(CONFIG, n) for n in ("x", "y")),
    "entries as attributes": lambda s, b, h, q, k: s * OPEN.w,
    "attribute of a list": lambda s, b, h, q, k: s * WEIGHTS.gain * WEIGHTS[0],
    "attrgetter": lambda s, b, h, q, k: s * read_x(CONFIG),
}


def put(x, opened, gain):
    before = CONFIG.x, OPEN["w"], WEIGHTS.gain
    CONFIG.x, OPEN["w"], WEIGHTS.gain = x, opened, gain
    return before


@pytest.mark.parametrize("name", READS)
def test_what_is_read_indirectly_is_read_at_each_call(name):
    hook, score = READS[name], torch.tensor(1.0)
    first = float(hook(score, 1, 1, 1, 1))
    assert value(hook) == pytest.approx(first)
    before = put(7.0, 19.0, 21.0)
    try:
        second = float(hook(score, 1, 1, 1, 1))
        assert second != first
        assert value(hook) == pytest.approx(second)
    finally:
        put(*before)
    assert value(hook) == pytest.approx(first)


class Plain:
    gain = 2.0

    @property
    def half(self):
        return self.gain / 2


class Called:
    gain = 3.0

    def __call__(self, x):
        return x * self.gain


def test_types_of_copies_are_those_of_their_objects(monkeypatch):
    plain, called = Plain(), Called()
    hooks = (
        lambda s, b, h, q, k: s * (plain.half if type(plain) is Plain else 9.0),
        lambda s, b, h, q, k: s * (Plain.gain / 2 if type(plain) is Plain else 9.0),
        lambda s, b, h, q, k: s * (Plain.gain / 2 if plain.__class__ == Plain else 9.0),
        lambda s, b, h, q, k: called(s) / 3 if called.__class__ == Called else s * 9,
        lambda s, b, h, q, k: s * (1.0 if type(called) is not Plain else 9.0),
        lambda s, b, h, q, k: s * (1.0 if isinstance(plain, Plain) and Plain.gain else 9.0),
    )
    assert [value(hook) for hook in hooks] == [1.0] * len(hooks)
    monkeypatch.setattr(Plain, "gain", 4.0)
    assert [value(hook) for hook in hooks[:3]] == [2.0] * 3


def test_captured_objects_compare_as_they_do():
    hooks = (
        lambda s, b, h, q, k: s * (1.0 if Config() == CONFIG else 9.0),
        lambda s, b, h, q, k: s * (1.0 if CONFIG in (Config(5.0), Config()) else 9.0),
        lambda s, b, h, q, k: s * (1.0 if Config(3.0) > CONFIG else 9.0),
        lambda s, b, h, q, k: s * (1.0 if CONFIG.made_like() == CONFIG else 9.0),
        lambda s, b, h, q, k: s * (1.0 if CONFIG.__class__ is Config().__class__ else 9.0),
    )
    assert [value(hook) for hook in hooks] == [1.0] * len(hooks)


def test_counters_are_copied_as_they_are():
    counts = collections.Counter(a=3)
    assert value(lambda s, b, h, q, k: s * counts["a"] + counts["b"]) == 3.0
    counts["a"] = 4
    assert value(lambda s, b, h, q, k: s * counts["a"] + counts["b"]) == 4.0


class Scaled:
    """Its methods name the class and an object of it."""

    gain = 2.0

    def by_type(self, x):
        return x * Scaled.gain if type(self) is Scaled else x * 9.0

    @classmethod
    def of_class(cls, x):
        return x * cls.gain


class Above(Scaled):
    def by_type(self, x):
        return super().by_type(x) + ABOVE.gain


ABOVE = Above()


def test_classes_and_objects_that_name_each_other(monkeypatch):
    scaled = Scaled()
    hooks = (
        lambda s, b, h, q, k: scaled.by_type(s),
        lambda s, b, h, q, k: Scaled.of_class(s) + (q - k).type(torch.float32),
        lambda s, b, h, q, k: ABOVE.by_type(s) - 9.0,
    )
    assert [value(hook) for hook in hooks] == [2.0, 2.0, 2.0]
    monkeypatch.setattr(Scaled, "gain", 3.0)
    assert [value(hook) for hook in hooks] == [3.0, 3.0, 3.0]


class WithLogger:
    """As configs of transformers are: reading an attribute runs code that names others."""

    logger = logging.getLogger("of the config")

    def __init__(self):
        self.window, self.history = 3, collections.deque([1])

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "__dict__"):
            WithLogger.logger.debug(name)
        return object.__getattribute__(self, name)


class Registered:
    seen: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, gain):
        self.gain = gain
        Registered.seen.add(self)


def test_what_hooks_may_hold_without_its_being_followed():
    config, space = WithLogger(), types.SimpleNamespace(w=2.0, history=collections.deque())
    table = {(1, 2): 3.0}
    found = table.get
    assert value(lambda s, b, h, q, k: torch.where(k < config.window, s, s * 2), kv_idx=5) == 2.0
    assert value(lambda s, b, h, q, k: torch.where(q == k, s * space.w, s)) == 2.0
    assert value(lambda s, b, h, q, k: s * Registered(3.0).gain) == 3.0
    assert value(lambda s, b, h, q, k: s * found((1, 2))) == 3.0
    local = threading.local()
    local.x = 2.0
    with pytest.raises(TraceError, match="an object of _local, which cannot be copied"):
        value(lambda s, b, h, q, k: s * local.x)


def test_a_wrapper_takes_the_arguments_of_its_function():
    def scaled(by):
        def decorate(fn):
            @functools.wraps(fn)
            def wrapper(*args):
                return fn(*args) * by[0]

            return wrapper

        return decorate

    factor = [2.0]

    @scaled(factor)
    def hook(score, b, h, q_idx, kv_idx):
        return score + kv_idx

    assert value(hook, kv_idx=3) == 8.0
    factor[0] = 0.5
    assert value(hook, kv_idx=3) == 2.0

    def given(more):
        @functools.wraps(hook)
        def wrapper(*args):
            return more(*args, 4.0)

        return wrapper

    six = functools.wraps(lambda s, b, h, q, k, gain: s)(given(lambda s, *rest: s * rest[-1]))
    assert value(fa.variant(score_mod=six)) == 4.0  # of a named hook the wrapper's arguments count


def test_a_callable_object_takes_the_arguments_of_its_method():
    class Equal:
        """inspect.signature would compare it with other objects."""

        def __init__(self, gain):
            self.gain = gain

        def __eq__(self, other):
            return self.gain == other.gain

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.gain

    assert value(Equal(2.0)) == 2.0

    class Scaled(torch.nn.Module):
        def forward(self, score, b, h, q_idx, kv_idx):
            return score * 3.0

    assert value(Scaled()) == 3.0
