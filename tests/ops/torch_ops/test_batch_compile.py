"""`batch.run` as a torch op: torch.compile without graph breaks, new plans without
recompiling."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.batch.oracle import Math, check
from tests.ops.batches.mixed_batches import SLOPES, WIDTH, Windowed, mixed

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def planned(b: Batch, variant: Any, **params: Any) -> fa.BatchAttention:
    batch = fa.BatchAttention(variant, **b.options())
    batch.plan(b.q_indptr, b.storage, **params)
    return batch


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.12
def test_a_profiler_sees_the_op() -> None:
    b = mixed(page_size=16)
    batch = planned(b, Windowed(), width=WIDTH)
    given = {"slopes": SLOPES, "gain": 0.5, "scale": 0.1, "return_lse": True}
    expected, expected_lse = batch.run(b.q, b.k, b.v, **given)
    with torch.profiler.profile() as profile:
        out, lse = batch.run(b.q, b.k, b.v, **given)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert any(e.key == "flashattn_jit::batch_attention" for e in profile.key_averages())


def test_a_graph_refuses_to_run_without_its_batch() -> None:
    b = mixed()
    held = [planned(b, Windowed(), width=WIDTH)]
    expected = held[0].run(b.q, b.k, b.v, slopes=SLOPES)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append((graph, inputs))
        return graph

    run = torch.compile(lambda *t: held[0].run(*t, slopes=SLOPES), backend=keep, fullgraph=True)
    assert torch.equal(run(b.q, b.k, b.v), expected)
    ((graph, inputs),) = graphs
    assert torch.equal(graph(*inputs)[0], expected)
    held.clear()
    del run
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(fa.InputError, match="names no batch of this process; keep the"):
        graph(*inputs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_new_plan_does_not_recompile(backend: str) -> None:
    first, second = mixed(page_size=16), Batch((20, 1, 3, 1), (300, 9, 4, 500), (4, 2), 64,
                                               page_size=16, seed=1)  # fmt: skip
    assert first.q.shape == second.q.shape
    batch = planned(first, fa.Causal())
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = batch.run(2 * q, k, v, scale=0.0625)
        assert isinstance(out, torch.Tensor)
        return out + 0

    rows = max(first.k.shape[0], second.k.shape[0])
    for b in (first, second):  # one cache for both
        for name in ("k", "v"):
            pages = torch.full((rows, 16, 2, 64), torch.nan)
            pages[: getattr(b, name).shape[0]] = getattr(b, name)
            setattr(b, name, pages)
    for b in (first, second, first):
        batch.plan(b.q_indptr, b.storage)
        check(b, Math(causal=True), layer(b.q, b.k, b.v), None)
    assert counter.frame_count == 1


def test_params_states_and_results_inside_a_graph() -> None:
    b = mixed(page_size=16)
    batch = planned(b, Windowed(), width=WIDTH)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def layer(q: torch.Tensor, slopes: torch.Tensor, gain: float, out: torch.Tensor) -> Any:
        state, lse = batch.run(q, b.k, b.v, slopes=slopes, gain=gain, partial=True)
        batch.run(q, b.k, b.v, slopes=slopes, gain=gain, out=out)
        return state, lse

    for gain in (0.5, 0.25, 0.75):
        out = torch.empty(25, 4, 64)
        state, lse = layer(b.q, SLOPES, gain, out)
        expected, expected_lse = batch.run(b.q, b.k, b.v, slopes=SLOPES, gain=gain, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(state, expected) and torch.equal(lse, expected_lse)
    assert counter.frame_count <= 2  # the second value of a float makes it an input


def test_errors_of_a_run_inside_a_graph() -> None:
    b = mixed(page_size=16)
    batch = planned(b, Windowed(), width=WIDTH)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def wrong(q: torch.Tensor) -> Any:
        return batch.run(q, b.k, b.v, slopes=SLOPES, width=WIDTH)

    with pytest.raises(fa.ParamError, match=r"give it to plan\(width=...\) instead of run"):
        wrong(b.q)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def short(q: torch.Tensor) -> Any:
        return batch.run(q, b.k, b.v, slopes=SLOPES)

    with pytest.raises(fa.InputError, match="q has num_q_tokens=24, but the plan's q_indptr ends"):
        short(b.q[:24])


def test_vmap_is_refused() -> None:
    b = mixed()
    batch = planned(b, fa.Causal())
    with pytest.raises(fa.InputError, match=r"does not run under torch\.vmap"):
        torch.vmap(lambda q: batch.run(q, b.k, b.v))(b.q[None])
