"""The machine code of attention kernels has the instructions that the templates intend."""

from __future__ import annotations

import pytest

from flashattn_jit.codegen.budget import padded
from flashattn_jit.codegen.spec import KernelSpec, TileKind
from flashattn_jit.codegen.targets import CUDA_TARGETS, sm_version
from flashattn_jit.inspect.machine_code.disassembly import disassemble, nvdisasm
from flashattn_jit.jit.compilation import cubin
from flashattn_jit.jit.compilation.loops import JUMPS, count, loops
from tests.cuda import cycles, digests
from tests.cuda.kernels import KINDS, Compiled, by_mma_sync, compiled, spec_of, specs
from tests.harness import rotation

pytestmark = pytest.mark.skipif(
    nvdisasm() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)


def opcodes_of(kernel: Compiled) -> dict[str, list[str]]:
    """The opcodes of each kernel of an artifact, with their modifiers, in order."""
    found = disassemble((kernel.folder / "artifact.so").read_bytes())
    return {name: [i.opcode for i in code] for name, code in found.items()}


def matrix_instructions(spec: KernelSpec) -> int:
    """HMMA instructions that a warp issues for one tile of keys: both products."""
    if spec.tile_kind == "few_row":  # each warp has all rows and its own part of the keys
        row_blocks, keys = spec.tile_q // 16, spec.tile_kv // spec.num_warps
    else:
        row_blocks, keys = spec.tile_q // (16 * spec.num_warps), spec.tile_kv
    scores = row_blocks * (keys // 8) * (padded(spec.head_dim) // 16)
    outputs = row_blocks * (padded(spec.head_dim_v) // 8) * (keys // 16)
    return (scores + outputs) * (2 if spec.target == "sm_75" else 1)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "kind"),
    rotation.chosen([(t, k) for t in CUDA_TARGETS for k in KINDS], 2, lambda pair: pair[0]),
)
def test_attention_multiplies_on_matrix_units_and_loads_past_registers(
    target: str, kind: TileKind
) -> None:
    kernel = compiled(by_mma_sync(spec_of("causal", target, kind)))
    opcodes = opcodes_of(kernel)["fajit_attention_kernel"]
    shape = "HMMA.1688.F32" if target == "sm_75" else "HMMA.16816.F32"
    matrix = [code for code in opcodes if code.startswith("HMMA")]
    assert {code.removesuffix(".BF16") for code in matrix} == {shape}
    assert len(matrix) >= matrix_instructions(kernel.spec)
    fragments = {code for code in opcodes if code.startswith("LDSM")}
    assert fragments == {"LDSM.16.M88.4", "LDSM.16.MT88.4"}
    copies = {code for code in opcodes if code.startswith("LDGSTS")}
    if sm_version(target) >= 80:
        assert copies
        assert all(".128" in code for code in copies), "a copy of less than 16 bytes"
    else:
        assert not copies
    assert "MUFU.EX2" in opcodes


NAMES = ("causal", "rope", "mix_gemma2")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "target"),
    rotation.chosen([(n, t) for n in NAMES for t in CUDA_TARGETS], 7, lambda pair: pair[0]),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_kernel_touches_local_memory_among_its_products(
    name: str, target: str, head_dim: int
) -> None:
    """The report of the build, which reads the machine code without a disassembler, agrees."""
    spec = max(specs(name, target, (head_dim, head_dim)), key=lambda s: s.tile_q)
    kernel = compiled(spec)
    found = disassemble((kernel.folder / "artifact.so").read_bytes())
    assert set(found) == {"fajit_attention_kernel", "fajit_merge_kernel"}
    for kernel_name, code in found.items():
        report = kernel.report.kernel(kernel_name)
        spills = count(code, "LDL", "STL")
        assert len(code) > 100
        assert (spills > 0) == (report.stack_bytes > 0)
        assert 4 * spills >= report.stack_bytes
        if spills:
            among = max(loop.spills_among_products for loop in loops(code))
            assert report.spills_among_products == among == 0


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_machine_code_is_decoded_as_the_disassembler_does(target: str) -> None:
    """The few instructions that the rule about spills knows, and where jumps lead."""
    kinds = [rotation.turn(CUDA_TARGETS.index(target), list(KINDS))[0], "prefill"]
    for kind in dict.fromkeys(kinds):
        artifact = (compiled(spec_of("causal", target, kind)).folder / "artifact.so").read_bytes()
        decoded, expected = cubin.decode(artifact, target), disassemble(artifact)
        assert set(decoded) == set(expected)
        for kernel_name, code in expected.items():
            jumps = {n for n, i in enumerate(code) if i.name in JUMPS}
            assert [(i.name, i.target, i.always) for i in decoded[kernel_name]] == [
                (
                    i.name if i.name in cubin.KNOWN else "",
                    i.target if n in jumps else None,
                    i.always,
                )
                for n, i in enumerate(code)
            ]
            assert {i.name for i in code} >= {"EXIT", "BRA"}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "target", "head_dim"), rotation.chosen(cycles.KERNELS, 12, lambda k: k[2])
)
def test_kernels_cost_the_clocks_of_the_table(name: str, target: str, head_dim: int) -> None:
    """A change that makes a loop 3 % dearer, or cheaper, in the model of machine code shows in the
    table: `python -m tests.cuda.cycles` writes it."""
    table = cycles.read()
    if digests.nvcc_release() != table["nvcc"]:
        pytest.skip(f"the table is that of nvcc {table['nvcc']}")
    known = table["kernels"][cycles.row(name, target, head_dim)]
    found = cycles.predicted(name, target, head_dim)
    assert found["tile"] == known["tile"]
    assert found["clocks"] == pytest.approx(known["clocks"], rel=0.03)
