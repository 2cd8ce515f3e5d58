"""Calls under tracers: fake tensors, make_fx, torch.export and ``torch.compile``, each twice.

A graph computes what the plain call does, on other values too; a call that cannot be traced raises
a typed error; plain calls after the trace return what they returned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.functions import ClosureConversionError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashattn_jit as fa
from tests.harness import processes, rotation
from tests.modes.subjects import HOST, PLANS, Subject, by_name, subjects
from tests.modes.worker import flat

# The compiler's own modules warn when they are first imported, and about what they cannot trace.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SUBJECTS = subjects()
each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)


class Module(torch.nn.Module):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.run = subject.run

    def forward(self, *tensors: Tensor) -> Any:
        return self.run(*tensors)


@contextmanager
def twice_and_plain(subject: Subject) -> Iterator[tuple[list[Tensor], range]]:
    """The plain result, and two rounds; the plain call after them gives it again."""
    expected = flat(subject.run())
    yield expected, range(2)
    assert_same(flat(subject.run()), expected)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert type(a) is Tensor and a.stride() == b.stride() and torch.equal(a, b)


def others(subject: Subject) -> list[Tensor]:
    """Other values for a subject's tensors."""
    return [t.flip(0) if t.is_floating_point() else t for t in subject.tensors]


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def refused(subject: Subject, *kinds: frozenset[str]) -> bool:
    return any(kind <= subject.traits for kind in kinds)


# --- fake tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if not refused(s, HOST)], ids=lambda s: s.name
)
@pytest.mark.parametrize("mode_is_on", [True, False], ids=["in the mode", "outside of it"])
def test_fake_tensors_give_the_shapes(subject: Subject, mode_is_on: bool) -> None:
    with twice_and_plain(subject) as (expected, rounds):
        for _ in rounds:
            with FakeTensorMode() as mode:
                tensors = [mode.from_tensor(t) for t in subject.tensors]
                run = lambda given=tensors: flat(subject.run(*given))  # noqa: E731
                if mode_is_on:
                    found = run()
            found = found if mode_is_on else run()
            assert [layout(t) for t in found] == [layout(t) for t in expected]
            assert all(isinstance(t, FakeTensor) for t in found)


def test_the_reference_of_fake_tensors_is_refused() -> None:
    subject = by_name("reference")
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t) for t in subject.tensors]
    with pytest.raises(fa.InputError, match="without values"):
        subject.run(*tensors)


@each_subject
def test_lengths_without_values_are_traced_or_refused(subject: Subject) -> None:
    with twice_and_plain(subject) as (expected, rounds):
        for _ in rounds:
            with FakeTensorMode() as mode:
                given = [mode.from_tensor(t) for t in (*subject.tensors, *subject.host)]
                if refused(subject, PLANS, HOST):
                    with pytest.raises(fa.InputError, match="without values"):
                        subject.call(*given)
                    continue
                found = flat(subject.call(*given))
            assert [layout(t) for t in found] == [layout(t) for t in expected]


# --- graphs --------------------------------------------------------------------------------------


@each_subject
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx(subject: Subject, tracing: str) -> None:
    with twice_and_plain(subject) as (expected, rounds):
        for _ in rounds:
            if subject.name == "reference":
                with pytest.raises(fa.InputError, match="without values"):
                    make_fx(subject.run, tracing_mode=tracing)(*subject.tensors)
                continue
            graph = make_fx(subject.run, tracing_mode=tracing)(*subject.tensors)
            assert_same(flat(graph(*subject.tensors)), expected)
            given = others(subject)
            assert_same(flat(graph(*given)), flat(subject.run(*given)))


