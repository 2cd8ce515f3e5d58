"""The wheel of the library's kernels serves every library variant where there is no compiler.

The test builds the 312 kernels for this machine's target, and none for other targets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.deploy.manifest.library import library_lines

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
import flashattn_jit as fa
from flashattn_jit.codegen.spec import default_target
from tests.deploy.test_library import CASES
from tests.ops.cases import run

calls = 0
for case in CASES:
    for head_dim in (64, 128):
        for q_len in (case.shape.q_len, 1):
            shape = case.shape._replace(q_len=q_len, head_dim=head_dim, head_dim_v=head_dim)
            if case.fits(shape):
                for dtype in (torch.float32, torch.bfloat16):
                    run(case, shape, dtype, default_target())
                    calls += 1
info = fa.cache_info()
assert calls > 300, calls
assert info.hits["read_only"] > 250 and info.hits["user"] == info.compiles == 0, info
"""


@pytest.mark.timeout(7200)
def test_every_variant_of_the_library_runs(tmp_path: Path) -> None:
    lines = library_lines(targets="host")
    fa.warm(lines, progress=False)
    report = fa.pack_wheel("flashattn-jit-kernels-cpu", tmp_path, manifest=lines)
    assert report.entries == len(lines)
    assert report.bytes < 6.5e6  # kernels with AVX-512 are the largest; all five targets: 28.8e6
    with zipfile.ZipFile(report.path) as wheel:
        wheel.extractall(tmp_path / "site")
    program = tmp_path / "run.py"
    program.write_text(PROGRAM)
    variables = {n: v for n, v in os.environ.items() if not n.startswith("FLASHATTN_JIT_")}
    variables |= {
        "PATH": "",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}",
        "FLASHATTN_JIT_CACHE_DIR": str(tmp_path / "cache"),
    }
    variables.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
