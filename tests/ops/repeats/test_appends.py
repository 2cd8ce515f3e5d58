"""Appends that quantise or change rows: C repeats runs that are like earlier ones of their plan."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError, ParamError
from flashattn_jit.formats import Stored
from flashattn_jit.ops.append import AppendPlan
from flashattn_jit.ops.launching import appends
from tests.ops.repeats.cases import calls_of, indptr

DIM, HEADS, PAGE, NUM_PAGES = 32, 2, 8, 12
NEW, LAST = (1, 3), (2, 5)
"""New tokens of two requests, and the fill of their last pages."""
FORMATS = [
    fa.kv.Format("int8"), fa.kv.Format("e4m3"), fa.kv.Format("e5m2"),
    fa.kv.Format("int4", group=16), fa.kv.Format("nf4", group=16, rotate=True),
    fa.kv.Format("int8", zero=True),
]  # fmt: skip
INT8, E4M3, INT4, ZEROS = FORMATS[0], FORMATS[1], FORMATS[3], FORMATS[5]


class Turned(fa.Variant):
    """Keys times a tensor and a number of the object, plus a param."""

    bias: torch.Tensor = fa.tensor("num_kv_heads")

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.table = torch.linspace(0.5, 2.0, DIM)

    def key_mod(self, k: Any, b: Any, h: Any, i: Any) -> Any:
        return k * self.table * self.factor + self.bias[h]


class Odd(torch.Tensor):
    """A subclass."""


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each append that Python bound, and C did not repeat."""
    return calls_of(monkeypatch, appends.Changes, "run")


def plan(transform: Any = None) -> AppendPlan:
    indices = torch.tensor([7, 2, 11, 0, 5], dtype=torch.int32)
    paged = fa.Paged(indptr((2, 3)), indices, torch.tensor(LAST), PAGE)
    return fa.plan_append(indptr(NEW), paged, transform=transform)


def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sum(NEW), HEADS, DIM).to(dtype)


