"""Kernels of the registry's cases: specs, cache entries, PTX."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flashattn_jit.codegen.budget import limits, register_budget, shared_bytes
from flashattn_jit.codegen.render import render
from flashattn_jit.codegen.spec import KernelSpec, TileKind
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.formats import Format
from flashattn_jit.jit.compilation import nvcc
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.compilation.ptxas_report import Report, load_report
from flashattn_jit.jit.compilation.toolchain import find_compiler
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.planning.batch_params import stand_ins
from flashattn_jit.planner.cuda_tiles import row_class, spill_bytes, with_tile
from flashattn_jit.planner.tiles import build_requests, choose_rows, fallbacks, kernels_by_rows
from flashattn_jit.stored_hooks import decoded, decodings
from flashattn_jit.variants.binding import bind_on_host
from flashattn_jit.variants.ir.dtypes import KV_NAMES
from flashattn_jit.variants.ir.ir import VariantIR
from flashattn_jit.variants.variant import Dims, Variant, as_variant
from tests.harness import rotation
from tests.registry.case import Case
from tests.registry.cases import CASES, by_name

KINDS: tuple[TileKind, ...] = ("prefill", "few_row")
PLAIN = VariantIR(())
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
KERNEL = "fajit_attention_kernel"

# nvcc gives these targets the PTX of another target except for the `.target` line, but not where
# fewer blocks of a kernel share a multiprocessor (sm_86, sm_89), which leaves each block more
# registers. From sm_90 on the merge waits for attention by itself. nvcc 13.0 compiles sm_100 and
# sm_120 with another NVVM than earlier targets, and differently from each other. So each of these
# has PTX of its own.
SAME_PTX = {"sm_89": "sm_86"}
"""Except for the merge of pointwise states, which nvcc orders differently for sm_89; see `twin`."""

FEATURE_SETS: tuple[tuple[str, ...], ...] = (
    ("block_mask",),
    ("paged",),
    ("mixed_rows",),
    ("sparse",),
    ("unaligned",),
    ("paged", "mixed_rows"),
    ("paged", "sparse"),
    ("sparse", "unaligned"),
)
"""Features of CUDA kernels, alone and in combinations."""

EMULATED = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Targets whose PTX the emulator's tests run. Every other target has the PTX of one of these,
except for the kernels that `twin` excludes, which tests/batch runs."""

IN_TURN = rotation.chosen(CASES, 16, lambda case: "library" in case.tags and case.tags)
"""The cases that this run compiles and runs in the emulator. The hooks of all of them run in
tests/codegen/test_cuda_hooks.py."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel: the spec of the tile taken, its index among the fallbacks, its entry."""

    spec: KernelSpec
    tile: int
    folder: Path

    @property
    def report(self) -> Report:
        """Resources and budgets of its kernels."""
        return load_report(self.folder / "resources.json")

    @property
    def ptx(self) -> str:
        """Its PTX."""
        return self.folder.joinpath("kernel.ptx").read_text()