@each_subject
@pytest.mark.parametrize("strict", rotation.turn(21, [False, True]), ids="strict={}".format)
def test_export(subject: Subject, strict: bool) -> None:
    cannot = refused(subject, HOST, PLANS) if strict else subject.name == "reference"
    with twice_and_plain(subject) as (expected, rounds):
        for _ in rounds:
            export = lambda: torch.export.export(Module(subject), subject.tensors, strict=strict)  # noqa: E731
            if cannot:
                with pytest.raises(UNTRACEABLE):
                    export()
                continue
            made = export().module()
            assert_same(flat(made(*subject.tensors)), expected)
            given = others(subject)
            assert_same(flat(made(*given)), flat(subject.run(*given)))


UNTRACEABLE = (
    fa.FlashAttnJitError,
    torch._dynamo.exc.TorchDynamoException,
    ClosureConversionError,
)
"""Errors of the engine or the tracer about calls that are not traced."""


@pytest.mark.by_turns(3)
@each_subject
@pytest.mark.parametrize("dynamic", rotation.turn(22, [False, True]), ids="dynamic={}".format)
def test_compile(subject: Subject, dynamic: bool) -> None:
    with twice_and_plain(subject) as (expected, rounds):
        torch._dynamo.reset()
        compiled = torch.compile(
            subject.run, fullgraph=True, dynamic=dynamic, backend="aot_eager"
        )  # fmt: skip
        for _ in rounds:
            if refused(subject, HOST, PLANS):
                with pytest.raises(UNTRACEABLE):
                    compiled(*subject.tensors)
                continue
            assert_same(flat(compiled(*subject.tensors)), expected)
            given = others(subject)
            assert_same(flat(compiled(*given)), flat(subject.run(*given)))


def test_an_exported_graph_keeps_what_it_was_exported_with() -> None:
    subject = by_name("attention")
    window = fa.SlidingWindow(5)
    held = [window & fa.SoftCap(9.0)]
    q, k, v = subject.tensors

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.attention(q, k, v, held[0])

    expected = run(q, k, v)
    made = torch.export.export(_function(run), (q, k, v)).module()
    graph = make_fx(run)(q, k, v)
    window.window = 11
    assert not torch.equal(run(q, k, v), expected)
    held.clear()
    assert_same([made(q, k, v)], [expected])
    assert_same([graph(q, k, v)], [expected])


class Flagged(fa.Variant):
    weights: Any
    far: bool = fa.scalar(False)
    cap: float = fa.scalar(9.0)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        for weight in self.weights:
            score = score * weight
        return score + q_idx if self.far else score


def test_an_exported_graph_refuses_a_variant_that_became_another() -> None:
    q, k, v = by_name("attention").tensors
    biased = fa.ALiBi()
    for variant, change in (
        (Flagged(weights=[2.0, 3.0]), lambda it: setattr(it, "weights", [1.5, 2.5, 0.5])),
        (Flagged(weights=[2.0]), lambda it: setattr(it, "far", True)),
        (biased, lambda it: setattr(it, "slopes", torch.ones(4))),
    ):
        held = [variant]
        run = lambda *t, held=held: fa.attention(*t, held[0])  # noqa: E731
        graph = make_fx(run)(q, k, v)
        made = torch.export.export(_function(run), (q, k, v)).module()
        expected = run(q, k, v)
        assert_same([graph(q, k, v), made(q, k, v)], [expected, expected])
        change(variant)
        for exported in (graph, made):
            with pytest.raises(fa.VariantError, match="export the call again"):
                exported(q, k, v)


def test_an_exported_graph_keeps_numbers_that_were_defaults() -> None:
    q, k, v = by_name("attention").tensors
    capped = fa.SoftCap()
    expected = fa.attention(q, k, v, capped)
    made = torch.export.export(_function(lambda *t: fa.attention(*t, capped)), (q, k, v)).module()
    for cap in (50.0, 3.0):
        capped.cap = cap
        assert_same([made(q, k, v)], [expected])


def test_numpy_numbers_are_traced() -> None:
    q, k, v = by_name("attention").tensors

    def run(*t: Tensor) -> Any:
        return fa.attention(*t, _WINDOW, q_offset=np.int64(3), window=np.int64(5))

    assert_same([make_fx(run)(q, k, v)(q, k, v)], [run(q, k, v)])


