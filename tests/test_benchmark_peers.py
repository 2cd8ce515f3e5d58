"""The comparison with other engines times what computes the same, and says what it left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import peers
from benchmarks.engines import case as cases
from benchmarks.engines.case import Case, Engine, Inputs, NotSupported, Prepared, Source
from benchmarks.engines.ours import ours

SMALL = {
    "dense": Case("prefill", (40, 40), (40, 40), heads=(4, 2), head_dim=64, dtype=torch.float32),
    "paged": Case("mixed", (1, 9), (70, 25), heads=(4, 2), head_dim=64, dtype=torch.float32,
                  paged=True),
}  # fmt: skip


def by_hand(case: Case, inputs: Inputs) -> dict[str, Prepared]:
    """Plain torch on the packed rows of each request."""

    def run() -> torch.Tensor:
        outs, group = [], case.heads[0] // case.heads[1]
        rows = zip(
            inputs.q.split(case.q_lens),
            inputs.k.split(case.kv_lens),
            inputs.v.split(case.kv_lens),
            strict=True,
        )
        for q, k, v in rows:
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * case.scale
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
        return torch.cat(outs)

    return {"by hand": Prepared(run, run)}


def not_causal(case: Case, inputs: Inputs) -> dict[str, Prepared]:
    wrong = ours(replace(case, causal=False), inputs)
    return {"not causal": wrong}


def none(case: Case, inputs: Inputs) -> dict[str, Prepared]:
    raise NotSupported("takes no case")


def rounded(case: Case, inputs: Inputs) -> dict[str, Prepared]:
    """As `by_hand`, over keys and values that went through e4m3."""
    k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (inputs.k, inputs.v))
    return by_hand(case, replace(inputs, k=k, v=v))


def test_fp8_cases_are_over_rounded_keys_and_values() -> None:
    torch.manual_seed(0)
    case, left_out = replace(SMALL["paged"], fp8=True), dict[str, list[str]]()
    engines = {"right": Engine("1", rounded, True), "wrong": Engine("1", by_hand, True)}
    assert list(peers.case_rows(case, engines, left_out, pairs=1)) == ["right"]
    assert any("differs from our result" in why for why in left_out)


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_only_engines_with_our_result_are_timed(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    made = {"right": by_hand, "wrong": not_causal, "other": none}
    engines = {name: Engine("1", make, case.paged) for name, make in made.items()}
    left_out: peers.LeftOut = {}
    rows = peers.case_rows(case, engines, left_out, pairs=1)
    assert list(rows) == ["right"] and rows["right"].measured > 0
    wrong, other = left_out
    assert "not causal differs from our result" in wrong and other == "other: takes no case"
    assert left_out[other] == [peers.title(case)]
    assert "differs" in capsys.readouterr().out  # a wrong result is reported at once


def test_an_engine_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    def absent() -> Engine:
        raise cases.NotAvailable("no module")

    left_out: peers.LeftOut = {}
    assert not peers.opened({"absent": Source(absent, "pip install absent")}, left_out)
    assert list(left_out) == ["absent: no module; to get it: pip install absent"]


def test_cases_are_those_of_their_kind() -> None:
    assert not any(case.paged for case in peers.dense_cases(1))
    assert all(case.paged for case in peers.serving_cases(1)) and len(peers.serving_cases(1)) == 21
    titles = [peers.title(case) for case in peers.dense_cases(1) + peers.serving_cases(1)]
    assert len(titles) == len(set(titles))
