"""Properties over shapes, strides, dtypes, lengths and variants, against the fp64 reference.

Few variants and head dims, many problems: each distinct kernel costs seconds to compile.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.harness import rotation
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES


def examples(count: int) -> settings:
    """Settings that make the same examples in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


CHOSEN = (
    "full", "causal", "sliding_window", "prefix_lm", "document", "padding", "soft_cap", "alibi",
    "additive_bias", "t5_bias", "sink", "sigmoid", "rope", "gated_output", "mix_gpt_oss",
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
D = 32


class Problem(NamedTuple):
    """The tensors, lengths and offset of one call."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_len: torch.Tensor | None
    q_offset: Any


def _rows(data: st.DataObject, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values in a drawn layout: order of dims, padding of rows, odd base."""
    order = data.draw(st.permutations(range(3)), label="order of dims")
    pad = data.draw(st.sampled_from([0, 0, 1, 8]), label="padding of rows")
    base = data.draw(st.sampled_from([0, 0, 1, 16]), label="offset of the base")
    physical = [sizes[d] for d in order] + [sizes[3] + pad]
    count = max(1, torch.Size(physical).numel())
    flat = torch.full((count + base,), float("nan"), dtype=dtype)
    view = flat[base : base + torch.Size(physical).numel()].view(physical)
    view = view.permute(*[order.index(d) for d in range(3)], 3)[..., : sizes[3]]
    return view.copy_(torch.randn(sizes))


def draw_problem(data: st.DataObject, case: Case, dtype: torch.dtype, d: int = D) -> Problem:
    """A problem of any small shape that the case fits."""
    draw = data.draw
    batch = draw(st.integers(0, 3), label="batch")
    kv_heads = draw(st.integers(1, 3), label="num_kv_heads")
    group = draw(st.sampled_from([1, 1, 2, 3, 5, 7]), label="group_size")
    q_len = draw(st.one_of(st.integers(0, 5), st.integers(6, 90)), label="q_len")
    kv_len = draw(st.one_of(st.integers(0, 5), st.integers(6, 180)), label="kv_len")
    shape = Shape(batch, kv_heads * group, kv_heads, q_len, kv_len, d, d)
    torch.manual_seed(draw(st.integers(0, 2**31), label="seed"))
    q = _rows(data, (batch, shape.num_q_heads, q_len, d), dtype)
    k = _rows(data, (batch, kv_heads, kv_len, d), dtype)
    v = _rows(data, (batch, kv_heads, kv_len, d), dtype)
    lengths, q_offset = None, case.q_offset
    reads_rows = bool({"t5_bias", "document", "rope"} & {case.name})
    if draw(st.booleans(), label="kv_len given"):
        lengths = torch.randint(0, kv_len + 1, (batch,))
        for b in range(batch):  # what is past the length may hold anything
            k[b, :, lengths[b] :] = float("nan")
            v[b, :, lengths[b] :] = float("nan")
    if not reads_rows and draw(st.booleans(), label="q_offset given"):
        q_offset = draw(st.sampled_from([0, 3, "end"]), label="q_offset")
    return Problem(shape, q, k, v, lengths, q_offset)


def assert_near(
    actual: torch.Tensor, gold: torch.Tensor, same_dtype: torch.Tensor, dtype: torch.dtype
) -> None:
    """RMS error at most twice the eager one's in the same dtype, plus an ulp."""
    assert torch.isfinite(actual).all()
    if not gold.numel():
        return
    size = gold.square().mean().sqrt()
    allowed = (same_dtype.double() - gold).square().mean().sqrt()
    ulp = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    error = (actual.double() - gold).square().mean().sqrt()
    assert error <= 2.0 * allowed + ulp * size, (error.item(), allowed.item(), size.item())


def check(case: Case, problem: Problem, dtype: torch.dtype) -> None:
    """Asserts that the kernel's out and lse are those of the reference."""
    shape, q, k, v, kv_len, q_offset = problem
    variant, params = case.build(shape, seed=1)
    options = {"scale": case.scale, "q_offset": q_offset, "kv_len": kv_len}
    pointwise = "pointwise" in case.tags
    actual = fa.attention(q, k, v, variant, return_lse=not pointwise, **options, **params)
    out, lse = (actual, None) if pointwise else actual
    assert out.dtype == q.dtype
    gold, gold_lse = attention_reference(q, k, v, variant, params=params, **options)
    same, _ = attention_reference(q, k, v, variant, params=params, dtype=dtype, **options)
    assert_near(out, gold, same, dtype)
    if lse is not None:
        assert gold_lse is not None
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(lse.double(), gold_lse.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", rotation.chosen(CHOSEN, 2))
@examples(12)
@given(data=st.data())
def test_any_problem_of_a_variant(name: str, data: st.DataObject) -> None:
    case = BY_NAME[name]
    problem = draw_problem(data, case, torch.float32)
    if case.fits(problem.shape):
        check(case, problem, torch.float32)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "alibi"])
