"""Copies that ptxas miscompiles are found, and their kernels compiled again (`illegal_copies`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashattn_jit.codegen.render import render
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.compilation.cubin import _kernels, cubins, illegal_copies
from tests.cuda.kernels import compiled, spec_of

COPY, ILLEGAL = b"\xae\x7f", b"\xae\x7d"  # the lowest bytes: opcode, and no predicate
KEY = "0" * 64


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_copy_to_a_uniform_address_is_found_from_sm_90_on(target: str) -> None:
    kernel = compiled(spec_of("causal", target, "few_row"))
    artifact = bytearray(kernel.folder.joinpath("artifact.so").read_bytes())
    assert illegal_copies(artifact, target) == 0
    code = dict(_kernels(next(cubins(artifact))))["fajit_attention_kernel"]
    copy = next(i for i in range(0, len(code), 16) if code[i : i + 2] == COPY)
    at = artifact.find(code) + copy
    artifact[at : at + 2] = ILLEGAL
    assert illegal_copies(artifact, target) == (1 if target == "sm_90" else 0)


def build(folder: Path, target: str = "sm_90") -> str:
    """Builds a kernel; returns the source in the entry."""
    compiler = toolchain.find_compiler(target)
    source = render(spec_of("causal", target, "few_row"))
    toolchain.build(source, KEY, target, compiler, folder)
    return folder.joinpath("kernel.cu").read_text()


def test_a_kernel_with_such_copies_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [True, False]
    monkeypatch.setattr(toolchain, "_has_illegal_copies", lambda *args: answers.pop(0))
    source = build(tmp_path)
    assert not answers
    assert source.splitlines()[:2] == [
        f'#define FAJIT_KEY "{KEY}"', "#define FAJIT_WHOLE_ADDRESSES"
    ]  # fmt: skip
    assert "%ctaid.z" in tmp_path.joinpath("kernel.ptx").read_text()
    assert not tmp_path.joinpath("build").exists()


def test_a_kernel_that_keeps_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_has_illegal_copies", lambda *args: True)
    with pytest.raises(BuildFailure, match="a GPU cannot execute"):
        build(tmp_path)


def test_a_kernel_without_them_is_compiled_once(tmp_path: Path) -> None:
    assert "FAJIT_WHOLE_ADDRESSES" not in build(tmp_path)
