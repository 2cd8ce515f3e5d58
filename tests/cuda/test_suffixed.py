"""Kernels for ``sm_100a`` need only its row in the table of CUDA targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.document import spec_from_document
from flashattn_jit.codegen.render import render
from flashattn_jit.codegen.spec import BuildRequest, KernelSpec
from flashattn_jit.inspect.machine_code.disassembly import cubins
from flashattn_jit.jit.cache.entry import ARTIFACT
from flashattn_jit.jit.compilation.toolchain import flags_for, key_of
from flashattn_jit.variants.reference import attention_reference
from tests.cuda import suffixed
from tests.cuda.kernels import compiled, spec_of
from tests.ops.cases import assert_close, inputs
from tests.registry.case import Shape


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    suffixed.add_row(monkeypatch)


def key(spec: KernelSpec) -> str:
    render_it = lambda: render(spec)  # noqa: E731
    return key_of(BuildRequest(spec.document(), spec.template, spec.target, render_it)).hex


def test_its_kernel_is_keyed_and_compiled_for_the_suffix() -> None:
    spec = spec_of("causal", suffixed.TARGET, "few_row")
    plain = spec_of("causal", "sm_100", "few_row")
    assert spec == replace(plain, target=suffixed.TARGET)
    assert spec_from_document(spec.document()) == spec
    assert key(spec) != key(plain)
    assert "-gencode=arch=compute_100a,code=sm_100a" in flags_for(spec.target)
    kernel = compiled(spec)
    assert ".target sm_100a\n" in kernel.ptx
    assert not kernel.report.complaints()
    artifact = kernel.folder / ARTIFACT
    assert b"sm_100a" in b"".join(cubins(artifact.read_bytes()))


def test_the_emulator_runs_it() -> None:
    q, k, v = inputs(Shape(1, 2, 1, 3, 90, 64, 64), torch.bfloat16)
    out = fa.attention(q, k, v, fa.Causal(), target=f"emulated:{suffixed.TARGET}")
    exact, _ = attention_reference(q, k, v, fa.Causal())
    eager, _ = attention_reference(q, k, v, fa.Causal(), dtype=q.dtype)
    assert_close(out, exact, eager)
