"""`fa.record_manifest` records the kernels that ran, in any thread or forked process, sorted."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.deploy.manifest import recording
from flashattn_jit.deploy.manifest.file import read_manifest
from flashattn_jit.errors import ManifestError
from flashattn_jit.jit.module import KernelCache, Loaded
from flashattn_jit.ops.launching import launches
from flashattn_jit.ops.planning import batch_plan
from flashattn_jit.planner.reachable import reachable
from flashattn_jit.planner.tiles import build_request
from flashattn_jit.variants.params import Dims
from tests.harness import processes
from tests.planner.asked import Asked, nothing_module

ROWS = 50


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CPU artifact whose kernels do nothing, which stands in for every kernel."""
    return nothing_module(tmp_path_factory.mktemp("nothing")).path


@pytest.fixture(autouse=True)
def cache(artifact: str, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The process' kernel cache, which loads the artifact for each kernel request."""
    made = KernelCache()

    def load_stepping(requests):
        module = made._modules.get(requests[0].spec)
        if module is None:
            module = made._modules[requests[0].spec] = _C.Module(artifact)
            made._asked[requests[0].spec] = Loaded(requests[0], module)
        return 0, module

    forget()
    monkeypatch.setattr(batch_plan, "load_stepping", load_stepping)
    monkeypatch.setattr(recording, "default", made)
    yield made
    forget()


def forget() -> None:
    """Forgets launches and kernels of dense and packed calls."""
    launches.forget_launches()
    launches._kernels.clear()


def call(variant: object, rows: int = ROWS) -> None:
    q, k, v = (torch.zeros(1, 2, n, 16) for n in (rows, ROWS, ROWS))
    fa.attention(q, k, v, variant)


def recorded(path: Path) -> list[tuple[str, str]]:
    lines = read_manifest(path)
    return [(x.name, x.spec.tile_kind) for x in lines if isinstance(x.spec, KernelSpec)]


def test_what_ran_in_the_block_is_written(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    call(fa.Full())
    with fa.record_manifest(path):
        call(fa.Causal())
        call(fa.Causal(), rows=1)
    assert recorded(path) == [("Causal", "few_row"), ("Causal", "prefill")]


def test_kernels_and_plans_from_before_count_when_they_run_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    call(fa.Causal())
    call(fa.ALiBi())
    with fa.record_manifest(path):
        call(fa.Causal())
    assert recorded(path) == [("Causal", "prefill")]
    with fa.record_manifest(path):
        pass
    assert recorded(path) == [("Causal", "prefill")]


class Biased(fa.Variant):
    """A variant with a param that is given to run(), of a dtype that plan() cannot see."""

    bias: torch.Tensor = fa.tensor("num_q_heads")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        """``score + bias[h]``."""
        return score + self.bias[h]


def test_what_is_planned_counts_as_run(tmp_path: Path) -> None:
    asked: list[str] = []
    load = batch_plan.load_stepping

    def batch(run: bool = True) -> None:
        made = fa.BatchAttention(
            Biased(), num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=torch.float32
        )
        made.plan(torch.tensor([0, ROWS]), fa.Ragged(torch.tensor([0, ROWS])))
        if run:
            q, k, v = (torch.zeros(ROWS, 2, 16) for _ in range(3))
            made.run(q, k, v, bias=torch.zeros(2, dtype=torch.bfloat16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_plan, "load_stepping",
            lambda requests: (asked.append(requests[0].spec), load(requests))[1],
        )  # fmt: skip
        with fa.record_manifest(tmp_path / "ran"):
            batch()
    documents = {x.document for x in read_manifest(tmp_path / "ran")}
    assert len(documents) == 2 and documents == set(asked)
    with fa.record_manifest(tmp_path / "planned"):
        batch(run=False)
    assert [x.document for x in read_manifest(tmp_path / "planned")] == asked[:1]


def test_nothing_ran(tmp_path: Path) -> None:
    with fa.record_manifest(tmp_path / "m"):
        pass
    assert (tmp_path / "m").read_bytes() == b""


def test_a_line_is_what_was_asked_for(tmp_path: Path) -> None:
    with fa.record_manifest(tmp_path / "m"):
        call(fa.SlidingWindow(4))
    (line,) = read_manifest(tmp_path / "m")
    ir = fa.SlidingWindow(4).bind(Dims(1, 2, 2, ROWS, ROWS, 16, 16), {}).ir
    assert isinstance(line.spec, KernelSpec)
    specs = reachable(ir, (16, 16), ("float32",) * 3, line.spec.target)
    assert line.spec.document() in {s.document() for s in specs}


def test_the_same_work_leaves_the_same_file(tmp_path: Path) -> None:
    def work(path: Path, variants: list[object]) -> bytes:
        with fa.record_manifest(path):
            for variant in variants:
                call(variant)
        return path.read_bytes()

    variants = [fa.Causal(), fa.ALiBi(), fa.Full(), fa.SlidingWindow(3)]
    first = work(tmp_path / "a", variants)
    assert first and work(tmp_path / "a", variants) == first
    assert work(tmp_path / "b", variants[::-1]) == first
    work(tmp_path / "c", variants[:2])
    assert work(tmp_path / "c", variants[2:]) == first


def test_blocks_nest(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    with fa.record_manifest(outer):
        call(fa.Causal())
        with fa.record_manifest(inner):
            call(fa.ALiBi())
        call(fa.Full())
    assert [name for name, _ in recorded(inner)] == ["ALiBi"]
    assert [name for name, _ in recorded(outer)] == ["ALiBi", "Causal", "Full"]


def test_threads_share_a_block_and_may_have_their_own(tmp_path: Path) -> None:
    def own(number: int, variant: object) -> None:
        with fa.record_manifest(tmp_path / f"{number}"):
            call(variant)

    variants = [fa.Causal(), fa.ALiBi(), fa.Full()]
    with fa.record_manifest(tmp_path / "all"):
        threads = [threading.Thread(target=own, args=x) for x in enumerate(variants)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = {"Causal", "ALiBi", "Full"}
    assert {name for name, _ in recorded(tmp_path / "all")} == names
    for number, variant in enumerate(variants):
        assert variant.name in {name for name, _ in recorded(tmp_path / f"{number}")}


def test_an_error_is_passed_on_after_writing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), fa.record_manifest(tmp_path / "m"):
        call(fa.Causal())
        raise ZeroDivisionError
    assert recorded(tmp_path / "m") == [("Causal", "prefill")]
    with pytest.raises(KeyboardInterrupt), fa.record_manifest(tmp_path / "m"):
        call(fa.ALiBi())
        raise KeyboardInterrupt
    assert len(recorded(tmp_path / "m")) == 2


def test_what_cannot_be_written_shows_at_once(tmp_path: Path) -> None:
    ran = []
    (tmp_path / "other").write_text("something else\n")
    for path in (tmp_path / "missing" / "m", tmp_path, tmp_path / "other"):
        with pytest.raises(ManifestError), fa.record_manifest(path):
            ran.append(path)
    assert not ran and (tmp_path / "other").read_text() == "something else\n"


def test_an_error_at_the_end_does_not_hide_the_blocks_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "m"
    with pytest.raises(ZeroDivisionError), fa.record_manifest(path):
        (tmp_path / "folder").rmdir()
        raise ZeroDivisionError
    assert "what ran is not recorded" in caplog.text
    (tmp_path / "folder").mkdir()
    with pytest.raises(ManifestError, match="cannot be written"), fa.record_manifest(path):
        (tmp_path / "folder").rmdir()


def test_a_forked_child_that_leaves_the_block_writes(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    pid = None
    try:
        with fa.record_manifest(tmp_path / "m"):
            call(fa.Causal())
            pid = os.fork()
            if pid == 0:
                call(fa.ALiBi())
        if pid == 0:
            os._exit(0)
    finally:
        if pid == 0:
            os._exit(1)
        torch.set_num_threads(threads)
    assert os.waitpid(pid, 0)[1] == 0
    assert [name for name, _ in recorded(tmp_path / "m")] == ["ALiBi", "Causal"]


def test_fallbacks_are_recorded_as_they_were_asked_for(cache: KernelCache, artifact: str) -> None:
    ir = fa.Causal().bind(Dims(1, 2, 2, 8, 8, 64, 64), {}).ir
    spec = reachable(ir, (64, 64), ("float16",) * 3, "sm_80")[0]
    asked = Asked(_C.Module(artifact))
    asked([build_request(spec)])
    cache._asked[spec.document()] = Loaded(asked.requests[0], asked._module)
    assert recording.ran_since(0)[0].document == spec.document()
    assert recording.ran_since(_C.begin_run_epoch()) == ()


# --- real processes -------------------------------------------------------------------------------

PROCESS = """
import multiprocessing, os, sys, torch
import flashattn_jit as fa

torch.set_num_threads(1)
q, k, v = (torch.zeros(1, 2, 50, 16) for _ in range(3))


def child():
    fa.attention(q[:, :, :1], k, v, fa.Causal())


if __name__ == "__main__":
    fa.attention(q, k, v, fa.Causal())
    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join()
    pid = os.fork()
    if pid == 0:
        fa.attention(q[:, :, :1], k, v)
        sys.exit()
    os.waitpid(pid, 0)
    {end}
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.run(["-c", code], env={**os.environ, **environment}, timeout=300)


def test_a_variable_records_the_life_of_a_process_and_its_children(
    tmp_path: Path, warm_cache: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    # New interpreters with two hash seeds: the file does not depend on the order of a set.
    for path, end, seed in zip(paths, ("pass", "raise SystemExit(3)"), "12", strict=True):
        done = run(
            PROCESS.replace("{end}", end), FLASHATTN_JIT_RECORD=str(path),
            FLASHATTN_JIT_CACHE_DIR=warm_cache, PYTHONHASHSEED=seed,
        )  # fmt: skip
        assert done.returncode in (0, 3), done.stderr
        assert recorded(path) == [
            ("Causal", "few_row"), ("Causal", "prefill"), ("Full", "few_row"),
        ]  # fmt: skip
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_path_that_cannot_be_written_is_said_at_import_and_stops_nothing(tmp_path: Path) -> None:
    done = run("import flashattn_jit", FLASHATTN_JIT_RECORD=str(tmp_path / "no" / "m"))
    assert done.returncode == 0, done.stderr
    assert "nothing is recorded" in done.stderr and "cannot be written" in done.stderr


def test_a_process_without_calls_writes_nothing_and_imports_nothing(tmp_path: Path) -> None:
    done = run("import flashattn_jit", FLASHATTN_JIT_RECORD=str(tmp_path / "m"))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("m*"))
    code = "import sys, flashattn_jit; print('flashattn_jit.deploy' in sys.modules)"
    assert run(code).stdout.strip() == "False"


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cache of the test run if it has one, so that kernels are compiled once."""
    return os.environ.get("FLASHATTN_JIT_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
