"""The product's own PTX, run by the emulator, against the fp64 reference: every variant and shape.

Bounds are those of `tests/ops/test_attention.py`. Each variant meets one emulated target and one
tile kind in turns, those of the library both; each shape meets all targets in turns.
"""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from tests.ops.test_attention import DECODE, LIBRARY, SMALL, fitting, run
from tests.registry import CASES, SHAPES
from tests.registry_case import Case, Shape

TARGETS = ("emulated:sm_80", "emulated:sm_75", "emulated:sm_90")


def dtype_of(target: str, turn: int = 0) -> torch.dtype:
    """sm_75 has fp16 only; the others take turns."""
    half = target == "emulated:sm_75" or turn % 4 == 3
    return torch.float16 if half else torch.bfloat16


def turn(case: Case) -> int:
    return CASES.index(case)


PREFILL = [c for c in CASES if "library" in c.tags or turn(c) % 4 != 0]
FEW_ROW = [c for c in CASES if c.fits(DECODE) and ("library" in c.tags or turn(c) % 4 == 0)]


@pytest.mark.parametrize("case", PREFILL, ids=lambda c: c.name)
def test_every_variant_prefill(case: Case) -> None:
    target = TARGETS[turn(case) % 3]
    run(case, fitting(case, SMALL), dtype_of(target, turn(case)), target)


@pytest.mark.parametrize("case", FEW_ROW, ids=lambda c: c.name)
def test_every_variant_with_few_rows(case: Case) -> None:
    target = TARGETS[(turn(case) + 1) % 3]
    run(case, DECODE, dtype_of(target, turn(case)), target)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.id)
def test_every_shape(shape: Shape) -> None:
    number = SHAPES.index(shape)
    target = TARGETS[number % 3]
    variant = fa.Causal() if number % 2 else None
    run(Case("shape", lambda s, g: variant), shape, dtype_of(target, number), target)


def test_every_library_variant_is_covered() -> None:
    assert {c.name for c in LIBRARY} <= {c.name for c in PREFILL}
