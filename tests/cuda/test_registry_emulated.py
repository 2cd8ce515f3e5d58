"""The product's own PTX, run by the emulator, against the fp64 reference: every variant and shape.

Bounds are those of `tests/ops/test_attention.py`. Each variant meets one emulated target and one
tile kind in turns, those of the library both; each shape meets all targets in turns.
"""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from tests.ops.test_attention import DECODE, SMALL, fitting, run
from tests.registry import CASES, SHAPES
from tests.registry_case import Case, Shape

TARGETS = tuple(f"emulated:sm_{n}" for n in (80, 75, 86, 100, 120))
"""Those whose PTX differs by more than its target line (test_ptx.py)."""


def dtype_of(target: str, turn: int = 0) -> torch.dtype:
    """sm_75 has fp16 only; the others take turns."""
    half = target == "emulated:sm_75" or turn % 7 == 6
    return torch.float16 if half else torch.bfloat16


def turn(case: Case) -> int:
    return CASES.index(case)


PREFILL = [c for c in CASES if "library" in c.tags or turn(c) % 3 != 0]
FEW_ROW = [c for c in CASES if c.fits(DECODE) and ("library" in c.tags or turn(c) % 3 == 0)]


@pytest.mark.parametrize("case", PREFILL, ids=lambda c: c.name)
def test_every_variant_prefill(case: Case) -> None:
    target = TARGETS[turn(case) % len(TARGETS)]
    run(case, fitting(case, SMALL), dtype_of(target, turn(case)), target)


@pytest.mark.parametrize("case", FEW_ROW, ids=lambda c: c.name)
def test_every_variant_with_few_rows(case: Case) -> None:
    target = TARGETS[(turn(case) + 1) % len(TARGETS)]
    run(case, DECODE, dtype_of(target, turn(case)), target)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.id)
def test_every_shape(shape: Shape) -> None:
    number = SHAPES.index(shape)
    target = TARGETS[number % len(TARGETS)]
    variant = fa.Causal() if number % 2 else None
    run(Case("shape", lambda s, g: variant), shape, dtype_of(target, number), target)
