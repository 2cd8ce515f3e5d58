"""The library's manifest has the kernels of every library variant of the registry."""

from __future__ import annotations

import pytest

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CPU_TARGETS, compiled_here
from flashattn_jit.deploy.manifest import library
from flashattn_jit.deploy.wanted.structures import specs_of
from tests.registry.case import Case
from tests.registry.library import LIBRARY_CASES

# Cases that differ from the library's forms in a param's dtype or in the start of a partial RoPE.
OTHERS = {"additive_bias_heads_bf16", "document_unsorted", "rope_tail_interleaved"}
CASES = [c for c in LIBRARY_CASES if "library" in c.tags and c.name not in OTHERS]


@pytest.fixture(scope="module")
def documents() -> set[str]:
    lines = library.library_lines(head_dims=64, dtypes="fp32", targets="cpu:avx2")
    return {line.document for line in lines}


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_the_librarys_kernels_serve_every_variant_of_the_registry(
    case: Case, documents: set[str]
) -> None:
    variant, params = case.build()
    heads = (case.shape.num_q_heads, case.shape.num_q_heads)
    heads = heads if "table" in params else None
    specs = specs_of([variant], [(64, 64)], [("float32",) * 3], ["cpu:avx2"], ["dense"], heads,
                     params)  # fmt: skip
    assert {spec.tile_kind for spec in specs} == {"prefill", "few_row"}
    assert {spec.document() for spec in specs} <= documents


def test_there_are_kernels_for_all_cpu_targets_dtypes_and_head_dims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "library_forms", lambda head_dim: [library.Form(fa.Causal())])
    found = {
        (line.spec.target, line.spec.q_dtype, line.spec.head_dim, line.spec.tile_kind)
        for line in library.library_lines()
    }
    assert found == {
        (target, dtype, head_dim, kind)
        for target in filter(compiled_here, CPU_TARGETS)
        for dtype in ("float32", "bfloat16")
        for head_dim in (64, 128)
        for kind in ("prefill", "few_row")
    }
