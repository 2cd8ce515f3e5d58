"""`lse=`: the log-sum-exp written to a tensor of the caller, in every call that takes `out=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.harness.toolkit import needs_nvcc

D = 32
Call = Callable[..., Any]


def dense(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, D), (2, 2, 40, D), (2, 2, 40, D))
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


def packed() -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2).flatten(0, 1).contiguous() for t in dense())


ENDS = torch.tensor([0, 9, 18]), torch.tensor([0, 40, 80])


def _batch(kind: Any, target: str | None, **options: Any) -> Any:
    batch = kind(fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=D, q_dtype=torch.bfloat16,
                 target=target, **options)  # fmt: skip
    if kind is fa.CascadeAttention:
        shared, own = fa.Ragged(torch.tensor([0, 30])), fa.Ragged(torch.tensor([0, 20, 50]))
        batch.plan([fa.CascadeLevel(torch.tensor([0, 18]), shared), fa.CascadeLevel(ENDS[0], own)])
    else:
        batch.plan(ENDS[0], fa.Ragged(ENDS[1]))
    return batch


def calls(target: str | None) -> dict[str, tuple[Call, tuple[int, ...]]]:
    """Calls by name, and the shapes of their lse."""
    sink, batch, cascade = (
        fa.Causal() & fa.Sink(torch.zeros(4)),
        _batch(fa.BatchAttention, target),
        _batch(fa.CascadeAttention, target),
    )
    rows = 18, 4
    return {
        "attention": (lambda **c: fa.attention(*dense(), sink, target=target, **c), (2, 4, 9)),
        "varlen": (
            lambda **c: fa.varlen_attention(*packed(), *ENDS, fa.Causal(), target=target, **c),
            rows,
        ),
        "run": (lambda **c: batch.run(*packed(), **c), rows),
        "cascade": (lambda **c: cascade.run(*packed(), **c), rows),
    }


NAMES = ("attention", "varlen", "run", "cascade")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_written_and_returned(name: str, target: str | None) -> None:
    call, shape = calls(target)[name]
    out, expected = call(return_lse=True)
    mixed = torch.full((*shape[::-1], 2), 7.0)[..., 0].permute(*reversed(range(len(shape))))
    for lse in (torch.empty(shape), mixed):
        for options in ({}, {"return_lse": True}, {"out": torch.empty_like(out)}):
            lse.fill_(7.0)
            result, found = call(lse=lse, **options)
            assert found is lse and torch.equal(lse, expected) and torch.equal(result, out)
    assert mixed._base is not None and (mixed._base[..., 1] == 7).all()
    state, state_lse = call(partial=True)
    part, found = call(partial=True, lse=mixed, out=torch.empty_like(state))
    assert found is mixed and torch.equal(mixed, state_lse) and torch.equal(part, state)


@pytest.mark.parametrize("name", NAMES)
def test_modes_and_graphs_write_it_too(name: str) -> None:
    call, shape = calls(None)[name]
    out, expected = call(return_lse=True)
    lse = torch.zeros(shape)
    with torch.profiler.profile() as profile:
        result, found = call(lse=lse)
    assert found is lse and torch.equal(lse, expected) and torch.equal(result, out)
    assert any(e.key.endswith("attention_out") for e in profile.key_averages())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["attention", "varlen", "run"])
@pytest.mark.parametrize("with_out", [False, True])
def test_compiled_calls_write_it(name: str, with_out: bool) -> None:
    q, k, v = dense() if name == "attention" else packed()
    variant, batch = fa.Causal(), _batch(fa.BatchAttention, None)

    def call(lse: Tensor, out: Tensor | None) -> Any:
        given = {"lse": lse, "out": out}
        if name == "attention":
            return fa.attention(q, k, v, variant, **given)
        if name == "varlen":
            return fa.varlen_attention(q, k, v, *ENDS, variant, **given)
        return batch.run(q, k, v, **given)

    def twice(lse: Tensor, out: Tensor | None) -> Any:
        result, found = call(lse, out)
        return result * 2, found + 1

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    lse, other = torch.zeros(q.shape[:-1]), torch.zeros(q.shape[:-1])
    out, other_out = (torch.zeros_like(q) if with_out else None for _ in range(2))
    for got, wanted in zip(compiled(lse, out), twice(other, other_out), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(lse, other) and (lse != 0).any()
    if out is not None and other_out is not None:
        assert torch.equal(out, other_out)


_Q = torch.zeros(18, 4, D, dtype=torch.bfloat16)
_FLOATS = _Q.view(-1).view(torch.float32)

WRONG: dict[str, tuple[Any, str]] = {
    "shape": (torch.zeros(18, 5), r"lse must be \[18, 4\] of torch.float32"),
    "dtype": (torch.zeros(18, 4).double(), "lse must be .* got .* of torch.float64"),
    "device": (torch.zeros(18, 4, device="meta"), "lse"),
    "expanded": (torch.zeros(1, 4).expand(18, 4), "lse is an expanded tensor"),
    "overlapping": (torch.zeros(30).as_strided((18, 4), (1, 2)), "lse's entries overlap"),
    "list": ([1], "lse must be a torch.Tensor"),
    "q": (_FLOATS[:72].view(18, 4), "lse shares memory with an input"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_refused(name: str) -> None:
    lse, words = WRONG[name]
    _, k, v = packed()
    batch = _batch(fa.BatchAttention, None)
    for call in (
        lambda: batch.run(_Q, k, v, lse=lse),
        lambda: fa.varlen_attention(_Q, k, v, *ENDS, lse=lse),
    ):
        for _ in range(2):  # the second call may take what the first one remembered
            with pytest.raises(fa.InputError, match=words):
                call()


def test_what_else_is_refused() -> None:
    q, k, v = packed()
    batch = _batch(fa.BatchAttention, None)
    space = torch.empty(18 * 4 * D, dtype=torch.float32)
    out, lse = space.view(18, 4, D), space[:72].view(18, 4)
    apart = torch.empty(18, 4)
    for _ in range(2):
        batch.run(q, k, v, out=out, lse=apart, partial=True)
        with pytest.raises(fa.InputError, match="lse shares memory with out"):
            batch.run(q, k, v, out=out, lse=lse, partial=True)
    with pytest.raises(fa.GradError, match="lse requires grad"):
        batch.run(q, k, v, lse=torch.zeros(18, 4, requires_grad=True))
    with pytest.raises(fa.InputError, match="no log-sum-exp"):
        fa.varlen_attention(q, k, v, *ENDS, fa.Sigmoid(), lse=apart)


@needs_nvcc
def test_a_replayed_launch_writes_it_again() -> None:
    """Runs of a batch for CUDA graphs keep the address."""
    limits = fa.Limits(max_requests=2, max_q_tokens=18, max_kv_len=40)
    batch = _batch(fa.BatchAttention, "emulated:sm_80", limits=limits, cuda_graph=True)
    q, k, v = packed()
    lse = torch.zeros(18, 4)
    _, found = batch.run(q, k, v, lse=lse)
    assert found is lse and torch.equal(lse, batch.run(q, k, v, return_lse=True)[1])
