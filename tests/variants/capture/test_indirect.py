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
from flashattn_jit.errors import ParamError, TraceError
from flashattn_jit.variants.params import Dims
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

    class Biased:
        @scaled(factor)
        def __call__(self, score, b, h, q_idx, kv_idx):
            return score + kv_idx

        @scaled([1])
        def near(self, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx < 3, 1, 0)

    factor[0] = 3.0
    assert value(Biased(), kv_idx=3) == value(Biased().__call__, kv_idx=3) == 12.0
    assert value(Biased().near, kv_idx=3, q_idx=4) == 1

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


class Modules(torch.nn.Module):
    """Hooks that call modules of torch, and one that reads a weight by a function of torch."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(9, 2, padding_idx=0)
        self.norm, self.rms, self.act = torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.GELU()
        self.listed = [torch.nn.RMSNorm(8, eps=0.1)]
        self.contained = torch.nn.ModuleList(self.listed)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))

    def bias(self, score, b, h, q_idx, kv_idx):
        bucket = (q_idx - kv_idx).clamp(0, 8)
        by_function = torch.nn.functional.embedding(bucket, self.emb.weight)
        return score + self.emb(bucket)[h] * 2 - by_function[h]

    def query(self, row, b, h, q_idx):
        return self.act(self.norm(row))

    def key(self, row, b, kv_h, kv_idx):
        return self.rms(row) + self.listed[0](row)


MODULES, LINEAR = Modules(), torch.nn.Linear(8, 8)
CLIPPED = torch.nn.Embedding(9, 8, max_norm=1.0)


@torch.no_grad()
def test_modules_of_torch_are_called():
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    held = Modules()
    made = fa.variant(score_mod=held.bias, query_mod=held.query, key_mod=held.key)
    ir = made.bind(Dims(1, 2, 2, 6, 6, 8, 8)).ir

    def bias():
        behind = (torch.arange(6)[:, None] - torch.arange(6)).clamp(0, 8)
        return held.emb.weight[behind].permute(2, 0, 1)

    for _ in range(2):
        out = fa.attention(q, k, v, made)
        expected = torch.nn.functional.scaled_dot_product_attention(
            held.act(held.norm(q)), held.rms(k) + held.listed[0](k), v, attn_mask=bias()
        )
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(made.reference(q, k, v).float(), expected)
        held.norm.eps, held.emb.weight.data = 0.5, torch.randn(9, 2)  # read anew in every call
    assert made.bind(Dims(1, 2, 2, 6, 6, 8, 8)).ir == ir


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (lambda row, b, h, i, m=MODULES: m.contained[0](row), r"capture list\(modules\)"),
        (lambda row, b, h, i, m=LINEAR: m(row), "a matrix product"),
        (lambda row, b, h, i, m=CLIPPED: m(i), "with max_norm"),
    ],
)
def test_modules_that_cannot_be_called_say_what_to_do(hook, text):
    with pytest.raises(TraceError, match=text):
        fa.variant(query_mod=hook).bind(Dims(1, 2, 2, 6, 6, 8, 8))


GAIN = 2.0


class Parent:
    slope = 2.0

    def gain(self):
        return GAIN

    @property
    def computed(self):
        return GAIN

    @staticmethod
    def fixed():
        return GAIN

    def __call__(self, s, b, h, q, k):
        return s * GAIN


class ByCall(Parent):
    def __call__(self, s, b, h, q, k):
        return super().__call__(s, b, h, q, k)


class ByMethod(Parent):
    def gain(self):
        return 0.0

    def __call__(self, s, b, h, q, k):
        return s * super().gain()


class ByProperty(Parent):
    @property
    def computed(self):
        return super().computed * 1

    def __call__(self, s, b, h, q, k):
        return s * self.computed


class ByValue(Parent):
    slope = 5.0

    def __call__(self, s, b, h, q, k):
        return s * super().slope


class ByStatic(Parent):
    @staticmethod
    def fixed():
        return 0.0

    def __call__(self, s, b, h, q, k):
        return s * super().fixed()


class ByEqualValue(Parent):
    slope = 2.0

    def gain(self):
        return DEQUE[0]

    def __init__(self):
        self.slope = 7.0

    def __call__(self, s, b, h, q, k):
        return s * super().slope


class ByHidden(ByEqualValue):
    """An attribute of the object hides those of all classes; the base method is never called."""

    slope = 2.0

    def gain(self):
        return 1.0

    def __call__(self, s, b, h, q, k):
        return super().__call__(s, b, h, q, k) * self.gain()


DEQUE = collections.deque([1.0])


@pytest.mark.parametrize("kind", [ByCall, ByMethod, ByProperty, ByValue, ByStatic, ByHidden])
def test_super_reaches_other_names_than_its_own(kind, monkeypatch):
    made = kind()
    assert value(made) == 2.0
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    monkeypatch.setattr(Parent, "slope", 3.0)
    assert value(made) == 3.0


def test_tensors_that_are_indexed_with_a_request_or_head_have_an_element_for_each():
    dims = Dims(2, 4, 2, 5, 7, 16, 16)
    table = torch.zeros(2, 4, 1)
    mod = fa.variant(score_mod=lambda s, b, h, q, k: s + table[b, h, 0] + table[0, h % 2, 0])
    mod.bind(dims)
    for wrong, dim, words in (((1, 4, 1), 0, "with b, but batch=2"), ((2, 3, 1), 1, "heads=4")):
        table = torch.zeros(wrong)
        with pytest.raises(ParamError, match=f"indexes dim {dim} of captured tensor .*{words}"):
            mod.bind(dims)
    table = torch.zeros(2, 4, 1)
    mod.bind(dims)
    rows = fa.variant(key_mod=lambda row, b, kv_h, k: row * table[b, kv_h, 0])
    table = torch.zeros(2, 2, 1)
    rows.bind(dims)
    with pytest.raises(ParamError, match="with kv_h, but num_kv_heads=4"):
        rows.bind(dims._replace(num_kv_heads=4))
