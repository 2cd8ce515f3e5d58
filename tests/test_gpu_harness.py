"""The harness of the GPU tests, as far as it runs without a GPU: on CPU kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashattn_jit.codegen.spec import host_target
from tests.gpu import harness
from tests.gpu.harness import Want, case_named, compile_wanted, run_case
from tests.gpu.prewarm import compile_one
from tests.harness import processes
from tests.ops.cases import DECODE, SMALL, fitting
from tests.registry.case import Shape
from tests.registry.cases import CASES

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("case", CASES[::23], ids=lambda c: c.name)
def test_a_case_is_run_and_judged(case):
    run_case(case, fitting(case, SMALL), torch.bfloat16, "cpu", host_target())


def test_a_wrong_result_is_found(monkeypatch):
    right = harness.run_dense

    def wrong(*args, **named):
        out, lse = right(*args, **named)
        return out * 1.02, lse

    monkeypatch.setattr(harness, "run_dense", wrong)
    with pytest.raises(AssertionError, match="rms error"):
        run_case(case_named("plain causal"), SMALL, torch.bfloat16, "cpu", host_target())


def test_wanted_kernels_are_compiled_for_a_cpu_as_for_a_gpu():
    assert compile_wanted(Want("plain causal", DECODE, torch.bfloat16), host_target()).startswith(
        "few_row"
    )
    assert compile_one(Want("plain causal", SMALL, torch.bfloat16), host_target()) == ""


def test_what_does_not_compile_is_reported_and_does_not_end_the_run():
    text = compile_one(Want("no such case", Shape(1, 1, 1, 1, 1, 1, 1), torch.float16), "sm_80")
    assert "no such case" in text and "KeyError" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_all_gpu_tests_are_skipped_with_the_reason():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch sees no CUDA device" in done.stdout
    assert " passed" not in done.stdout and " failed" not in done.stdout


def test_gpu_tests_and_benchmark_need_no_other_packages():
    """A GPU machine has torch, numpy, jinja2, ninja, pybind11 and pytest, and no network."""
    absent = ("hypothesis", "matplotlib", "transformers", "platformdirs", "xdist", "pytest_timeout")
    files = sorted(p.stem for p in (ROOT / "tests" / "gpu").glob("*.py") if p.stem != "conftest")
    names = [f"tests.gpu.{n}" for n in files]
    names.append("benchmarks.gpu.__main__")
    code = f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\nimport {', '.join(names)}"
    done = processes.run(["-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
