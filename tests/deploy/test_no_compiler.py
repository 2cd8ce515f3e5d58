"""Without a compiler an installed wheel of kernels runs its variants, and others are errors."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.deploy.wanted.specs import wanted_specs

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os
import torch
import flashattn_jit as fa

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 40, 64) for _ in range(3))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

def mine(score, b, h, q_idx, kv_idx):
    return score * 1.25

for mode, error in (("missing", fa.CompileError), ("never", fa.MissingKernelError)):
    os.environ["FLASHATTN_JIT_COMPILE"] = mode
    torch.testing.assert_close(fa.attention(q, k, v, fa.Causal()), expected)
    few = fa.attention(q[:, :, -1:], k, v, fa.Causal(), q_offset="end")
    torch.testing.assert_close(few, expected[:, :, -1:])
    try:
        fa.attention(q, k, v, mine)
    except error as what:
        words = str(what)
    assert "flashattn-jit pack --wheel NAME" in words, words
    if mode == "missing":
        assert "score_mod(mine) needs a kernel for" in words, words
        assert "no C++ compiler was found, because c++ is not on PATH" in words, words
    else:
        assert "FLASHATTN_JIT_COMPILE=never forbids to compile it" in words, words
info = fa.cache_info()
assert (info.hits["read_only"], info.compiles) == (2, 0), info
print(dict(info.layers)["read_only"])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed wheel of the kernels of `fa.Causal`."""
    folder = tmp_path_factory.mktemp("wheel")
    specs = wanted_specs(
        fa.Causal(), head_dims=64, dtypes="fp32", formats=("dense",), targets="host"
    )
    fa.warm(specs, progress=False, jobs=1)
    report = fa.pack_wheel("acme-kernels", folder, manifest=specs)
    # As pip installs it; `tests/deploy/test_wheel.py` calls pip.
    with zipfile.ZipFile(report.path) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run_without_compiler(python: Path | str, tmp_path: Path, *folders: Path) -> str:
    """The output of `PROGRAM` in an interpreter that finds these folders and no compiler."""
    program = tmp_path / "run.py"
    program.write_text(PROGRAM)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FLASHATTN_JIT_") and name != "CXX"
    }
    variables |= {
        "PATH": "",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "FLASHATTN_JIT_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [str(python), str(program)], cwd=tmp_path, env=variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_its_variants_run_and_others_say_what_is_missing(site: Path, tmp_path: Path) -> None:
    printed = run_without_compiler(sys.executable, tmp_path, ROOT, site)
    assert printed == f"{site / 'acme_kernels' / 'kernels.pack'}\n"
