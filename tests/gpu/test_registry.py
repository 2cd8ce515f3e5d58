"""Every registered variant on the device, and plain attention on every shape, against fp64.

Pairs instead of the full matrix: each variant is tested with both tile kinds and both dtypes, each
shape with both dtypes, one of them under a mask.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.harness import case_named, run_case
from tests.ops.cases import DECODE, SMALL, fitting
from tests.registry.case import Shape
from tests.registry.cases import CASES, SHAPES

DTYPES = (torch.bfloat16, torch.float16)
WIDE = Shape(2, 8, 2, 150, 333, 64, 64)  # more rows than a tile of 128, at a group of 4


def _named(case: object, shape: Shape, dtype: torch.dtype) -> object:
    return pytest.param(case.name, shape, dtype, id=f"{case.name}-{str(dtype)[6:]}")


PREFILL = [_named(c, fitting(c, SMALL), DTYPES[i % 2]) for i, c in enumerate(CASES)]
FEW_ROWS = [_named(c, DECODE, DTYPES[(i + 1) % 2]) for i, c in enumerate(CASES) if c.fits(DECODE)]
LARGE = [_named(c, WIDE, DTYPES[i % 2]) for i, c in enumerate(CASES[::4]) if c.fits(WIDE)]
EVERY_SHAPE = [
    pytest.param(
        ("plain full", "plain causal")[(i + j) % 2], s, dtype, id=f"{s.id}-{str(dtype)[6:]}"
    )
    for i, s in enumerate(SHAPES)
    for j, dtype in enumerate(DTYPES)
]
HEAD_DIMS = [
    pytest.param("plain causal", Shape(1, 4, 2, 70, 130, d, d), DTYPES[d // 8 % 2], id=f"d{d}")
    for d in range(8, 257, 8)
]


@pytest.mark.parametrize(("case", "shape", "dtype"), PREFILL)
def test_every_variant_prefill(case, shape, dtype):
    run_case(case_named(case), shape, dtype)


@pytest.mark.parametrize(("case", "shape", "dtype"), FEW_ROWS)
def test_every_variant_with_few_rows(case, shape, dtype):
    run_case(case_named(case), shape, dtype)


@pytest.mark.parametrize(("case", "shape", "dtype"), LARGE)
def test_variants_on_large_tiles(case, shape, dtype):
    run_case(case_named(case), shape, dtype)


@pytest.mark.parametrize(("case", "shape", "dtype"), EVERY_SHAPE)
def test_every_shape(case, shape, dtype):
    run_case(case_named(case), shape, dtype)


@pytest.mark.parametrize(("case", "shape", "dtype"), HEAD_DIMS)
def test_every_head_dim(case, shape, dtype):
    run_case(case_named(case), shape, dtype)
