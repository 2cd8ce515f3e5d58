"""The error that `verify` allows for ulps in each score passes right kernels and no bugs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.inspect.verification import run
from flashattn_jit.inspect.verification.cases import Case
from flashattn_jit.inspect.verification.error import compare, effect_of_errors
from flashattn_jit.inspect.verification.inputs import Inputs, make_inputs
from flashattn_jit.inspect.verification.run import Runner
from flashattn_jit.variants.params import Dims

EXTREME = Case("scores of 1e4", Dims(2, 4, 2, 23, 191, 64, 64), extreme=True)
MANY_ROWS = Dims(1, 16, 4, 256, 128, 32, 32)  # 4,096 rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    return make_inputs(case, dtype, torch.Generator().manual_seed(seed))


def in_halves(x: Inputs) -> Tensor:
    """Causal attention in fp32 in base 2, with the scale applied to each half of a dot product."""
    k, v = (t.repeat_interleave(2, 1) for t in (x.clean_k, x.clean_v))
    scale = math.log2(math.e) / 8
    a, b = ((x.q[..., at] @ k[..., at].mT) * scale for at in (slice(0, 32), slice(32, 64)))
    s = (a + b).masked_fill(torch.ones(a.shape[-2:]).triu(1).bool(), -math.inf)
    weights = torch.exp2(s - s.amax(-1, keepdim=True))
    return (weights @ v) / weights.sum(-1, keepdim=True)


def test_a_right_computation_is_off_by_an_ulp_where_scores_tie() -> None:
    runner = Runner(fa.Causal(), "cpu:generic", 0, {})
    refused = 0
    for seed in range(30):
        x = inputs(EXTREME, torch.float32, seed)
        wide, same = runner.expected(EXTREME, x, {}, torch.float32)
        moved = effect_of_errors(
            wide, lambda errors, x=x: runner._reference(EXTREME, x, {}, torch.float64, errors)
        )
        got = in_halves(x)
        refused += bool(compare(got, wide[0], same[0]).problem)
        assert not compare(got, wide[0], same[0], moved=moved[0]).problem, seed
    assert refused > 3, "the eager reference's RMS alone would refuse it"


def planted(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    """Applies `mistake` to (q, k, v, out) of every call of the kernel."""
    right = run.attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        result = right(q, k, v, *args, **options)
        mistake(q, k, v, result[0])
        return result

    monkeypatch.setattr(run, "attention", wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extreme", [False, True], ids=["normal", "scores of 1e4"])
def test_a_row_of_another_head_among_thousands_fails(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, extreme: bool
) -> None:
    def mistake(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out[0, 5, 77] = out[0, 1, 77]

    case = Case("planted", MANY_ROWS, extreme=extreme)
    runner = Runner(fa.Causal(), "cpu:generic", 1, {})
    assert not any(c.problem for c in runner.compare(case, dtype))
    planted(monkeypatch, mistake)
    found = runner.compare(case, dtype)[0]
    assert "h=5, row=77" in found.problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_a_key_too_many_fails(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def mistake(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        s = (q[0, 5, 20].double() @ k[0, 1, :22].double().T) / math.sqrt(32)
        out[0, 5, 20] = (s.softmax(-1) @ v[0, 1, :22].double()).to(out.dtype)

    case = Case("planted", MANY_ROWS)
    planted(monkeypatch, mistake)
    found = Runner(fa.Causal(), "cpu:generic", 2, {}).compare(case, dtype)[0]
    assert "h=5, row=20" in found.problem


def test_a_tie_weighed_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0.53 and 0.47 for equal scores: 40 times the effect of an ulp of the scores."""
    x = inputs(EXTREME, torch.float32)
    s = (x.q[0, 0, 15].double() @ x.clean_k[0, 0, :16].double().T) / 8
    best, at = s.topk(2)
    assert best[0] == best[1] > 1e4

    def mistake(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out[0, 0, 15] += 0.03 * (v[0, 0, at[0]] - v[0, 0, at[1]])

    runner = Runner(fa.Causal(), "cpu:generic", 0, {})
    assert not any(c.problem for c in runner.compare(EXTREME, torch.float32))
    planted(monkeypatch, mistake)
    found = runner.compare(EXTREME, torch.float32)[0]
    assert "b=0, h=0, row=15" in found.problem


def test_a_row_that_is_off_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out[0, 5, 77] += 0.05

    planted(monkeypatch, mistake)
    case = Case("planted", MANY_ROWS)
    found = Runner(fa.Causal(), "cpu:generic", 1, {}).compare(case, torch.bfloat16)[0]
    assert found.error < found.allowed
    assert "; the RMS of that row is 5.0" in found.problem and ", allowed " in found.problem
