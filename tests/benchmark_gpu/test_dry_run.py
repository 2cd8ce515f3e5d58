"""Each call of the GPU benchmark runs in the emulator, and nearly every line of it."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, smoke
from benchmarks.gpu.compute import METRICS, read_counters
from benchmarks.gpu.machine import Emulated
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

ROOT = Path(__file__).resolve().parents[2]


class Decode:
    """FlashInfer's wrapper, as far as the benchmark calls it: it checks what it is given."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self, indptr, indices, last, num_q_heads, num_kv_heads, head_dim, page, *, q_data_type,
        kv_data_type,
    ):  # fmt: skip
        assert {t.dtype for t in (indptr, indices, last)} == {torch.int32}
        assert len(indptr) == len(last) + 1 and int(indptr[-1]) == len(indices)
        self.heads = num_q_heads, num_kv_heads, head_dim, page

    def run(self, q, pages):
        for kept in pages:
            assert kept.shape[1:] == (self.heads[3], self.heads[1], self.heads[2])
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        return torch.empty_like(q)


def single_prefill_with_kv_cache(q, k, v, *, causal, backend):
    assert q.shape == k.shape == v.shape and q.is_contiguous() and backend == "fa2"
    return torch.empty_like(q)


@pytest.fixture
def peers_installed(tmp_path, monkeypatch):
    """Stand-ins for FlashInfer and for Nsight Compute, whose table it prints."""
    module: Any = types.ModuleType("flashinfer")
    module.__version__, module.__spec__ = "0.0", importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    names = "\n".join(f'"0","fajit_attention_kernel","{m}","%","1,234.5"' for m in METRICS)
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --query-metrics ] && exit 0\n'
        'while [ "$1" != -m ]; do last="$1"; shift; done\n"$last" "$@" || exit 1\n'
        f'cat <<END\n==PROF== done\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        f"{names}\nEND\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def test_counters_are_read_off_the_table():
    text = '==PROF== x\n"ID","Metric Name","Metric Value"\n"0","a","1,234.5"\n"0","b","7"\n'
    assert read_counters(text) == {"a": 1234.5, "b": 7.0}
    assert read_counters("no kernels were profiled") == {}


def functions_of(path: Path) -> dict[str, set[int]]:
    """The lines of the statements of each function, methods as Class.method."""
    found: dict[str, set[int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                lines = {
                    inner.lineno
                    for statement in child.body
                    for inner in ast.walk(statement)
                    if isinstance(inner, ast.stmt)
                    and not (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant))
                    and not isinstance(inner, ast.Try | ast.ImportFrom | ast.FunctionDef)
                }
                found[prefix + child.name] = lines

    visit(ast.parse(path.read_text()), "")
    return found


class Tracer:
    """The lines of benchmarks/gpu that this process executes, in all threads."""

    FOLDER = str(ROOT / "benchmarks" / "gpu")

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = {}

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines.setdefault(Path(frame.f_code.co_filename).name, set()).add(frame.f_lineno)
        return self._line

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(self.FOLDER) else None

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)
        threading.settrace(None)  # type: ignore[arg-type]


ONLY_ON_GPUS = {"rates.py": ("OnGpu.", "build"), "kernels.py": ("plan_kernels",)}
"""Functions that other tests here execute."""
ALLOWED = {
    "checks.py": {"_smoked": 2, "print_smoke": 1, "smoke_rows": 1},
    "compute.py": {
        "profiled_call": 4, "against": 1, "counter_rows": 4, "prefill_shapes": 2,
    },
    "kernels.py": {"kernel_words": 1},
    "memory.py": {"rows_of_tests": 3, "split_rows": 1},
    "peers.py": {"flashinfer_version": 4, "flashinfer_prefill": 1, "flashinfer_decode": 3},
    "rates.py": {"Rates.run": 1},
    "batch.py": {},
}  # fmt: skip
"""Statements of a function that a dry run may leave out: failures, missing peers, predictions, and
those that run in other processes."""


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.usefixtures("peers_installed")
@pytest.mark.parametrize("name", command.CALLS)
def test_each_call_runs_in_the_emulator(name, folder, tmp_path, monkeypatch, capsys):
    tried = rotation.some(list(smoke.SMOKE), 3)
    monkeypatch.setattr(checks, "SMOKE", {n: smoke.SMOKE[n] for n in tried})
    given = [
        name,
        str(folder),
        "--pairs",
        "2",
        "--out",
        str(tmp_path),
        "--dry-run",
        "--limit",
        "inf",
    ]
    with Tracer() as traced:
        status = command.call(name, Emulated(), command.arguments(given))
    shown = capsys.readouterr().out
    assert status == 0, shown
    (path,) = tmp_path.glob("dry-run-*.json")
    written = json.loads(path.read_text())[f"gpu {name}"]
    assert written["pack"] == {"commit": "abc"} and len(written["rows"]) >= 10
    missed = []
    for file in {"check": ("checks.py", "rates.py"), "compute": ("compute.py", "kernels.py"),
                 "memory": ("memory.py", "batch.py")}[name]:  # fmt: skip
        executed = traced.lines.get(file, set())
        for function, lines in functions_of(ROOT / "benchmarks" / "gpu" / file).items():
            if function.startswith(ONLY_ON_GPUS.get(file, ("-",))):
                continue
            left = lines - executed
            if len(left) > ALLOWED[file].get(function, 0):
                missed.append(f"{file}: {function}: lines {sorted(left)}")
    assert not missed, "\n".join(missed)


@needs_nvcc
def test_copies_are_measured_in_turn(tmp_path: Path) -> None:
    """This checkout twice: as it is, and with a tile that its kernels do not have."""
    case = "D128 S1024 ALiBi"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.steps", "--dry-run", "--case", case, "--turns", "1",
         "--out", str(tmp_path), ".", ".:64x64"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = tmp_path.glob("dry-run-steps-*.json")
    rows = {r["claim"]: r for r in json.loads(result.read_text())["gpu steps"]["rows"]}
    assert rows[f"{case}, ."]["measured"] == 1.0 and "TFLOP/s; " in rows[f"{case}, ."]["detail"]
    assert "CompileError" in rows[f"{case}, .:64x64: FAILED"]["detail"]