_WINDOW = fa.SlidingWindow(9)


def test_fake_params_of_real_tensors_are_refused() -> None:
    q, k, v = by_name("attention").tensors
    with FakeTensorMode() as mode:
        slopes, mask = mode.from_tensor(torch.ones(4)), mode.from_tensor(torch.ones(24, 40))
    for call in (
        lambda: fa.attention(q, k, v, fa.ALiBi(), slopes=slopes),
        lambda: fa.attention(q, k, v, lambda s, b, h, i, j: s + slopes[h]),
        lambda: fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
    ):
        with pytest.raises(fa.InputError, match="without values"):
            call()


def _function(run: Callable[..., Any]) -> torch.nn.Module:
    return Module(Subject("", (), (), run))


def test_an_exported_batch_outlives_its_object() -> None:
    subject = by_name("run")
    batch = fa.BatchAttention(
        num_q_heads=4, num_kv_heads=2, head_dim=32, q_dtype=torch.float32
    )  # fmt: skip
    q_indptr, kv_indptr = by_name("varlen").host
    batch.plan(q_indptr, fa.Ragged(kv_indptr))
    expected = batch.run(*subject.tensors)
    holder = [batch]
    made = torch.export.export(_function(lambda *t: holder[0].run(*t)), subject.tensors).module()
    del batch, holder[:]
    assert_same([made(*subject.tensors)], [expected])


def test_dynamic_lengths_are_exported() -> None:
    q, k, v = by_name("attention").tensors
    q_len, kv_len = torch.export.Dim("q_len", min=2), torch.export.Dim("kv_len", min=2)
    gated = by_name("attention gated")
    made = torch.export.export(
        Module(gated), (q, k, v), dynamic_shapes={"tensors": ({2: q_len}, {2: kv_len}, {2: kv_len})}
    ).module()
    for rows, keys in ((24, 40), (3, 17), (60, 61)):
        given = (torch.randn(2, 4, rows, 32), *torch.randn(2, 2, 2, keys, 32))
        assert_same([made(*given)], [gated.run(*given)])


LOADS = """
import sys, torch, flashattn_jit as fa
q = torch.ones(2, 4, 24, 32)
fa.attention(q, q, q, lambda s, b, h, i, j: s * 0)
loaded = torch.export.load(sys.argv[1]).module()
try:
    loaded(q, q[:, :2], q[:, :2])
except fa.InputError as error:
    print(error)
"""


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_a_saved_graph_says_that_its_variant_is_elsewhere(tmp_path: Path, strict: bool) -> None:
    q, k, _ = by_name("attention").tensors
    made = torch.export.export(
        Module(by_name("attention out")), (q, k[:, :, :24], k[:, :, :24]), strict=strict
    )
    torch.export.save(made, tmp_path / "graph.pt2")
    said = processes.run(["-c", LOADS, str(tmp_path / "graph.pt2")], check=True)
    assert "exported by another process" in said.stdout


def test_ahead_of_time_inductor(tmp_path: Path) -> None:
    names = ("attention gated", "sdpa mask", "varlen", "run", "flex block mask")
    chosen = [by_name(n) for n in names]
    counts = [len(s.tensors) for s in chosen]

    def run(*tensors: Tensor) -> Any:
        found, start = [], 0
        for subject, count in zip(chosen, counts, strict=True):
            found += flat(subject.run(*tensors[start : start + count]))
            start += count
        return found

    given = tuple(t for s in chosen for t in s.tensors)
    exported = torch.export.export(_function(run), given)
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "package.pt2")
    )
    loaded = torch._inductor.aoti_load_package(package)
    for _ in range(2):
        assert_same(loaded(*given), run(*given))
        assert_same(loaded(*(t.flip(0) for t in given)), run(*(t.flip(0) for t in given)))