def rotating(name: str) -> tuple[str, TileKind]:
    """The one target and tile kind that a case is compiled for in the default run."""
    number = zlib.crc32(name.encode())
    return CUDA_TARGETS[number % len(CUDA_TARGETS)], KINDS[number // len(CUDA_TARGETS) % len(KINDS)]


@cache
def ir_of(name: str) -> VariantIR:
    """The IR of a case of the registry, by its name; of plain attention for "plain"."""
    if name == "plain":
        return PLAIN
    case: Case = by_name(name)
    variant, params = case.build()
    return as_variant(variant).bind(Dims(*case.shape), params).ir


def twin(name: str, target: str) -> str | None:
    """The target whose PTX a case has on this target too; None where its PTX is its own."""
    if target == "sm_89" and ir_of(name).normalizer == "pointwise":
        return None
    return SAME_PTX.get(target)


def dtype_of(target: str) -> str:
    """bfloat16, and float16 where the target has no bfloat16."""
    return "float16" if target == "sm_75" else "bfloat16"


def specs(
    name: str,
    target: str,
    head_dims: tuple[int, int] = (64, 64),
    features: tuple[str, ...] = (),
) -> tuple[KernelSpec, ...]:
    """Every kernel that the planner reaches for a case on a target."""
    return kernels_by_rows(ir_of(name), head_dims, (dtype_of(target),) * 3, target, (features,))


def spec_of(name: str, target: str, kind: TileKind) -> KernelSpec:
    """The kernel of a case for many rows (the largest tile, on Hopper of wgmma) or few."""
    few = kind == "few_row"
    return next(spec for spec in specs(name, target) if (spec.tile_kind == "few_row") == few)


def coded_spec(
    formats: tuple[Format | None, Format | None],
    head_dims: tuple[int, int],
    variant: Variant | None = None,
    rows: int = 5000,
    features: tuple[str, ...] = (),
) -> KernelSpec:
    """The kernel that the planner takes on Hopper for bfloat16 queries and these formats.

    None: keys or values in bfloat16.
    """
    over = decoded(as_variant(variant), decodings(formats, *head_dims))
    dims = Dims(2, 4, 2, rows, 512, *head_dims)
    ir = bind_on_host(over, dims, stand_ins(over, dims)).ir
    stored = ("bfloat16" if f is None else KV_NAMES[f.dtype] for f in formats)
    return choose_rows(ir, head_dims, ("bfloat16", *stored), "sm_90", rows, features)


def by_mma_sync(spec: KernelSpec) -> KernelSpec:
    """The kernel that the planner takes instead of one of wgmma; others as they are."""
    return with_tile(spec, row_class(spec.tile_q), tma=False)


def compiled(spec: KernelSpec) -> Compiled:
    """The cache entry of a kernel, compiled as for a call: a spill takes a smaller tile."""
    tiles = (spec, *fallbacks(spec))
    tile, module = load_stepping(build_requests(spec))
    return Compiled(tiles[tile], tile, Path(module.path).parent)


def assert_clean(kernel: Compiled) -> None:
    """Registers and shared memory within the tile's budget; no local memory, but for spills that
    buy a tile of twice the keys."""
    report, spec = kernel.report, kernel.spec
    assert report.complaints(spill_bytes(spec)) == []
    assert {k.name for k in report.kernels} == {KERNEL, "fajit_merge_kernel"}
    used, budget = report.kernel(KERNEL), report.budgets[KERNEL]
    assert budget.threads == 32 * spec.num_warps
    assert used.registers <= register_budget(spec) == budget.registers
    assert used.shared_bytes + shared_bytes(spec) <= budget.shared_bytes
    for name in report.budgets:
        assert report.kernel(name).shared_bytes <= limits(spec.target).shared_per_block
    meta = json.loads(kernel.folder.joinpath("meta.json").read_text())
    assert meta["min_driver"] >= 525


def ptx_of(spec: KernelSpec, key: str = "0" * 64) -> str:
    """The PTX of a kernel as a build would keep it, made without machine code and host code.

    It differs only in the columns of `.loc`, which nvcc counts differently here.
    """
    header = f'#define FAJIT_KEY "{key}"\n#line 1 "{nvcc.SOURCE}"\n'
    return ptx_of_source(header + render(spec), spec.target, key)


def ptx_of_source(text: str, target: str, key: str = "0" * 64) -> str:
    """The PTX of a kernel's rendered source."""
    compiler = find_compiler(target)
    assert compiler is not None
    with tempfile.TemporaryDirectory(prefix="fajit-ptx-") as name:
        staging, work = Path(name), Path(name) / "build"
        work.mkdir()
        source = staging / nvcc.SOURCE
        source.write_text(text)
        log = staging / "log"
        job = nvcc.job(source, work, key, target, compiler, log, staging / "command")
        arch = target.removeprefix("sm_")
        flags = [f for f in job.compile_flags if not f.startswith("-gencode")]
        run = subprocess.run(
            [*compiler.command, *flags, f"-arch=compute_{arch}", "-ptx", "-o", nvcc.PTX,
             f"/proc/self/cwd/{nvcc.SOURCE}"],
            cwd=work, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise BuildFailure(run.stderr, None)
        nvcc.write_ptx(work, staging / nvcc.PTX, compiler)
        return staging.joinpath(nvcc.PTX).read_text()


def without_target(ptx: str) -> str:
    """PTX without its `.target`, and without the `.minnctapersm` that follows from it.

    `.minnctapersm` limits the registers that ptxas gives a thread and does not affect the PTX code.
    """
    return re.sub(r"^\.(?:target|minnctapersm) .*\n", "", ptx, flags=re.MULTILINE)


def without_columns(ptx: str) -> str:
    """PTX without the columns of `.loc`."""
    return re.sub(r"(\.loc\t\d+ \d+|inlined_at \d+ \d+) \d+", r"\1", ptx)


def without_lines(ptx: str) -> str:
    """PTX without the source locations of instructions."""
    ptx = re.sub(r"^\s*\.(?:loc|file)\b.*\n", "", ptx, flags=re.MULTILINE)
    names = r"^\t?\.section\s+\.debug_str\n\s*\{.*?^\s*\}\n?"  # of inlined functions
    ptx = re.sub(names, "", ptx, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\n\s*\n+", "\n", ptx)


def on_target(spec: KernelSpec, target: str) -> KernelSpec:
    """The same kernel, tile included, for another target."""
    return replace(spec, target=target)
