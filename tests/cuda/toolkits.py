"""Compiles kernels with every release of CUDA 13 whose nvcc is a package of pip.

    python -m tests.cuda.toolkits [--jobs N] [VERSION ...]

For each minor version (its newest patch) nvcc and what it needs are installed into a temporary
folder, and the kernels of `wanted` are compiled with it into an empty cache: every template, tile
kind and feature, kernels that are no attention, and hooks with each kind of function. A kernel must
compile for its target within the budget of its tile, as in `test_compile.py`; one that takes a
smaller tile than the planner's, because it spills with that compiler, is named. The exit status is
1 if a kernel failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import AnySpec, KernelSpec, TileKind, UtilitySpec, append_kernel
from flashattn_jit.errors import CompileError
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.compilation.ptxas_report import load_report
from flashattn_jit.jit.module import default
from flashattn_jit.planner.tiles import build_requests, fallbacks, kernels_by_rows
from flashattn_jit.variants.params import Dims
from tests.cuda.kernels import (
    FEATURE_SETS,
    HEAD_DIMS,
    KINDS,
    Compiled,
    assert_clean,
    dtype_of,
    spec_of,
    specs,
)

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100")
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
CASES = (
    "soft_cap", "sigmoid", "t5_bias", "document", "rope_computed", "qk_norm", "gated_output",
    "flex_trig", "flex_odds_and_ends",
)  # fmt: skip
"""Of the registry: hooks of each kind, with each kind of function and of captured tensor."""


class Outcome(NamedTuple):
    """Of one kernel: its name, seconds of the compiler, what failed, whether its tile spilled."""

    name: str
    compile_s: float
    fault: str = ""
    smaller_tile: bool = False


def power(score: torch.Tensor, b, h, q_idx, kv_idx) -> torch.Tensor:
    """A score_mod with a power of two values."""
    return torch.pow(score.abs(), 0.5 + h / 8)


def wanted() -> Iterator[tuple[str, AnySpec]]:
    """Kernels and their names: of a feature or hook one tile kind, the other on the next target."""
    power_ir = fa.variant(score_mod=power).bind(Dims(1, 2, 1, 64, 64, 64, 64), {}).ir
    for turn, target in enumerate(TARGETS):
        dtypes = (dtype_of(target),) * 3
        yield "merge_states", UtilitySpec("merge_states", target)
        for unit_bytes in (1, 16):
            yield "append_paged_kv", UtilitySpec("append_paged_kv", target, unit_bytes=unit_bytes)
        changed = fa.RoPE().only("key_mod").bind(Dims(1, 2, 2, 64, 64, 64, 64), {}).ir
        yield "append", append_kernel(changed, (64, 64), dtypes[1:], target)
        for head_dims in HEAD_DIMS:
            for spec in specs("plain", target, head_dims):
                yield "plain", spec
        for number, features in enumerate(FEATURE_SETS, turn):
            head_dims = (40, 24) if "unaligned" in features else (128, 128)
            tiles = specs("causal", target, head_dims, features)
            yield "causal", largest(tiles, KINDS[number % 2])
        for number, case in enumerate(CASES, turn):
            yield case, spec_of(case, target, KINDS[number % 2])
        tiles = kernels_by_rows(power_ir, (64, 64), dtypes, target)
        yield "power", largest(tiles, KINDS[turn % 2])


def largest(tiles: Sequence[KernelSpec], kind: TileKind) -> KernelSpec:
    """The kernel of a kind with the most rows."""
    return next(spec for spec in tiles if spec.tile_kind == kind)


def newest_patches() -> list[str]:
    """The newest patch of each minor version of CUDA 13, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", PACKAGES[0]]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^Available versions: (.*)$", shown, re.MULTILINE)
    found = sorted(tuple(map(int, version.split("."))) for version in line.split(", "))
    newest = {version[:2]: version for version in found if version[0] == 13}
    return [".".join(map(str, version)) for version in newest.values()]


def install(version: str, folder: Path) -> Path:
    """Installs nvcc into a folder; returns the toolkit's home.

    All packages are of one minor version: those of another give ptxas PTX that it does not know.
    """
    minor = ".".join(version.split(".")[:2])
    pinned = [f"{PACKAGES[0]}=={version}", *(f"{name}=={minor}.*" for name in PACKAGES[1:])]
    run = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    subprocess.run([*run, "--target", folder, *pinned], check=True)
    (home,) = folder.glob("nvidia/cu*")
    return home


def compile_one(release: str, kernel: tuple[str, AnySpec]) -> Outcome:
    """Compiles a kernel, and checks its resources."""
    name, spec = kernel
    shown = [name, spec.target]
    if isinstance(spec, KernelSpec):
        shown += [spec.tile_kind, f"{spec.tile_q}x{spec.tile_kv}", f"d{spec.head_dim}",
                  *spec.features]  # fmt: skip
    name = " ".join(shown)
    try:
        got = default.prepare(build_requests(spec))
        assert got.found.layer == "compiler", f"the kernel came from {got.found.path}"
        assert got.found.meta["cuda_version"] == release, "another nvcc compiled it"
        if isinstance(spec, KernelSpec):
            taken = (spec, *fallbacks(spec))[got.tile]
            assert_clean(Compiled(taken, got.tile, Path(got.found.path)))
        else:
            report = load_report(Path(got.found.path) / "resources.json")
            assert not report.complaints(), report.complaints()
    except (CompileError, AssertionError) as error:
        return Outcome(name, 0.0, str(error).partition("\n")[0] or "a check failed")
    return Outcome(name, got.compile_s, smaller_tile=got.tile > 0)


def try_version(version: str, kernels: list[tuple[str, AnySpec]], jobs: int) -> bool:
    """Compiles the kernels with a release of nvcc and prints the result; whether none failed."""
    with tempfile.TemporaryDirectory(prefix=f"nvcc-{version}-") as name:
        folder = Path(name)
        home = install(version, folder / "toolkit")
        os.environ["FLASHATTN_JIT_CUDA_HOME"] = str(home)
        os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(folder / "kernels")
        toolkit = find_toolkit()
        assert toolkit is not None and toolkit.home == home, f"{home} is no toolkit"
        # Each process has the environment of now, and no kernels in memory.
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, mp_context=fork) as pool:
            release = ".".join(version.split(".")[:2])
            outcomes = list(pool.map(partial(compile_one, release), kernels))
    failed = [outcome for outcome in outcomes if outcome.fault]
    smaller = [outcome for outcome in outcomes if outcome.smaller_tile]
    slowest = max(outcomes, key=lambda outcome: outcome.compile_s)
    print(f"{version}: {len(outcomes)} kernels, {len(failed)} failed, {len(smaller)} on a smaller "
          f"tile, at most {slowest.compile_s:.1f} s ({slowest.name})", flush=True)  # fmt: skip
    for outcome in smaller:
        print(f"  smaller tile: {outcome.name}")
    for outcome in failed:
        print(f"  failed: {outcome.name}: {outcome.fault}")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 13.1.115")
    options = parser.parse_args()
    versions = options.versions or newest_patches()
    kernels = list(wanted())
    passed = [try_version(version, kernels, options.jobs) for version in versions]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