@examples(12)
@given(data=st.data())
def test_any_problem_in_half_precision(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    check(BY_NAME[name], draw_problem(data, BY_NAME[name], dtype), dtype)


@examples(12)
@given(data=st.data())
def test_any_strides_of_an_odd_head_dim(data: st.DataObject) -> None:
    check(
        BY_NAME["causal"], draw_problem(data, BY_NAME["causal"], torch.float32, 17), torch.float32
    )


@pytest.mark.parametrize("name", ["causal", "alibi", "full"])
@examples(15)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=5),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
    q_offset=st.sampled_from(["end", 0, 2]),
)
def test_any_packed_requests(
    name: str, lens: list[tuple[int, int]], group: int, seed: int, q_offset: Any
) -> None:
    torch.manual_seed(seed)
    q_indptr = torch.tensor([0, *(n for n, _ in lens)]).cumsum(0)
    kv_indptr = torch.tensor([0, *(n for _, n in lens)]).cumsum(0)
    q = torch.randn(int(q_indptr[-1]), 2 * group, D)
    k, v = torch.randn(int(kv_indptr[-1]), 2, D), torch.randn(int(kv_indptr[-1]), 2, D)
    variant, _ = BY_NAME[name].build(Shape(1, 2 * group, 2, 1, 1, D, D))
    arguments = (q, k, v, q_indptr, kv_indptr, variant)
    out, lse = fa.varlen_attention(*arguments, q_offset=q_offset, return_lse=True)
    gold, gold_lse = varlen_reference(*arguments, q_offset=q_offset)
    same, _ = varlen_reference(*arguments, q_offset=q_offset, dtype=torch.float32)
    assert_near(out, gold, same, torch.float32)
    assert gold_lse is not None
    torch.testing.assert_close(lse.double(), gold_lse.double(), rtol=2e-5, atol=2e-5)


@examples(15)
@given(data=st.data())
def test_states_of_any_split_merge_to_the_whole(data: st.DataObject) -> None:
    kv_len = data.draw(st.integers(1, 150), label="kv_len")
    cuts = data.draw(st.lists(st.integers(0, kv_len), max_size=4), label="cuts")
    edges = [0, *sorted(cuts), kv_len]
    q, k, v = torch.randn(2, 4, 20, D), torch.randn(2, 2, kv_len, D), torch.randn(2, 2, kv_len, D)
    offset = kv_len - 20
    parts = [
        fa.attention(q, k[:, :, a:b], v[:, :, a:b], fa.Causal(), q_offset=offset - a, partial=True)
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = fa.merge_states([p[0] for p in parts], [p[1] for p in parts])
    gold, gold_lse = attention_reference(q, k, v, fa.Causal(), q_offset=offset)
    assert gold_lse is not None
    torch.testing.assert_close(out.double(), gold, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(lse.double(), gold_lse, rtol=1e-5, atol=1e-5)
