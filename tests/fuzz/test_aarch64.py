"""Machines that are not x86-64: what they run, and kernels cross-compiled for aarch64, in qemu.

Needs g++-aarch64-linux-gnu; to run kernels, qemu-user.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pybind11
import pytest
import torch

from flashattn_jit.codegen import targets
from flashattn_jit.deploy.wanted.arguments import parse_targets
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.compilation.toolchain import flags_for
from tests.fuzz.test_fuzz import build_driver, spec_of

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TARGETS = [name for name, row in targets.CPU_ROWS.items() if row.machine in ("", "aarch64")]

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}")


@pytest.fixture(autouse=True)
def aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "machine", lambda: "aarch64")


def test_a_machine_of_another_architecture_runs_generic_code() -> None:
    assert targets.best_cpu_target([]) == "cpu:generic"
    assert targets.best_cpu_target(["x86-64-v3"]) == "cpu:generic"
    assert parse_targets("cpu", to_build=True) == tuple(TARGETS)
    assert not any(flag.startswith("-march=x86") for flag in flags_for("cpu:generic"))
    with pytest.raises(TargetError, match=r"'cpu:avx2' is compiled on x86_64 machines"):
        flags_for("cpu:avx2")


@needs_compiler
@pytest.mark.parametrize("folder", ["runtime", "scheduler", "interval", "emulator"])
def test_the_compiled_parts_compile(tmp_path: Path, folder: str) -> None:
    """With the flags of `setup.py` and the headers of this Python: both have 64-bit longs."""
    unit = tmp_path / "unit.cpp"
    sources = sorted(ROOT.joinpath("csrc", folder).rglob("*.cpp"))
    unit.write_text("".join(f'#include "{path}"\n' for path in sources))
    folders = [ROOT, ROOT / "csrc/include", ROOT / "csrc/runtime", ROOT / "csrc/emulator"]
    folders += [Path(pybind11.get_include()), Path(sysconfig.get_path("include"))]
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-fopenmp", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Werror"]
    check([*command, *(f"-I{path}" for path in folders), str(unit)])


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("prefill", torch.float32), ("few_row", torch.bfloat16)]
)
def test_kernels_give_what_a_plain_loop_gives(
    tmp_path: Path, kind: str, dtype: torch.dtype, target: str
) -> None:
    spec = spec_of(kind, dtype, 40, 24, target)
    build = build_driver(tmp_path, spec, [COMPILER], ["-O1", "-static"])
    assert build.returncode == 0, build.stderr
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"compiled; to run it needs {EMULATOR}")
    done = check([EMULATOR, str(tmp_path / "fuzz"), "1", "3"])
    assert int(done.split()[0]) > 5  # calls; a quiet machine makes 50


def check(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stderr[-4000:]}"
    return result.stdout
