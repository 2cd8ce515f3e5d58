"""`verify` of right kernels passes whatever the seed, on every CPU target of this machine."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.inspect.dims import complete_dims
from flashattn_jit.inspect.verification import verification
from flashattn_jit.inspect.verification.cases import cases
from flashattn_jit.inspect.verification.run import Runner
from tests.harness import rotation
from tests.ops.cases import HOST_TARGETS

VARIANTS = [fa.Causal(), fa.Full(), fa.ALiBi(), fa.SoftCap(), fa.SoftCap() & fa.Causal()]


@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_of_1e4(target: str, dtype: torch.dtype) -> None:
    base = complete_dims(None)
    tile = verification._largest_tile(target, base, str(dtype).removeprefix("torch."))
    extreme = [c for c in cases(base, *tile) if c.extreme]
    for seed in range(200):
        runner = Runner(fa.Causal(), target, seed, {})
        for case in extreme:
            found = runner.compare(case, dtype)
            assert not any(c.problem for c in found), (seed, case.name, found)


@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_all_cases(variant: fa.Variant, target: str) -> None:
    first = rotation.seed()
    for seed in range(first, first + 3):
        report = variant.verify(target=target, seed=seed, raise_on_failure=False)
        assert report.ok, str(report)
