"""The machine code of the wgmma kernels: their loops, waits and roles."""

from __future__ import annotations

import pytest

from flashattn_jit.inspect.machine_code.disassembly import Instruction, disassemble, nvdisasm
from flashattn_jit.jit.compilation.loops import Loop, count, loops
from flashattn_jit.planner.tiles import choose_rows
from tests.cuda.kernels import Compiled, compiled, ir_of
from tests.harness import rotation

pytestmark = pytest.mark.skipif(
    nvdisasm() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)

NAMES = ("plain", "causal", "alibi", "soft_cap", "soft_cap_approximate", "document", "rope")
HEAD_DIMS = (64, 96, 128, 192, 256)
KERNELS = [(n, d, r) for n in NAMES for d in HEAD_DIMS for r in (50, 5000)]


def kernel_of(name: str, head_dim: int, rows: int) -> Compiled:
    dtypes = ("bfloat16",) * 3
    return compiled(choose_rows(ir_of(name), (head_dim,) * 2, dtypes, "sm_90", rows))


def code_of(kernel: Compiled) -> tuple[Instruction, ...]:
    artifact = (kernel.folder / "artifact.so").read_bytes()
    return disassemble(artifact)["fajit_attention_kernel"]


def at(loop: Loop[Instruction], *names: str) -> list[int]:
    return [n for n, i in enumerate(loop.common) if i.opcode.startswith(names)]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "head_dim", "rows"), rotation.chosen(KERNELS, 12, lambda kernel: kernel[1])
)
def test_loops_issue_products_and_wait_for_them_where_they_should(
    name: str, head_dim: int, rows: int
) -> None:
    kernel = kernel_of(name, head_dim, rows)
    code, spec = code_of(kernel), kernel.spec
    if spec.tile_kind != "prefill_wgmma":
        pytest.skip(f"{name} changes keys for few rows, or spills: {spec.tile_kind}")
    found = loops(code)
    assert not count(code, "HMMA", "LDSM")
    assert len(found) == 2, "full tiles and partial ones have a loop each"
    steps = -(-head_dim // 16) + spec.tile_kv // 16
    for loop in found:
        assert loop.products == count(loop.longest, "HGMMA") == steps
        assert loop.spills_among_products == 0
        products, waits = at(loop, "HGMMA"), at(loop, "WARPGROUP.DEPBAR")
        assert [loop.common[w].operands.split()[-1] for w in waits] == ["0x1", "0x0"]
        weights = at(loop, "MUFU.EX2")
        assert products[-1] < waits[0] < weights[0]
        assert len(weights) >= spec.tile_kv // 2, "a thread has two rows"


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("head_dim", rotation.chosen(HEAD_DIMS, 4))
@pytest.mark.parametrize("rows", [50, 5000])
def test_roles_divide_the_registers_and_the_copies(head_dim: int, rows: int) -> None:
    kernel = kernel_of("causal", head_dim, rows)
    code = code_of(kernel)
    gives, takes = (
        [n for n, i in enumerate(code) if i.opcode.startswith(f"USETMAXREG.{what}")]
        for what in ("DEALLOC", "TRY_ALLOC")
    )
    copies = [n for n, i in enumerate(code) if i.name == "UTMALDG"]
    products = [n for n, i in enumerate(code) if i.name == "HGMMA"]
    assert len(copies) == 3, "K, and V in the loop over tiles and behind it"
    if rows == 50 and head_dim == 256:
        assert not gives and not takes
    else:
        assert len(gives) == len(takes) == 1
        assert gives[0] < min(copies) < max(copies) < takes[0] < products[0]
    assert not kernel.report.complaints(512)
