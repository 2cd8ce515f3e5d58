"""Calls skip torch's dispatcher only where no mode, profiler or subclass listens."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_jit as fa
from flashattn_jit.torch_modes import is_direct


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    pass


class Listens(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


q = torch.randn(1, 2, 5, 16)


def test_plain_tensors_go_straight():
    assert is_direct(q) and is_direct(torch.nn.Parameter(q))
    with torch.no_grad():
        assert is_direct(q)
    with torch.inference_mode():
        assert is_direct(torch.randn(2)) and is_direct(q)


def test_whatever_listens_sees_the_op():
    with Seen() as seen:
        assert not is_direct(q)
        fa.attention(q, q, q)
    assert any("flashattn_jit.attention" in name for name in seen.names)
    with torch.profiler.profile() as profile:
        fa.attention(q, q, q)
    assert any("flashattn_jit::attention" in e.key for e in profile.key_averages())


@pytest.mark.parametrize("mode", [Listens, FakeTensorMode])
def test_modes_are_listeners(mode):
    with mode():
        assert not is_direct(q)


def test_subclasses_fakes_views_and_transforms_are_not_plain():
    assert not is_direct(q.as_subclass(Wrapped))
    with FakeTensorMode() as fake:
        other = fake.from_tensor(q)
    assert not is_direct(other)
    assert not is_direct(torch._neg_view(q))
    found = []
    torch.vmap(lambda x: found.append(is_direct(x)) or x)(q)
    assert found == [False]
