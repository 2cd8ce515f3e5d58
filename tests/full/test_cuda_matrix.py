"""The whole matrix on CUDA: every registered variant on every target, for many rows and for few.

`.ci/full` runs it. The default run compiles each variant for one target, by turns.
"""

from __future__ import annotations

import pytest

from flashattn_jit.codegen.spec import TileKind
from flashattn_jit.codegen.targets import CUDA_TARGETS
from tests.cuda import digests
from tests.cuda.kernels import (
    FEATURE_SETS,
    HEAD_DIMS,
    KINDS,
    SAME_PTX,
    assert_clean,
    compiled,
    on_target,
    ptx_of,
    spec_of,
    specs,
    twin,
    without_target,
)
from tests.harness.toolkit import needs_nvcc
from tests.registry.case import Case
from tests.registry.cases import CASES

pytestmark = needs_nvcc

REMEDY = "if it should change, run: python -m tests.cuda.digests"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("target", CUDA_TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_resources(case: Case, target: str, kind: TileKind) -> None:
    assert_clean(compiled(spec_of(case.name, target, kind)))


@pytest.mark.parametrize("features", FEATURE_SETS, ids="+".join)
@pytest.mark.parametrize("target", CUDA_TARGETS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=lambda d: f"d{d[0]}x{d[1]}")
def test_every_tile_with_every_feature(
    features: tuple[str, ...], target: str, head_dims: tuple[int, int]
) -> None:
    for spec in specs("causal", target, head_dims, features):
        kernel = compiled(spec)
        assert kernel.tile == 0, f"the planner's tile spills: {spec.tile_q} x {spec.tile_kv}"
        assert_clean(kernel)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rendered_sources_are_those_of_the_table(case: Case) -> None:
    found = {target: digests.source_digest(case.name, target) for target in CUDA_TARGETS}
    assert found == digests.read()["sources"].get(case.name), REMEDY


OWN_PTX = [(c, t) for t in CUDA_TARGETS for c in CASES if twin(c.name, t) is None]
TWINS = [(c, t) for t in SAME_PTX for c in CASES if twin(c.name, t) is not None]


def named(value: object) -> str | None:
    return value.name if isinstance(value, Case) else None


@pytest.mark.parametrize(("case", "target"), OWN_PTX, ids=named)
def test_ptx_is_that_of_the_table(case: Case, target: str) -> None:
    release = digests.read()["nvcc"]
    if digests.nvcc_release() != release:
        pytest.skip(f"the table is of nvcc {release}")
    assert digests.ptx_digest(case.name, target) == digests.read()["ptx"][case.name][target], REMEDY


@pytest.mark.parametrize(("case", "target"), TWINS, ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_targets_share_ptx(case: Case, target: str, kind: TileKind) -> None:
    spec = spec_of(case.name, target, kind)
    other = ptx_of(on_target(spec, SAME_PTX[target]))
    assert without_target(ptx_of(spec)) == without_target(other)
