"""Values that hooks read without naming them: by constructors, comparisons, enums, containers of
users' classes, methods made in C, weak references. Types of copies are those of their objects."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,no-any-return,type-arg"

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import operator
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import as_variant
from tests.variants.capture.captures_oracle import value
from tests.variants.trace.trace_oracle import DIMS

SCALE = [2.0]


class Helper:
    def __init__(self, gain):
        self.gain = gain * SCALE[0]

    def times(self, x):
        return x * self.gain

    @property
    def doubled(self):
        return self.gain * SCALE[0]


@dataclasses.dataclass
class Config:
    x: float = 2.0
    y: float = 1.0


@dataclasses.dataclass
class Derived:
    gain: float

    def __post_init__(self):
        self.gain *= SCALE[0]


class Kind(enum.Enum):
    ONE = 1

    def apply(self, x):
        return x * SCALE[0]

    @property
    def weight(self):
        return SCALE[0]


class Lists(enum.Enum):
    VALUES = [2.0]  # noqa: RUF012


class Entries(collections.UserDict):
    pass


class Attributes(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Weights(list):
    gain = 3.0


CONFIG, SAME = Config(), Config()
SPACE, LIKE = types.SimpleNamespace(x=1.0), types.SimpleNamespace(x=1.0)
ENTRIES, TABLE, OPEN = Entries(a=1.0), {"x": 2.0}, Attributes(w=2.0)
WEIGHTS = Weights([1.0])
get, item, read_x = TABLE.get, TABLE.__getitem__, operator.attrgetter("x")
reference = weakref.ref(CONFIG)

READS = {
    "constructor": lambda s, b, h, q, k: Helper(0.5).times(s),
    "property of an object made here": lambda s, b, h, q, k: s * Helper(0.5).doubled,
    "__post_init__": lambda s, b, h, q, k: s * Derived(0.5).gain,
    "equal dataclasses": lambda s, b, h, q, k: s * (2.0 if CONFIG == SAME else 3.0),
    "equal namespaces": lambda s, b, h, q, k: s * (2.0 if SPACE == LIKE else 3.0),
    "astuple": lambda s, b, h, q, k: s * dataclasses.astuple(CONFIG)[0],
    "asdict": lambda s, b, h, q, k: s * sum(dataclasses.asdict(CONFIG).values()),
    "vars": lambda s, b, h, q, k: s * sum(vars(SPACE).values()),
    "names in a tuple": lambda s, b, h, q, k: s * sum(getattr(CONFIG, n) for n in ("x", "y")),
    "method of an enum": lambda s, b, h, q, k: Kind.ONE.apply(s),
    "property of an enum": lambda s, b, h, q, k: s * Kind.ONE.weight,
    "value of an enum": lambda s, b, h, q, k: s * Lists.VALUES.value[0],
    "UserDict": lambda s, b, h, q, k: s * ENTRIES["a"],
    "entries as attributes": lambda s, b, h, q, k: s * OPEN.w,
    "attribute of a list": lambda s, b, h, q, k: s * WEIGHTS.gain * WEIGHTS[0],
    "bound get": lambda s, b, h, q, k: s * get("x"),
    "bound __getitem__": lambda s, b, h, q, k: s * item("x"),
    "attrgetter": lambda s, b, h, q, k: s * read_x(CONFIG),
    "weak reference": lambda s, b, h, q, k: s * reference().x,
}


def change():
    """Other values; what sets them back."""
    before = SCALE[0], CONFIG.x, SPACE.x, Lists.VALUES.value[0], ENTRIES["a"], TABLE["x"], OPEN.w
    put(5.0, 7.0, 9.0, 13.0, 15.0, 17.0, 19.0)
    WEIGHTS.gain = 21.0
    return before


def put(scale, x, of_space, of_enum, entry, of_table, opened):
    SCALE[0], CONFIG.x, SPACE.x, Lists.VALUES.value[0] = scale, x, of_space, of_enum
    ENTRIES["a"], TABLE["x"], OPEN["w"] = entry, of_table, opened
    WEIGHTS.__dict__.clear()


@pytest.mark.parametrize("name", READS)
def test_what_is_read_unnamed_is_read_at_each_call(name):
    hook, score = READS[name], torch.tensor(1.0)
    first = float(hook(score, 1, 1, 1, 1))
    assert value(hook) == pytest.approx(first)
    before = change()
    try:
        second = float(hook(score, 1, 1, 1, 1))
        assert second != first
        assert value(hook) == pytest.approx(second)
    finally:
        put(*before)
    assert value(hook) == pytest.approx(first)


def test_a_trace_leaves_the_tracer_of_python_as_it_was():
    """A debugger's or a coverage tool's, which sees what it would have seen."""
    seen = []

    def trace(frame, event, argument):
        seen.append(frame.f_code.co_name)

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        as_variant(lambda s, b, h, q, k: Helper(0.25).times(s)).bind(DIMS)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(previous)
    assert {"times", "<lambda>"} <= set(seen)


def test_functions_made_anew_in_each_trace_end_in_an_error():
    count = itertools.count().__next__

    class Chain:
        def __pos__(self):
            scope = {"__name__": __name__}
            exec(f"def step(x):\n    return x * {count()}.0", scope)
            return scope["step"]

    chain = (Chain(),)
    with pytest.raises(TraceError, match="make the objects and functions that its hooks use"):
        value(lambda s, b, h, q, k: operator.pos(chain[0])(s))


class Plain:
    gain = 2.0

    @property
    def half(self):
        return self.gain / 2


class Called:
    gain = 3.0

    def __call__(self, x):
        return x * self.gain


def test_types_of_copies_are_those_of_their_objects():
    plain, called = Plain(), Called()
    hooks = (
        lambda s, b, h, q, k: s * (plain.half if type(plain) is Plain else 9.0),
        lambda s, b, h, q, k: s * (Plain.gain / 2 if type(plain) is Plain else 9.0),
        lambda s, b, h, q, k: s * (1.0 if plain.__class__ is Plain and Plain.gain else 9.0),
        lambda s, b, h, q, k: called(s) / 3 if called.__class__ == Called else s * 9,
        lambda s, b, h, q, k: s * (1.0 if type(called) is not Plain else 9.0),
        lambda s, b, h, q, k: s * (1.0 if isinstance(plain, Plain) and Plain.gain else 9.0),
    )
    assert [value(hook) for hook in hooks] == [1.0] * len(hooks)


def test_containers_that_give_entries_in_a_way_of_their_own():
    class Doubled(list):
        def __getitem__(self, i):
            return super().__getitem__(i) * 2

    class Missing(dict):
        def __missing__(self, key):
            return 4.0

    doubled, missing = Doubled([1.0]), Missing(a=2.0)
    with pytest.raises(TraceError, match=r"'doubled', a Doubled, whose class .* __getitem__"):
        value(lambda s, b, h, q, k: s * doubled[0])
    assert value(lambda s, b, h, q, k: s * missing["a"] * missing["b"]) == 8.0
    counts = collections.Counter(a=3)
    assert value(lambda s, b, h, q, k: s * counts["a"] + counts["b"]) == 3.0
    counts["a"] = 4
    assert value(lambda s, b, h, q, k: s * counts["a"] + counts["b"]) == 4.0


def test_what_cannot_be_copied_and_what_numpy_computes_otherwise():
    local, array = threading.local(), np.arange(3.0)
    local.x = 2.0
    with pytest.raises(TraceError, match="an object of _local, which cannot be copied"):
        value(lambda s, b, h, q, k: s * local.x)
    for hook in (lambda s, b, h, q, k: s * array.std(), lambda s, b, h, q, k: array.repeat(2)[k]):
        with pytest.raises(TraceError, match=r"the array 'array' and names (std|repeat)\(\)"):
            value(hook)


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