def pages(own: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Pages of zeros, in a format or in a dtype."""
    zeros = torch.zeros(NUM_PAGES, PAGE, HEADS, DIM, dtype=dtype)
    return zeros if own is None else own.quantize(zeros)


def contents(cache: Any) -> list[torch.Tensor]:
    if not isinstance(cache, Stored):
        return [cache]
    return [t.view(torch.uint8) for t in (cache.codes, cache.scales, cache.zeros) if t is not None]


def is_repeated(bound: list[object], append: AppendPlan, given: Any, **params: Any) -> bool:
    """Makes an append, and checks that it writes what the first run of a new plan writes."""
    others = tuple(copy.deepcopy(given))
    before = len(bound)
    append.run(*given, **params)
    found = len(bound) == before
    plan(append._transform).run(*others, **params)
    del bound[before:]
    for a, b in zip(given[2:], others[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(contents(a), contents(b), strict=True))
        assert any(x.any() for x in contents(a))
    return found


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("own", FORMATS, ids=str)
def test_formats(own: Any, bound: list[object]) -> None:
    append = plan()
    for i in range(5):
        given = rows(), rows(), pages(own), pages(own)
        assert is_repeated(bound, append, given) == (i >= 2), f"run {i}"


def test_kinds_of_pages_that_take_turns(bound: list[object]) -> None:
    append = plan()
    for i in range(4):
        for kinds in ((INT8, None), (None, INT4), (INT8, INT4)):
            given = rows(), rows(), *map(pages, kinds)
            assert is_repeated(bound, append, given) == (i >= 2), (i, kinds)


@pytest.mark.parametrize("own", [None, INT8], ids=str)
def test_what_a_transform_reads(own: Any, bound: list[object]) -> None:
    """Its attributes, tensors and params count at each run."""
    transform = Turned(2.0)
    append = plan(transform)

    def runs() -> list[bool]:
        given = [(rows(), rows(), pages(own), pages(own)) for _ in range(4)]
        return [is_repeated(bound, append, one, bias=torch.randn(HEADS)) for one in given]

    assert runs() == [False, False, True, True]
    transform.factor = -3.0
    assert runs() == [False, False, True, True]
    transform.table.mul_(2.0)  # in place, then another tensor
    assert all(runs())
    transform.table = torch.linspace(-1.0, 1.0, DIM)
    assert all(runs())
    transform.table = transform.table.double()
    assert runs() == [False, False, True, True]
    transform.factor = 2.0
    assert not runs()[0]


def repeated(own: Any = INT8, transform: Any = None) -> tuple[AppendPlan, tuple[Any, ...]]:
    """A plan whose runs with such tensors are repeated, and these."""
    append = plan(transform)
    given = rows(), rows(), pages(own), pages(own)
    for _ in range(3):
        append.run(*given)
    return append, given


OTHERS: dict[str, Callable[..., Any]] = {
    "dtype": lambda k, v, kc, vc: (k.half(), v.half(), kc, vc),
    "strides": lambda k, v, kc, vc: (k.transpose(0, 1).contiguous().transpose(0, 1), v, kc, vc),
    "code": lambda k, v, kc, vc: (k, v, kc, pages(E4M3)),
    "zeros": lambda k, v, kc, vc: (k, v, pages(ZEROS), vc),
    "bits": lambda k, v, kc, vc: (k, v, pages(INT4), vc),
    "group": lambda k, v, kc, vc: (k, v, kc, pages(fa.kv.Format("int8", group=16))),
    "rotation": lambda k, v, kc, vc: (k, v, kc, pages(fa.kv.Format("int8", rotate=True))),
    "scales": lambda k, v, kc, vc: (k, v, kc, pages(fa.kv.Format("int8", scale_dtype=torch.half))),
    "values": lambda k, v, kc, vc: (k, v, pages(), vc),
    "a parameter": lambda k, v, kc, vc: (k, torch.nn.Parameter(v, False), kc, vc),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors(other: str, bound: list[object]) -> None:
    append, given = repeated()
    found = is_repeated(bound, append, OTHERS[other](*given))
    assert found == (other == "a parameter")
    assert is_repeated(bound, append, given)


def shifted(k: torch.Tensor, v: torch.Tensor, kc: Stored, vc: Stored) -> tuple[Any, ...]:
    """Scales of v that begin within those of k."""
    memory = torch.zeros(kc.scales.numel() + 1)
    parts = [memory[:-1].view(kc.scales.shape), memory[1:].view(kc.scales.shape)]
    own = [Stored(x.codes, part) for x, part in zip((kc, vc), parts, strict=True)]
    return k, v, *own


def inside(k: torch.Tensor, v: torch.Tensor, kc: Stored, vc: Stored) -> tuple[Any, ...]:
    """Keys in the memory of the codes."""
    memory = kc.codes.view(-1)[: k.numel() * 2].view(torch.bfloat16)
    return memory.view(k.shape), v, kc, vc


WRONG: dict[str, tuple[Callable[..., Any], type[FlashAttnJitError], str]] = {
    "one cache": (lambda k, v, kc, vc: (k, v, kc, kc), InputError, "start at the same entry"),
    "scales": (shifted, InputError, "share memory"),
    "inside": (inside, InputError, "memory of k_pages"),
    "gradient": (lambda k, v, kc, vc: (k.requires_grad_(), v, kc, vc), GradError, "requires grad"),
    "meta": (lambda k, v, kc, vc: (k.to("meta"), v, kc, vc), InputError, "not part of the op"),
    "negative": (lambda k, v, kc, vc: (torch._neg_view(k), v, kc, vc), InputError, "k is a lazy"),
    "a list": (lambda k, v, kc, vc: ([1.0], v, kc, vc), InputError, "k must be a"),
    "none": (lambda k, v, kc, vc: (k, v, kc, None), InputError, "v_pages must be a"),
    "subclass": (lambda k, v, kc, vc: (k.as_subclass(Odd), v, kc, vc), InputError, "subclasses"),
    "tokens": (lambda k, v, kc, vc: (k[:3], v[:3], kc, vc), InputError, "k has num_tokens=3"),
    "rank": (lambda k, v, kc, vc: (k[0], v, kc, vc), InputError, "k must be"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_a_first_run(wrong: str, bound: list[object]) -> None:
    append, given = repeated()
    change, kind, text = WRONG[wrong]
    bad = change(*given)
    before = [x.clone() for cache in bad[2:] for x in contents(cache) if cache is not None]
    for made in (append, plan()):
        with pytest.raises(kind, match=text):
            made.run(*bad)
    after = [x for cache in bad[2:] for x in contents(cache) if cache is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_params_of_repeated_runs(bound: list[object]) -> None:
    append = plan(Turned(2.0))
    given = rows(), rows(), pages(), pages()
    bias = torch.randn(HEADS)
    for _ in range(3):
        append.run(*given, bias=bias)
    for params in ({}, {"bias": bias, "more": 1.0}, {"bias": bias[:1]}, {"bias": 1.0}):
        with pytest.raises(ParamError):
            append.run(*given, **params)
    with pytest.raises(GradError):
        append.run(*given, bias=bias.clone().requires_grad_())
    with torch.no_grad():
        assert is_repeated(bound, append, given, bias=bias.clone().requires_grad_())


def test_modes(bound: list[object]) -> None:
    append, given = repeated()
    with torch.inference_mode(), torch.autocast("cpu"):
        assert is_repeated(bound, append, given)
    with torch.device("meta"):  # a torch-function mode: Python leaves it first
        append.run(*given)
    assert len(bound) == 3
    with pytest.raises(InputError, match="under torch"):
        torch.func.vmap(lambda k: append.run(k, *given[1:]))(given[0][None])


def test_pages_that_lie_between_each_other() -> None:
    memory = torch.zeros(NUM_PAGES, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16)
    append = plan(fa.RoPE())
    k, v = rows(), rows()
    for _ in range(4):
        append.run(k, v, memory[:, 0], memory[:, 1])
    expected = pages(), pages()
    plan(fa.RoPE()).run(k, v, *expected)
    assert torch.equal(memory, torch.stack(expected, 1))


def test_threads() -> None:
    append, given = repeated()
    expected = [x.clone() for x in contents(given[2])]
    failed: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(200):
                own = given[0], given[1], pages(INT8), pages(INT8)
                append.run(*own)
                assert all(map(torch.equal, contents(own[2]), expected))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_plans_and_their_tensors_are_freed() -> None:
    transform = Turned(2.0)
    append = plan(transform)
    given = rows(), rows(), pages(), pages()
    bias = torch.randn(HEADS)
    for _ in range(3):
        append.run(*given, bias=bias)
    transform.own = append  # type: ignore[attr-defined]  # a cycle through the repeated run
    kept = [weakref.ref(x) for x in (append, transform, bias, *given)]
    del append, transform, given, bias
    gc.collect()
    assert all(one() is None for one in kept)
