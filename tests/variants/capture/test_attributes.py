"""Attributes of functions, classes and objects are read at each call, also those set later; numbers
of users' classes, and numbers that cannot be computed from what a call captures."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,no-any-return"

from __future__ import annotations

import functools
import types

import pytest
import torch

from flashattn_jit.errors import ParamError, TraceError
from tests.variants.capture.captures_oracle import value


def test_attributes_of_functions():
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < near.window + getattr(near, "more", 0)

    near.window = 5
    assert value(near, q_idx=9, kv_idx=3) is False
    near.window = 7
    assert value(near, q_idx=9, kv_idx=3) is True
    near.window = 6
    assert value(near, q_idx=9, kv_idx=3) is False
    near.more = 1  # which the first traces could not see
    assert value(near, q_idx=9, kv_idx=3) is True
    near.unread = 1
    near.more = 0
    assert value(near, q_idx=9, kv_idx=3) is False
    del near.more
    assert value(near, q_idx=9, kv_idx=3) is False

    def bare(b, h, q_idx, kv_idx):
        return kv_idx < getattr(bare, "limit", 3)

    assert value(bare, kv_idx=5) is False
    bare.limit = 6
    assert value(bare, kv_idx=5) is True


def test_attributes_that_appear_later():
    """Also of classes, modules and torch's modules, however a hook asks for them."""

    class Bare:
        pass

    class Config:
        pass

    module, space, bare, user = torch.nn.Module(), types.SimpleNamespace(), Bare(), Bare()
    named = types.ModuleType("named_by_the_user")

    def caught(score, b, h, q_idx, kv_idx):
        try:
            return score * bare.factor
        except AttributeError:
            return score

    hooks = {
        "object": (lambda s, b, h, q, k: s * getattr(user, "factor", 1.0), user),
        "exception": (caught, bare),
        "space": (
            lambda s, b, h, q, k: s * (space.factor if hasattr(space, "factor") else 1),
            space,
        ),
        "class": (lambda s, b, h, q, k: s * getattr(Config, "factor", 1.0), Config),
        "module": (lambda s, b, h, q, k: s * getattr(named, "factor", 1.0), named),
        "of the class": (lambda s, b, h, q, k: s * getattr(user, "share", 1.0), Bare),
    }
    for name, (hook, owner) in hooks.items():
        attribute = "share" if name == "of the class" else "factor"
        assert value(hook) == 1.0, name
        for factor in (3.0, 5.0):
            setattr(owner, attribute, factor)
            assert value(hook) == factor, name
        delattr(owner, attribute)
        assert value(hook) == 1.0, name

    def buffered(score, b, h, q_idx, kv_idx):
        return score + (module.bias[kv_idx] if hasattr(module, "bias") else 0.0)

    assert value(buffered) == 1.0
    module.register_buffer("bias", torch.tensor([0.0, 4.0]))
    assert value(buffered) == 5.0


