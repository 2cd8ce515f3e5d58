"""Warming: which kernels are built, progress, and clean-up when it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen import targets
from flashattn_jit.codegen.document import line_of
from flashattn_jit.codegen.spec import UtilitySpec, host_target
from flashattn_jit.codegen.targets import CPU_TARGETS, CUDA_TARGETS, called_target, compiled_here
from flashattn_jit.deploy.manifest.file import write_manifest
from flashattn_jit.deploy.manifest.library import library_lines
from flashattn_jit.deploy.wanted import structures
from flashattn_jit.deploy.wanted.arguments import parse_targets
from flashattn_jit.deploy.wanted.specs import wanted_specs
from flashattn_jit.deploy.warm import pool, worker
from flashattn_jit.deploy.warm.progress import WarmEvent
from flashattn_jit.deploy.warm.warm import warm
from flashattn_jit.deploy.warm.worker import end_session
from flashattn_jit.errors import (
    InputError,
    ManifestError,
    ParamError,
    TargetError,
    WarmError,
)
from flashattn_jit.jit.cache.misses import build_command
from flashattn_jit.jit.module import default
from flashattn_jit.planner.reachable import FORMATS
from flashattn_jit.planner.tiles import build_request

TARGET = "cpu:generic"
HERE = {"head_dims": 16, "dtypes": "fp32", "formats": ["dense"], "targets": TARGET}
"""Two kernels that compile fast and run on this machine."""

BAD = fa.variant(score_mod=fa.cpp("this is no C++"), name="bad")


# --- what is wanted ------------------------------------------------------------------------------


def test_every_kernel_that_calls_ask_for_is_among_the_wanted() -> None:
    """The IR of a variant without a call equals the IR of its calls."""
    slopes = torch.rand(4)
    variants = {
        "ALiBi": (fa.ALiBi(), {}),
        "captured": (fa.variant(score_mod=lambda s, b, h, i, j: s * slopes[h]), {}),
        "rope": (fa.RoPE(), {}),
        "documents": (fa.DocumentMask(), {"documents": torch.zeros(1, 8, dtype=torch.int32)}),
    }
    default.forget()
    for chosen, params in variants.values():
        q, k, v = torch.randn(3, 1, 4, 8, 16)
        fa.attention(q, k, v, chosen, target=TARGET, **params)
        stand_ins = {name: torch.zeros(3, 5, dtype=p.dtype) for name, p in params.items()}
        specs = wanted_specs(chosen, params=stand_ins, **HERE)
        asked = {loaded.request.spec for loaded in default.loaded()}
        assert len(specs) == 2
        assert asked & {spec.document() for spec in specs}, chosen.name


def test_appends_with_a_transform_are_a_format() -> None:
    default.forget()
    paged = fa.Paged(torch.tensor([0, 1]), torch.tensor([0]).int(), torch.tensor([2]), 4)
    k, cache = torch.randn(2, 3, 16), torch.zeros(2, 1, 4, 3, 16)
    variant = fa.QKNorm() & fa.RoPE() & fa.SlidingWindow(4)
    append = fa.plan_append(torch.tensor([0, 2]), paged, transform=variant, target=TARGET)
    append.run(k, k, *cache)
    (spec,) = wanted_specs(variant, **{**HERE, "formats": ["append"]})
    assert spec.document() in {loaded.request.spec for loaded in default.loaded()}
    every = wanted_specs(variant, **{**HERE, "formats": None})
    assert [s for s in every if s.tile_kind == "append"] == [spec]
    with pytest.raises(InputError, match="no calls of Causal are append"):
        wanted_specs("Causal", **{**HERE, "formats": ["append"]})
    (codes,) = wanted_specs(variant, **{**HERE, "dtypes": "fp32/fp8/int8", "formats": ["append"]})
    assert (codes.q_dtype, codes.k_dtype, codes.v_dtype) == ("float32", "float8_e4m3fn", "int8")
    on_cuda = {"dtypes": "fp16/fp8/int8", "targets": "sm_75", "formats": ["append"]}
    specs = wanted_specs(variant, **{**HERE, **on_cuda})
    (codes,) = (s for s in specs if not isinstance(s, UtilitySpec))
    assert (codes.q_dtype, codes.k_dtype, codes.v_dtype) == ("float16", "float8_e4m3fn", "int8")


def test_targets_dtypes_and_dims_multiply() -> None:
    specs = wanted_specs(
        ["Causal", fa.Full()], head_dims=(64, "128/64"), dtypes=("bf16", torch.float32),
        targets="all", formats=["dense"],
    )  # fmt: skip
    kernels = [s for s in specs if not isinstance(s, UtilitySpec)]
    utilities = [s for s in specs if isinstance(s, UtilitySpec)]
    assert {called_target(s.target) for s in specs} == {
        *filter(compiled_here, CPU_TARGETS),
        *CUDA_TARGETS,
    } - {"sm_75"}
    assert {s.q_dtype for s in kernels if s.target == "sm_90"} == {"bfloat16"}
    assert {(s.head_dim, s.head_dim_v) for s in kernels} == {(64, 64), (128, 64)}
    assert {s.name for s in kernels} == {"Causal", "Full"}
    assert {s.kernel for s in utilities} == {"merge_states", "append_paged_kv"}
    assert len({s.document() for s in specs}) == len(specs)


def test_a_path_is_one_manifest_even_if_it_can_be_iterated_over(tmp_path: Path) -> None:
    class Parts(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "m.jsonl")

        def __iter__(self) -> Iterator[str]:
            return iter(Path(self).parts)

    lines = [line_of(UtilitySpec("append_paged_kv", "sm_90", 4))]
    write_manifest(Parts(), lines)
    assert wanted_specs(Parts()) == [line.spec for line in lines]


def test_a_manifest_stands_for_other_lengths_and_targets() -> None:
    (one, *_) = wanted_specs("Causal", **HERE)
    line = line_of(one)
    assert len(wanted_specs(line)) == 2, "prefill and few-row"
    moved = wanted_specs([line], targets=("cpu:avx2", "cpu:generic"))
    assert {s.target for s in moved} == {"cpu:avx2", "cpu:generic"}


def test_groups_of_targets_are_built_as_far_as_compilers_of_this_machine_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "machine", lambda: "aarch64")
    for group, built in (("cpu", ["cpu:generic"]), ("all", ["cpu:generic", *CUDA_TARGETS])):
        assert parse_targets(group, to_build=True) == tuple(built)
        specs = wanted_specs("Causal", **{**HERE, "dtypes": "fp16", "targets": group})
        assert {spec.target for spec in specs} == {*built}
        lines = library_lines(head_dims=8, dtypes="fp16", targets=group)
        assert {line.spec.target for line in lines} == {*built}
    assert parse_targets("cpu") == CPU_TARGETS
    assert parse_targets("all") == (*CPU_TARGETS, *CUDA_TARGETS)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: warm("Causal"), InputError, "need head_dims= and dtypes="),
        (lambda: warm("Causal", head_dims=64), InputError, "need dtypes=, such as dtypes='bf16'"),
        (
            lambda: warm("Causal", dtypes="bf16"),
            InputError,
            "need head_dims=, such as",
        ),
        (lambda: warm("Cosal", **HERE), InputError, "no file and no variant"),
        (lambda: warm("none.jsonl"), ManifestError, "none.jsonl"),
        (
            lambda: warm("Causal", **{**HERE, "targets": "sm_1"}),
            TargetError,
            "unknown target 'sm_1'",
        ),
        (lambda: warm("Causal", **HERE, jobs=0), InputError, "jobs must be an int of at least 1"),
        (lambda: warm("Causal", **HERE, jobs="2"), InputError, "at least 1, got '2'"),
        (
            lambda: warm("Causal", **HERE, num_q_heads="8", num_kv_heads=2),
            InputError,
            "num_q_heads must be an int, got str",
        ),
        (lambda: warm("Causal", **{**HERE, "targets": "sm_90"}), InputError, "none of the targets"),
        (lambda: warm("Causal", head_dims=16, dtypes="int8"), InputError, "int8"),
        (lambda: warm("Causal", head_dims="a/b", dtypes="fp32"), InputError, "'a/b'"),
        (lambda: warm("Causal", head_dims=64.0, dtypes="fp32"), InputError, "'64.0' is no head"),
        (lambda: warm("Causal", head_dims=[64.5], dtypes="fp32"), InputError, "'64.5' is no head"),
        (lambda: warm("DocumentMask", **HERE), ParamError, r"params={'documents': torch.empty"),
        (lambda: warm("Causal", **HERE, params={"cap": 1.0}), ParamError, "'cap'"),
        (lambda: warm("Causal", **HERE, num_q_heads=4), InputError, "both"),
        (
            lambda: warm("Causal", **HERE, num_q_heads=8, num_kv_heads=3),
            InputError,
            "num_kv_heads=3 does not divide num_q_heads=8",
        ),
        (lambda: warm("Causal", head_dims=577, dtypes="fp32"), InputError, "are 1 to 576"),
        (lambda: warm([], head_dims=16), InputError, "are for variants"),
        (lambda: warm("Causal", **{**HERE, "formats": ["max_scores"]}), InputError, "no calls of"),
        (lambda: warm("Cosal", **HERE), InputError, "QKNorm, .*RoPE"),
        (lambda: warm("Natten", **HERE), InputError, "Natten needs arguments"),
        (
            lambda: warm(wanted_specs("Causal", **HERE), targets="sm_90"),
            InputError,
            "none of the targets sm_90 has kernels for the dtypes and head dims that were recorded",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    call: Callable[[], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        call()
    assert not (tmp_path / "cache").exists()


def test_a_kernel_that_depends_on_the_head_count_asks_for_it() -> None:
    class PerHeads(fa.Variant):
        table: torch.Tensor = fa.tensor(
            "num_q_heads", 2,
            default=lambda d: torch.ones(d.num_q_heads, 2)
            if d.num_q_heads > 20 else torch.ones(2, d.num_q_heads).t(),
        )  # fmt: skip

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.table[h, 1]

    with pytest.raises(InputError, match="give num_q_heads= and num_kv_heads="):
        structures.bound_for(PerHeads(), (16, 16), None, {})
    few = structures.bound_for(PerHeads(), (16, 16), (8, 8), {}).ir
    assert few != structures.bound_for(PerHeads(), (16, 16), (32, 8), {}).ir


def test_defaults_may_depend_on_any_size() -> None:
    class PerLength(fa.Variant):
        bias: torch.Tensor = fa.tensor(
            "batch", "kv_len", default=lambda d: torch.zeros(d.batch, d.kv_len)
        )

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.bias[b, kv_idx]

    assert structures.bound_for(PerLength(), (16, 16), None, {}).ir.tensors[0].dtype == "float32"


def test_a_plan_asks_for_kernels_before_runs_bring_their_params() -> None:
    class Biased(fa.Variant):
        bias: torch.Tensor = fa.tensor("batch", "kv_len")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.bias[b, kv_idx]

    q, k, v = torch.randn(3, 4, 2, 16)
    bias = torch.randn(1, 4, dtype=torch.bfloat16)
    default.forget()
    batch = fa.BatchAttention(
        Biased(), num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=q.dtype, target=TARGET
    )
    indptr = torch.tensor([0, 4], dtype=torch.int32)
    batch.plan(indptr, fa.Ragged(indptr))
    batch.run(q, k, v, bias=bias)
    batch.plan(indptr, fa.Ragged(indptr))
    asked = {loaded.request.spec for loaded in default.loaded()}
    given = {"bias": bias.expand(3, 4)}
    for params, of in (({"bias": bias}, asked), (given, set())):
        specs = wanted_specs(Biased(), params=params, **{**HERE, "formats": ["ragged"]})
        assert {s.variant.tensors[0].dtype for s in specs} == {"float32", "bfloat16"}
        assert of <= {spec.document() for spec in specs}
    dense = wanted_specs(Biased(), params={"bias": bias}, **HERE)
    assert {s.variant.tensors[0].dtype for s in dense} == {"bfloat16"}


def test_row_maxima_are_wanted_with_values_in_the_dtype_of_queries() -> None:
    sizes = {**HERE, "dtypes": "bf16/float8_e4m3fn", "formats": ["max_scores"]}
    for chosen in (fa.Full(), fa.variant(score_mod=lambda s, b, h, i, j: 2.0 * s)):
        specs = wanted_specs(chosen, **sizes)
        assert {(s.q_dtype, s.k_dtype, s.v_dtype) for s in specs} == {
            ("bfloat16", "float8_e4m3fn", "bfloat16")
        }
        assert {s.head_dim_v for s in specs} == {1}


@pytest.mark.parametrize("name", structures.library_names())
def test_every_name_of_the_library_is_known(name: str) -> None:
    try:
        assert structures.parse_variant(name) is not None
    except InputError as error:
        assert "needs arguments" in str(error)


# --- what is built -------------------------------------------------------------------------------


def test_warming_then_never_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    report = warm("Causal", **HERE)
    assert [r.built for r in report.results] == [True, True]
    assert report.jobs == min(2, len(os.sched_getaffinity(0)))
    assert 0 < max(r.compile_s for r in report.results) < report.compile_s
    assert "2 compiled" in str(report)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\[1/2\] Causal: .* d16 fp32 for cpu:.*: compiled in .* s", lines[0])
    assert len(lines) == 2

    again = warm("Causal", **HERE, progress=False)
    assert [r.layer for r in again.results] == ["user", "user"]
    assert [r.key for r in again.results] == [r.key for r in report.results]

    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    default.forget()
    for rows in (1, 64):
        q, k, v = torch.randn(3, 1, 2, rows, 16)
        fa.attention(q, k, v, fa.Causal(), target=TARGET)
    assert default.last_source == "disk"
    with pytest.raises(WarmError, match="forbids to compile") as caught:
        warm("Full", **HERE)
    assert [r.error_type for r in caught.value.report.failures] == ["MissingKernelError"] * 2


def test_every_format_is_wanted_by_default() -> None:
    sizes = {**HERE, "formats": None}
    wanted = {spec.document() for spec in wanted_specs("Causal", **sizes)}
    found = set()
    for name in FORMATS:
        with contextlib.suppress(InputError):  # calls that this variant has not
            found |= {s.document() for s in wanted_specs("Causal", **{**HERE, "formats": [name]})}
    assert found == wanted


def test_names_that_calls_accept_are_built() -> None:
    name = "is it causal? " + "long " * 50
    chosen = fa.variant(mask_mod=lambda b, h, i, j: i >= j, name=name)
    report = warm(chosen, **HERE, jobs=1)
    assert [r.built for r in report.results] == [True, True]
    spec = wanted_specs(chosen, **HERE)[0]
    request = build_request(spec)
    assert "flashattn-jit warm" in build_command(request.spec, request.name)


def test_an_unreadable_task_is_a_result() -> None:
    result = worker.build(worker.make_task("{}", "name", ship=False))
    assert result["error_type"] == "ManifestError"


def test_one_that_fails_does_not_stop_the_others() -> None:
    events: list[WarmEvent] = []
    report = warm([BAD, "Causal"], **HERE, strict=False, progress=events.append, jobs=1)
    assert [(r.name, r.failed) for r in report.results] == [
        ("Causal", False), ("Causal", False), ("bad", True), ("bad", True)]  # fmt: skip
    failure = report.failures[0]
    assert failure.error_type == "CompileError"
    assert "error" in Path(failure.log_path).read_text()
    with pytest.raises(WarmError, match="2 of 4 kernels failed") as caught:
        report.raise_for_failures()
    assert caught.value.report is report
    finished = [e for e in events if e.finished]
    assert [e.done for e in finished] == [1, 2, 3, 4]
    assert {e.total for e in events} == {4}
    assert any(len(e.compiling) == 1 and " d16 fp32" in e.compiling[0] for e in events)


@pytest.mark.parametrize("target", ["sm_90", host_target()])
def test_without_a_compiler_it_says_what_to_install(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "no-such-compiler")
    begin = time.perf_counter()
    with pytest.raises(WarmError) as caught:
        warm("Causal", head_dims=16, dtypes="fp16", targets=target, formats=["dense"])
    assert time.perf_counter() - begin < 5, "no worker was started"
    words = str(caught.value)
    remedy = "flashattn-jit unpack" if target == "sm_90" else "install g\\+\\+"
    assert re.search(remedy, words)
    assert words.count("pip install") <= 1 and words.count("was found") == 1, (
        "said once, not for every kernel"
    )
    if target == "sm_90":
        assert "pip install nvidia-cuda-nvcc" in words


def test_a_worker_that_dies_fails_its_kernel_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that kills the process above it, once."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *kernel.cpp*) if mkdir {tmp_path}/once 2>/dev/null; then\n'
        "  session=$(ps -o sid= -p $$ | tr -d ' '); kill -9 $session; sleep 60; fi;; esac\n"
        'exec /usr/bin/c++ "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("FLASHATTN_JIT_CXX", str(compiler))
    report = warm("Causal", **HERE, jobs=1, strict=False, progress=False)
    failed = [r for r in report.results if r.failed]
    assert len(failed) == 1
    assert "died (signal 9)" in failed[0].error
    assert "take fewer jobs" in failed[0].error


# --- how it is stopped ---------------------------------------------------------------------------


def session_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def marked(mark: str) -> list[int]:
    """The processes whose environment holds a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in folder.joinpath("environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_it_leaves_no_process_behind(how: signal.Signals, tmp_path: Path) -> None:
    """SIGINT or SIGKILL of the parent, with compilers that would run for a minute."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *kernel.cpp*) touch {tmp_path}/compiling; sleep 60;; esac\n'
        'exec /usr/bin/c++ "$@"\n'
    )
    compiler.chmod(0o700)
    mark = f"WARM_TEST={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-c",
         # Processes started from a shell's background job ignore SIGINT.
         "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
         "from flashattn_jit.deploy.warm.warm import warm\n"
         "warm('Causal', head_dims=16, dtypes='fp32', formats=['dense'], targets='cpu:generic',"
         "     jobs=2)"],
        env={**os.environ, "FLASHATTN_JIT_CXX": str(compiler), "WARM_TEST": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    until(lambda: (tmp_path / "compiling").exists())
    assert len(marked(mark)) >= 3, "the parent, a worker and its compiler"
    process.send_signal(how)
    _, words = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in words
        assert marked(mark) == [], "all are gone before the error is passed on"
        assert list((tmp_path / "cache" / "v1" / ".staging").iterdir()) == []
    until(lambda: marked(mark) == [])


def test_a_process_forked_while_the_session_is_read_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell forks after the first listing of /proc and before it is killed."""
    wait = f"while [ ! -e {tmp_path}/fork ]; do sleep 0.01; done; "
    process = subprocess.Popen(
        ["/bin/sh", "-c", wait + f"sleep 300 & touch {tmp_path}/forked; wait"],
        env={"PATH": os.environ["PATH"], "WARM_TEST": str(tmp_path)},
        start_new_session=True,
    )
    listed = Path.glob

    def list_then_fork(self: Path, pattern: str) -> list[Path]:
        found = list(listed(self, pattern))
        (tmp_path / "fork").touch()
        until(lambda: (tmp_path / "forked").exists())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", list_then_fork)
        end_session(process.pid)
    assert process.wait(10) == -signal.SIGKILL
    assert marked(f"WARM_TEST={tmp_path}") == []


def test_a_worker_begins_nothing_for_a_process_that_is_gone() -> None:
    """The task arrives and the parent ends while the worker still imports modules."""
    process = subprocess.Popen(
        [sys.executable, "-c", pool._START, json.dumps(sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    replies, _ = process.communicate("{}\n", timeout=60)
    assert (replies, process.returncode) == ("", 0)


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- what is shown -------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_that_names_what_compiles(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    import pty

    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c",
         "from flashattn_jit.deploy.warm.warm import warm\n"
         "warm('Causal', head_dims=16, dtypes='fp32', formats=['dense'], targets='cpu:generic',"
         "     jobs=1)"],
        stderr=secondary,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    )  # fmt: skip
    os.close(secondary)
    shown = b""
    with contextlib.suppress(OSError):  # EIO when the last process has closed the terminal
        while piece := os.read(primary, 65536):
            shown += piece
    os.close(primary)
    assert process.wait(60) == 0
    assert b"Causal " in shown
    assert b" d16 fp32 cpu:" in shown
    assert b"2/2" in shown


def test_workers_do_not_import_the_main_module(tmp_path: Path) -> None:
    """A script that warms at its top level, without `if __name__ == ...`."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('main', flush=True)\n"
        "import flashattn_jit as fa\n"
        "r = fa.warm('Full', head_dims=8, dtypes='fp32', formats=['dense'], "
        "targets='cpu:generic', progress=False)\n"
        "print(len(r.built), 'built')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["main", "2 built"]
    assert done.stderr == ""


def test_the_pool_of_processes_takes_builds_alone() -> None:
    with pool.WorkerPool(1) as workers:
        for wrong in [(print, "task"), (worker.build,), (worker.build, "task", 1)]:
            with pytest.raises(TypeError, match=r"worker\.build\(task\) alone"):
                workers.submit(*wrong)
        with pytest.raises(TypeError, match="alone"):
            workers.submit(worker.build, task="task")
