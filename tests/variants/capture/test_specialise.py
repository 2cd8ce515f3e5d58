"""Which captured numbers and sizes become structure, and what the prelude computes."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,no-any-return"

from __future__ import annotations

import functools
import gc
import math
import weakref

import pytest
import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.variants import binding
from flashattn_jit.variants.variant import as_variant
from tests.variants.capture.captures_oracle import DIMS, value

SLOPES = torch.tensor([1.0, 2.0, 3.0])

# --- specialisation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda n: lambda s, b, h, q, k: s * 2 if n > 3 else s,
        lambda n: lambda s, b, h, q, k: sum([s] * n),
        lambda n: lambda s, b, h, q, k: functools.reduce(lambda a, _: a + s, range(n), s),
        lambda n: lambda s, b, h, q, k: (s + 1) ** n,
        lambda n: lambda s, b, h, q, k: s * math.sqrt(n),
        lambda n: lambda s, b, h, q, k: s + SLOPES[: n - 2].sum(),
        lambda n: lambda s, b, h, q, k: s + (SLOPES[:n] * h).sum(),
        lambda n: lambda s, b, h, q, k: s + torch.zeros(n)[k],
        lambda n: lambda s, b, h, q, k: s + [1.0, 2.0, 3.0, 4.0, 5.0][n],
        lambda n: lambda s, b, h, q, k: s + float(f"{n}"),
        lambda n: lambda s, b, h, q, k: s + max(n, 3),
    ],
)
def test_numbers_that_decide_structure_join_the_key(make):
    for n in (3, 4, 3):
        bound = as_variant(make(n)).bind(DIMS)
        assert ("n", n) in bound.specialised
        assert value(make(n)) == pytest.approx(make(n)(1.0, 1, 1, 1, 1) if n else 0)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda x: lambda s, b, h, q, k: s * math.copysign(2.0, x), (0.0, -0.0)),
        (lambda x: lambda s, b, h, q, k: s * (2.0 if str(x) == "0j" else 1.0), (0j, -0j)),
        (lambda x: lambda s, b, h, q, k: s * x.stop, (range(0, 3, 2), range(0, 4, 2))),
        (
            lambda x: lambda s, b, h, q, k: s * (2.0 if any(e is True for e in x) else 1.0),
            (frozenset({1}), frozenset({True})),
        ),
        (
            lambda x: lambda s, b, h, q, k: s * (2.0 if any(e is True for e in x) else 1.0),
            ({1}, {True}),
        ),
    ],
)
def test_equal_constants_that_differ_to_a_hook_are_told_apart(make, values):
    for x in (*values, *values):
        assert value(make(x)) == make(x)(1.0, 1, 1, 1, 1), x


def test_only_what_is_read_is_pinned(traces):
    def make(n, gain):
        return lambda s, b, h, q, k: sum([s] * n) * gain

    assert [value(make(2, g)) for g in (1.5, 2.5, 3.5)] == [3, 5, 7]
    assert traces.n == 1
    assert value(make(3, 1.0)) == 3
    assert traces.n == 2


def test_pins_found_on_one_branch_hold_for_the_others(traces):
    def make(n, m):
        return lambda s, b, h, q, k: sum([s] * m) if n > 2 else s * m

    assert value(make(1, 5)) == 5  # m is a runtime number here
    assert value(make(1, 6)) == 6
    assert traces.n == 1
    assert value(make(3, 2)) == 2  # and structure here
    assert value(make(3, 4)) == 4
    assert value(make(1, 7)) == 7


def test_sizes_are_runtime_numbers_until_they_decide_structure(traces):
    def make(t):
        return lambda s, b, h, q, k: s + t[k % t.shape[0]] + t.shape[0] - len(SLOPES)

    assert [value(make(torch.ones(n))) for n in (3, 4, 9)] == [2, 3, 8]
    assert traces.n == 1
    rows = lambda t: lambda s, b, h, q, k: s + (t[q] * t[k]).sum()  # noqa: E731
    assert [value(rows(torch.ones(7, n))) for n in (3, 4, 3)] == [4, 5, 4]
    assert traces.n == 3


def test_numbers_that_must_be_python_numbers_are_specialised():
    n = 3
    text = "abc"
    hook = lambda s, b, h, q, k: s * len(text.ljust(n, "x"))  # noqa: E731
    assert value(hook) == 3
    n = 5
    assert value(hook) == 5


# --- the prelude ----------------------------------------------------------------------------------


def test_the_prelude_follows_writes_and_new_tensors(traces):
    t = torch.ones(7)

    def hook(s, b, h, q, k):
        return s + (t * 2)[k]

    v = as_variant(hook)
    first = v.bind(DIMS).tensors[0]
    assert first is v.bind(DIMS).tensors[0], "unchanged inputs: nothing is computed"
    assert value(v) == 3
    t.add_(1)
    assert value(v) == 5
    t = torch.full((9,), 5.0)
    assert value(v) == 11
    assert traces.n == 1


def test_the_prelude_takes_numbers():
    t, gain = torch.ones(7), 2.0
    hook = lambda s, b, h, q, k: s + (t * gain + 1)[k]  # noqa: E731
    assert value(hook) == 4
    gain = 3.0
    assert value(hook) == 5


def test_views_of_the_prelude_keep_nothing_alive():
    binding.clear()

    def make():
        t = torch.ones(5, 7)
        return lambda s, b, h, q, k: s + t.t()[k, q], weakref.ref(t)

    hook, ref = make()
    assert value(hook) == 2
    del hook
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_prelude_computes_in_float32_and_views_are_not_copied(dtype):
    t = torch.linspace(0.5, 2.0, 7).to(dtype)
    for make in (
        lambda t: lambda s, b, h, q, k: s + (t * 0.3)[k],
        lambda t: lambda s, b, h, q, k: s + torch.exp(t)[k],
        lambda t: lambda s, b, h, q, k: s + torch.where((t * 3 > 2.1)[k], 1, 0),
        lambda t: lambda s, b, h, q, k: s + (t.sum() / 3),
        lambda t: lambda s, b, h, q, k: s + torch.stack([t, t * t]).max(0).values[k],
    ):
        found, expected = (as_variant(make(x)).bind(DIMS).tensors[0] for x in (t, t.float()))
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    (kept,) = as_variant(lambda s, b, h, q, k: s + t.view(7, 1)[2:].mT[0, k]).bind(DIMS).tensors
    assert kept.dtype == dtype and kept.untyped_storage()._cdata == t.untyped_storage()._cdata
    with torch.inference_mode():
        inference = t.clone()
    bits = t.view(torch.int8)
    for view in (
        lambda s, b, h, q, k: s + t.view(torch.int8)[k],
        lambda s, b, h, q, k: s + t.detach().view(torch.int8)[k],
        lambda s, b, h, q, k: s + t[:].view(dtype=torch.int8)[k],
        lambda s, b, h, q, k: s + inference.view(7, 1).view(7).view(torch.int8)[k],
    ):
        (found,) = as_variant(view).bind(DIMS).tensors
        assert torch.equal(found, bits)
    product = as_variant(lambda s, b, h, q, k: s + torch.einsum("i,j->ij", t, t)[q, k])
    assert torch.equal(product.bind(DIMS).tensors[0], torch.outer(t.float(), t.float()))


def test_the_prelude_writes_no_captured_tensor():
    t = torch.tensor([-1.0, 2.0])
    with pytest.raises(TraceError, match="must not write"):
        value(lambda s, b, h, q, k: s + torch.nn.functional.relu(t, inplace=True)[k])
    assert t[0] == -1


def test_inference_tensors():
    with torch.inference_mode():
        t = torch.ones(7)
        hook = lambda s, b, h, q, k: s + (t * 2)[k]  # noqa: E731
        assert value(hook) == 3
        t.add_(1)
        assert value(hook) == 5
    assert value(hook) == 5


def test_captured_numbers_beyond_32_bits_are_not_cut_off():
    def make(n):
        return lambda s, b, h, q, k: (q + n) % 1009 + torch.where(q - k < n, s, 0)

    for n in (7, 2**31 - 1, 7, 2**31, 2**40 + 3, 9, -(2**33)):
        wanted = (1 + n) % 1009 + (n > 0)
        assert value(make(n)) == wanted