def test_classes_whose_functions_read_values():
    class Holder:
        width = 1.0

        def method(self, score, b, h, q_idx, kv_idx):
            return self.helped(score) * Holder.width * Holder.method.factor

        def helped(self, score):
            return score * Holder.width

        @staticmethod
        def fixed(score):
            return score * Holder.width

        @classmethod
        def owned(cls, score):
            return score * cls.width * cls.fixed.factor

    Holder.method.factor = Holder.fixed.factor = 1.0
    holder = Holder()

    def asks(score, b, h, q_idx, kv_idx):
        return Holder.fixed(score) if isinstance(holder, Holder) else -score

    hooks = [
        (holder.method, lambda w, f, g: w * w * f), (asks, lambda w, f, g: w),
        (lambda s, b, h, q, k: Holder.owned(s), lambda w, f, g: w * g),
    ]  # fmt: skip
    for width, of_method, of_fixed in ((1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (2.0, 3.0, 5.0)):
        Holder.width = width
        Holder.method.factor, Holder.fixed.factor = of_method, of_fixed
        for hook, wanted in hooks:
            assert value(hook) == wanted(width, of_method, of_fixed)


def test_hooks_that_ask_for_the_class_of_a_number():
    class Width(int):
        pass

    holder = types.SimpleNamespace(width=Width(3), kind=Width)

    def by_instance(score, b, h, q_idx, kv_idx):
        return score * (2 if isinstance(holder.width, Width) else 1)

    def by_type(score, b, h, q_idx, kv_idx):
        return score * (2 if type(holder.width) is holder.kind else 1)

    assert value(by_instance) == value(by_type) == 2.0


def test_numbers_of_a_class_of_the_user():
    class Width(int):
        pass

    class Share(float):
        pass

    class Odd(float):
        def __mul__(self, other):
            return 7.0

        __rmul__ = __mul__

    factor = Width(5)

    def scaled(score, b, h, q_idx, kv_idx):
        return score * factor

    for factor in (Width(5), Width(9), 4, Share(0.5), Share(0.25), 0.125):
        assert value(scaled) == factor
    factor = Odd(2.0)
    with pytest.raises(TraceError, match="type Odd"):
        value(scaled)


def test_attributes_that_a_class_computes_or_refuses():
    class Names:
        def __init__(self):
            self.__dict__["known"] = {"w": 2.0}

        def __getattr__(self, name):
            return self.__dict__["known"][name]  # KeyError for what a hook does not read

    names = Names()

    def scaled(score, b, h, q_idx, kv_idx):
        return score * names.w

    assert value(scaled) == 2.0
    names.known["w"] = 3.0
    assert value(scaled) == 3.0


def test_numbers_that_cannot_be_computed_later():
    n = 2

    def divided(score, b, h, q_idx, kv_idx):
        return score + 10 // n

    def rooted(score, b, h, q_idx, kv_idx):
        return score * n**0.5

    def branched(score, b, h, q_idx, kv_idx):
        return score if 10 // n > 3 else -score

    def modulo(score, b, h, q_idx, kv_idx):
        return score + (q_idx + 7) % n

    for hook, wrong, message in (
        (divided, 0, "cannot be done with those of this call: ZeroDivisionError"),
        (rooted, -4, "must be real"),
        (modulo, 0, "divides an integer by n, which is 0"),
    ):
        n = 2
        first = value(hook)
        n = wrong
        for _ in range(2):
            with pytest.raises(ParamError, match=message):
                value(hook)
        n = 2
        assert value(hook) == first
    n = 2
    assert value(branched) == 1.0
    n = 0
    with pytest.raises(TraceError, match="ZeroDivisionError"):
        value(branched)
    n = 5
    assert value(branched) == -1.0


class Slotted:
    __slots__ = ("gain",)


class SlotAndDict(Slotted):
    """The slot stays a slot in objects that have a dict."""

    def __init__(self):
        self.gain, self.more = 2.0, 1.0

    @functools.cached_property
    def twice(self):
        return self.gain * 2


def test_slots_beside_a_dict_and_cached_properties():
    made = SlotAndDict()
    hook = lambda s, b, h, q, k: s * made.gain + made.more  # noqa: E731
    assert value(hook) == 3.0
    made.gain, made.more = 5.0, 2.0
    assert value(hook) == 7.0
    of_cached = lambda s, b, h, q, k: s * made.twice  # noqa: E731
    assert value(of_cached) == 10.0
    assert "twice" not in vars(made)  # the trace computed it in a copy
    made.gain = 4.0
    assert value(of_cached) == 8.0 == made.twice
    made.gain = 3.0
    assert value(of_cached) == 8.0  # it was computed


def test_attributes_named_by_a_captured_string():
    made, name = SlotAndDict(), "more"
    hook = lambda s, b, h, q, k: s * getattr(made, name)  # noqa: E731
    assert value(hook) == 1.0
    made.more = 6.0
    assert value(hook) == 6.0
    name = "gain"
    assert value(hook) == 2.0
    made.gain = 3.0
    assert value(hook) == 3.0
