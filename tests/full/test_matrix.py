"""The whole matrix: every registered variant, on every CPU target of this machine, in every dtype.

`.ci/full` runs it. The default run takes parts of it by turns.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import DECODE, HOST_TARGETS, SMALL, fitting, run
from tests.registry.case import Case
from tests.registry.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_variant_target_and_dtype(case: Case, target: str, dtype: torch.dtype) -> None:
    run(case, fitting(case, SMALL), dtype, target)
    if case.fits(DECODE):
        run(case, DECODE, dtype, target)
