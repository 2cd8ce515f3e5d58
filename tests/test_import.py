"""The cost of `import flashattn_jit`, and the modules that a call must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashattn_jit as fa
from tests.harness import processes
from tests.harness.slowness import slowdown

SLOW = ("sympy", "torch._dynamo", "torch._inductor", "jinja2", "matplotlib", "transformers")
"""Modules that cost 0.1 to 1.6 s each; none is needed to look up, plan and launch a kernel."""


def python(code: str, **environment: str) -> str:
    """The output of `code` in a process that has imported torch, outside of the checkout."""
    result = processes.run(["-c", code], env={**os.environ, **environment}, cwd=Path(sys.prefix))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_takes_less_than_150_ms_beyond_torch(tmp_path: Path) -> None:
    """In CPU seconds of the reference machine, with bytecode as an installation has it."""
    code = (
        "import time, torch; begin = time.process_time(); import flashattn_jit; "
        "print(time.process_time() - begin)"
    )
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    python(code, **bytecode)
    taken_s: list[float] = []
    while min(taken_s, default=1.0) >= 0.150 and len(taken_s) < 8:  # a shared core runs slower
        slower = slowdown()
        taken_s.append(float(python(code, **bytecode)) / min(slower, slowdown()))
    assert min(taken_s) < 0.150


def test_public_names_exist_and_are_documented() -> None:
    assert fa.__all__ == sorted(set(fa.__all__))
    for name in fa.__all__:
        public = getattr(fa, name)
        if callable(public) or isinstance(public, type):
            assert public.__doc__, name


def test_import_neither_writes_nor_reads_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    python("import flashattn_jit", FLASHATTN_JIT_CACHE_DIR=str(folder))
    assert not folder.exists()


MOST_FILES = 38
"""Files of the package whose code the first call of a library variant may execute: a reader who
follows a call has to read them."""

FIRST_CALL = """
import sys, torch
from pathlib import Path
import flashattn_jit as fa

package = str(Path(fa.__file__).parent)
q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
variant = {variant}
files = set()


def note(frame, event, argument):
    files.add(frame.f_code.co_filename)


sys.setprofile(note)
fa.attention(q, k, v, variant)
sys.setprofile(None)
print(*sorted(name[len(package) + 1 :] for name in files if name.startswith(package)))
"""


@pytest.mark.parametrize(
    "variant",
    [
        "fa.Causal()",
        "fa.DocumentMask(torch.arange(64, dtype=torch.int32)[None] // 9)",
        "fa.ALiBi()",
        "fa.SoftCap(20.0)",
        "fa.AdditiveBias(torch.randn(1, 2, 64, 64))",
        "fa.LogN(16)",
        "fa.RoPE()",
        "fa.Sigmoid()",
    ],
)
def test_the_first_call_of_a_library_variant_executes_few_files(variant: str) -> None:
    """Counts the files of all functions called, with the kernel on disk."""
    python(FIRST_CALL.replace("{variant}", variant))  # compiles it where the cache lacks it
    files = python(FIRST_CALL.replace("{variant}", variant)).split()
    assert "jit/cache/store.py" in files and "jit/compilation/builder.py" not in files
    assert len(files) <= MOST_FILES, "\n".join(files)


CALL = """
import sys, torch
before = set(sys.modules)
import pytest

import flashattn_jit as fa

slopes = torch.linspace(0.1, 1.0, 4)
window = 17


def score_mod(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


q, k, v = (torch.randn(2, 4, 40, 16) for _ in range(3))
variant = fa.variant(score_mod=score_mod, mask_mod=mask_mod)
fa.attention(q, k, v, variant)
fa.attention(q[:, :, :1], k, v, variant, q_offset="end")
for module in set(sys.modules) - before:
    print(module)
"""


def test_a_call_from_a_warm_cache_imports_nothing_slow() -> None:
    python(CALL)  # compiles what the cache lacks
    imported = python(CALL, FLASHATTN_JIT_COMPILE="never").split()
    assert "flashattn_jit" in imported
    slow = [m for m in imported if any(m == s or m.startswith(f"{s}.") for s in SLOW)]
    assert not slow


def test_tracing_imports_nothing_slow_and_a_miss_imports_jinja_only(tmp_path: Path) -> None:
    imported = python(CALL, FLASHATTN_JIT_CACHE_DIR=str(tmp_path)).split()
    slow = {m for m in imported if any(m == s or m.startswith(f"{s}.") for s in SLOW)}
    assert {m.split(".")[0] for m in slow} <= {"jinja2"}


@pytest.mark.parametrize("program", ["python -m flashattn_jit", "flashattn-jit"])
def test_the_command_line_has_every_name_when_it_is_used(tmp_path: Path, program: str) -> None:
    """Nothing is imported at first; names, the extension and `dir()` then work as elsewhere."""
    code = (
        "import sys; import flashattn_jit as fa; from flashattn_jit import _C, env\n"
        "assert 'torch' not in sys.modules and 'flashattn_jit._C' not in sys.modules\n"
        "assert fa.deploy.__name__ == 'flashattn_jit.deploy' and not hasattr(fa, 'nothing')\n"
        "assert _C.ABI_VERSION > 0 and 'torch' in sys.modules and env.target() == ''\n"
        "for name in fa.__all__: getattr(fa, name)\n"
        "assert {'attention', 'Causal'} <= set(dir(fa))\n"
        "from flashattn_jit import *; assert attention is fa.attention\n"
        "import torch; torch.ops.flashattn_jit\n"
    )
    start = {
        "flashattn-jit": "import sys; sys.argv = ['/usr/bin/flashattn-jit']\n",
        "python -m flashattn_jit": "import sys; sys.argv = ['-m', '--help']\n"
        "sys.orig_argv = ['python', '-m', 'flashattn_jit', '--help']\n",
    }
    new_interpreter = [sys.executable, "-c", start[program] + code]
    done = subprocess.run(
        new_interpreter, env={**os.environ, "FLASHATTN_JIT_TARGET": ""}, cwd=sys.prefix,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_other_programs_import_the_ops_at_once() -> None:
    """Also programs run by `python -m`: an exported program uses the ops and none of our names."""
    names = ["attention", "varlen_attention"]
    for argv, original in ((["-m"], ["python", "-m", "service"]), (["serve.py"], []), ([], [])):
        code = (
            f"import sys; sys.argv = {argv}; sys.orig_argv = {original}\n"
            "import flashattn_jit, torch\n"
            f"assert set({names}) <= set(vars(flashattn_jit)), vars(flashattn_jit)\n"
            "assert 'flashattn_jit._C' in sys.modules\n"
        )
        python(code)
