"""The C interface of rendered artifacts under AddressSanitizer and UBSan, with random arguments."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import env
from flashattn_jit.codegen.render import render
from flashattn_jit.codegen.spec import KernelSpec, host_target, host_targets
from flashattn_jit.codegen.targets import has_amx
from flashattn_jit.jit.compilation.toolchain import find_compiler, flags_for
from flashattn_jit.planner.tiles import kernels_by_rows
from flashattn_jit.variants.interval.simplify import range_tables
from flashattn_jit.variants.variant import Dims
from tests.harness import rotation

SECONDS = 3  # of fuzzing, for each artifact
SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Fuzzed(fa.Variant):
    """The variant that driver.cpp computes in a plain loop."""

    bias: torch.Tensor = fa.tensor("num_q_heads", "offsets")
    sink: torch.Tensor = fa.tensor("num_q_heads")
    gate: torch.Tensor = fa.tensor("num_q_heads")
    documents: torch.Tensor = fa.tensor("batch", "positions")
    window: int = fa.scalar()
    cap: float = fa.scalar()

    normalizer = fa.Softmax(sink="sink")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.bias[h, kv_idx - q_idx]

    def mask_mod(self, b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx < self.window) & (kv_idx - q_idx < self.window)
        return near & (self.documents[b, q_idx] == self.documents[b, kv_idx])

    def output_mod(self, row, lse, b, h, q_idx):
        return row * self.gate[h]


def spec_of(
    kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, target: str
) -> KernelSpec:
    """The kernel that a call with these dtypes and head dims takes on a target."""
    heads, positions = 4, 40
    dims = Dims(1, heads, heads, positions, positions, head_dim, head_dim_v)
    params = {
        "bias": torch.zeros(heads, 16), "sink": torch.zeros(heads), "gate": torch.zeros(heads),
        "documents": torch.zeros(1, positions, dtype=torch.int32), "window": 8, "cap": 2.0,
    }  # fmt: skip
    bound = Fuzzed().bind(dims, params)
    name = str(dtype).removeprefix("torch.")
    kernels = kernels_by_rows(bound.ir, (head_dim, head_dim_v), (name,) * 3, target, ((),))
    return next(spec for spec in kernels if spec.tile_kind == kind)


def config_of(spec: KernelSpec) -> str:
    """The text of fuzz_config.h: the parts of the spec that the driver reads."""
    ir = spec.variant
    mask = ir.hook("mask_mod")
    assert mask is not None
    tables = range_tables(mask)
    slots = {p.name: i for i, p in enumerate(ir.tensors)}
    assert all(t.slot == slots["documents"] and t.dim == 1 for t in tables)
    values = {
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "BF16": int(spec.q_dtype == "bfloat16"),
        "TILES": int(has_amx(spec.target)),
        "MAX_Q_LEN": 70 if spec.tile_kind == "prefill" else 12,
        "NUM_TENSORS": len(ir.tensors),
        "NUM_TABLES": len(tables),
        **{f"SLOT_{name.upper()}": slot for name, slot in slots.items()},
        **{f"SCALAR_{p.name.upper()}": slot for slot, p in enumerate(ir.scalars)},
    }
    return "".join(f"#define FUZZ_{name} {value}\n" for name, value in values.items())


def build_driver(
    work: Path, spec: KernelSpec, compiler: Sequence[str], options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Compiles driver.cpp with the spec's kernel to `work`/fuzz."""
    (work / "fuzz_config.h").write_text(config_of(spec))
    (work / "kernel.cpp").write_text(f'#define FAJIT_KEY "fuzz"\n{render(spec)}')
    flags = [f for f in flags_for(spec.target) if not f.startswith(("-O", "-Wl,-s", "-fno-rtti",
             "-fno-exceptions", "-fvisibility", "-fstack-usage"))]  # fmt: skip
    driver = Path(__file__).with_name("driver.cpp")
    return subprocess.run(
        [*compiler, *flags, *options, f"-I{env.include_dir()}", f"-I{work}", str(driver),
         str(work / "kernel.cpp"), "-o", str(work / "fuzz")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


ARTIFACTS = [
    ("prefill", torch.float32, 40, 24, "avx512"),
    ("prefill", torch.bfloat16, 33, 48, "avx512_bf16"),
    ("prefill", torch.float32, 17, 65, "avx2"),
    ("prefill", torch.bfloat16, 40, 33, "amx_bf16"),
    ("prefill", torch.bfloat16, 64, 33, "amx_bf16"),  # keys in place
    ("few_row", torch.float32, 24, 40, "generic"),
    ("few_row", torch.bfloat16, 64, 17, "avx512_bf16"),
    ("few_row", torch.float32, 33, 24, "avx2"),
    ("few_row", torch.bfloat16, 64, 96, "amx_bf16"),
]


# Under the sanitizers an artifact takes 8 s: a run takes one of them, by turns.
@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "head_dim_v", "level"),
    rotation.chosen(ARTIFACTS, 9),
)
def test_no_argument_makes_an_artifact_leave_its_tensors(
    tmp_path: Path, kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, level: str
) -> None:
    target = f"cpu:{level}" if f"cpu:{level}" in host_targets() else host_target()
    spec = spec_of(kind, dtype, head_dim, head_dim_v, target)
    compiler = find_compiler()
    assert compiler is not None
    build = build_driver(tmp_path, spec, compiler.command, SANITIZE)
    if "cannot find -lasan" in build.stderr or "cannot find -lubsan" in build.stderr:
        pytest.skip("the compiler has no sanitizer runtime")
    assert build.returncode == 0, build.stderr
    run = subprocess.run(
        [str(tmp_path / "fuzz"), "1", str(SECONDS)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert int(run.stdout.split()[0]) > 10
