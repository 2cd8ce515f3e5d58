"""A scale that is a 0-dim tensor: the same results as of its number, in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest

import flashattn_jit as fa

D = 16


def dense() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 2, n, D, generator=generator) for n in (9, 12, 12))


def _varlen(scale: Any) -> Any:
    q, k, v = (t.flatten(0, 1).transpose(0, 1).contiguous() for t in dense())
    ends = [torch.tensor([0, t.shape[0]]) for t in (q, k)]
    return fa.varlen_attention(q, k, v, *ends, fa.Causal(), scale=scale)


def _run(scale: Any, cascade: bool = False) -> Any:
    q, k, v = (t.flatten(0, 1).transpose(0, 1).contiguous() for t in dense())
    kind: Any = fa.CascadeAttention if cascade else fa.BatchAttention
    batch = kind(num_q_heads=4, num_kv_heads=4, head_dim=D, q_dtype=torch.float32)
    rows, keys = torch.tensor([0, q.shape[0]]), fa.Ragged(torch.tensor([0, k.shape[0]]))
    if cascade:
        batch.plan([fa.CascadeLevel(rows, keys)])
    else:
        batch.plan(rows, keys)
    return batch.run(q, k, v, scale=scale)


CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda scale: fa.attention(*dense(), fa.Causal(), scale=scale),
    "varlen": _varlen,
    "run": _run,
    "cascade": lambda scale: _run(scale, cascade=True),
    "flex": lambda scale: fa.flex_attention(*dense(), scale=scale),
    "flex maxima": lambda scale: (
        fa.flex_attention(*dense(), scale=scale, return_aux=AuxRequest(max_scores=True))[
            1
        ].max_scores
    ),
    "sdpa": lambda scale: fa.scaled_dot_product_attention(*dense(), scale=scale),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_scales_as_its_number(name: str) -> None:
    call = CALLS[name]
    expected = call(0.375)
    assert not torch.equal(call(0.5), expected)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scale = torch.tensor(0.375, dtype=dtype)
        assert torch.equal(call(scale), expected)
        scale.fill_(0.5)
        assert torch.equal(call(scale), call(0.5)), "each call reads the tensor"
    with torch.no_grad():
        assert torch.equal(call(torch.nn.Parameter(torch.tensor(0.375))), expected)
    with torch.profiler.profile():
        assert torch.equal(call(torch.tensor(0.375)), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.tensor([0.5]), r"got a tensor \[1\] of torch.float32"),
        (torch.tensor(True), r"got a tensor \[\] of torch.bool"),
        (torch.tensor(1j), "got a tensor"),
        (torch.tensor(torch.nan), "scale=nan must be finite"),
        (
            torch.empty((), device="meta"),
            r"scale is on meta.*pass scale.cpu\(\), which .* or scale=1.0",
        ),
    ],
    ids=["rank", "bool", "complex", "nan", "meta"],
)
def test_wrong_tensors_are_refused(name: str, scale: Tensor, words: str) -> None:
    with pytest.raises(fa.InputError, match=words):
        CALLS[name](scale)
    with pytest.raises(fa.GradError, match="requires grad"):
        CALLS[name](torch.tensor(0.5, requires_grad=True))


def test_a_score_mod_reads_a_scale_where_it_is() -> None:
    """The remedy for a scale on a device: a captured tensor, without a copy to the host."""
    scale = torch.tensor(0.375)
    q, k, v = dense()
    out = fa.attention(q, k, v, lambda s, b, h, i, j: s * scale, scale=1.0)
    torch.testing.assert_close(out, fa.attention(q, k, v, scale=0.375))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["attention", "varlen", "run", "flex", "sdpa"])
def test_a_new_value_does_not_recompile(name: str) -> None:
    q, k, v = dense()
    flat = [t.flatten(0, 1).transpose(0, 1).contiguous() for t in (q, k, v)]
    ends = [torch.tensor([0, t.shape[0]]) for t in flat[:2]]
    variant = fa.Causal()
    batch = fa.BatchAttention(variant, num_q_heads=4, num_kv_heads=4, head_dim=D,
                              q_dtype=torch.float32)  # fmt: skip
    batch.plan(ends[0], fa.Ragged(ends[1]))
    calls: dict[str, Callable[[Tensor], Any]] = {
        "attention": lambda s: fa.attention(q, k, v, variant, scale=s),
        "varlen": lambda s: fa.varlen_attention(*flat, *ends, variant, scale=s),
        "run": lambda s: batch.run(*flat, scale=s),
        "flex": lambda s: fa.flex_attention(q, k, v, scale=s),
        "sdpa": lambda s: fa.scaled_dot_product_attention(q, k, v, scale=s),
    }
    counter = CompileCounterWithBackend("aot_eager")

    def call(logit: Tensor) -> Any:
        return calls[name](logit.exp() / 4)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for value in (0.0, 0.5, -1.0):
        scale = torch.tensor(value)
        assert torch.equal(compiled(scale), call(scale))
    assert counter.frame_count == 1


def test_the_largest_scale() -> None:
    """Kernels compute with exp2, so that a scale is multiplied by log2(e)."""
    q, k = torch.full((1, 1, 3, 8), 1e-20), torch.randn(1, 1, 5, 8) * 1e-18
    out = fa.attention(q, k, k, scale=2.3e38)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, scale=2.3e38)
    torch.testing.assert_close(out, expected)
    with pytest.raises(
        fa.InputError, match=r"scale=-3e\+38 must be finite as a float32, at most 2.359e\+38"
    ):
        fa.attention(q, k, k, scale=-3e38)
