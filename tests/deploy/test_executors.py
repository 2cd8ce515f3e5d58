"""Warming in executors of the caller's: entries come back, failures are results."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from flashattn_jit.deploy.wanted.specs import wanted_specs
from flashattn_jit.deploy.warm import worker
from flashattn_jit.deploy.warm.ray_executor import RayExecutor
from flashattn_jit.deploy.warm.warm import warm
from flashattn_jit.jit.cache.store import Store
from tests.deploy.test_warm import BAD, HERE


def _elsewhere(cache: str) -> None:
    os.environ["FLASHATTN_JIT_CACHE_DIR"] = cache


@pytest.fixture
def environment() -> Iterator[None]:
    """Restores the variables of the environment: Dask sets OMP_NUM_THREADS and others for good."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_workers_with_another_cache_send_their_entries(tmp_path: Path) -> None:
    other = tmp_path / "other"
    pool = ProcessPoolExecutor(1, get_context("spawn"), _elsewhere, (str(other),))
    with pool:
        report = warm("Causal", **HERE, executor=pool, progress=False)
        assert report.jobs == 0
        assert [r.built for r in report.results] == [True, True]
        failed = warm(BAD, **HERE, executor=pool, progress=False, strict=False).failures
    assert len(failed) == 2
    assert "error" in Path(failed[0].log_path).read_text(), "the log came along"
    assert Path(failed[0].log_path).is_relative_to(tmp_path / "cache")
    here, there = Store(tmp_path / "cache"), Store(other)
    assert {e.key for e in here.entries()} == {r.key for r in report.results}
    for entry in here.entries():
        here.verify(entry.path)
        assert there.verify(there.base / entry.path.relative_to(here.base)).meta == entry.meta
    again = warm("Causal", **HERE, progress=False)
    assert [r.layer for r in again.results] == ["user", "user"]


@pytest.mark.usefixtures("environment")
def test_a_dask_cluster_serves(tmp_path: Path) -> None:
    """Two workers with a cache each; one cache comes back."""
    dask = pytest.importorskip("distributed", reason="Dask is not installed")
    with (
        dask.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        dask.Client(cluster) as client,
    ):
        for number, address in enumerate(client.scheduler_info()["workers"]):
            client.run(_elsewhere, str(tmp_path / f"worker{number}"), workers=[address])
        report = warm("Causal", **HERE, executor=client.get_executor(), progress=False)
    assert [r.built for r in report.results] == [True, True]
    here = Store(tmp_path / "cache")
    assert {e.key for e in here.entries()} == {r.key for r in report.results}
    there = [e.key for n in range(2) for e in Store(tmp_path / f"worker{n}").entries()]
    assert sorted(there) == sorted(r.key for r in report.results), "each was built once"


@pytest.mark.usefixtures("environment")
def test_a_ray_cluster_serves(tmp_path: Path) -> None:
    """Workers have a cache of their own, which one cache comes back from."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    cache = {
        "FLASHATTN_JIT_CACHE_DIR": str(tmp_path / "workers"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        executor = RayExecutor(num_cpus=1, runtime_env={"env_vars": cache})
        report = warm("Causal", **HERE, executor=executor, progress=False)
        failed = warm(BAD, **HERE, executor=executor, progress=False, strict=False).failures
    finally:
        ray.shutdown()
    assert [r.built for r in report.results] == [True, True] and len(failed) == 2
    here, there = Store(tmp_path / "cache"), Store(tmp_path / "workers")
    assert {e.key for e in here.entries()} == {r.key for r in report.results}
    assert {e.key for e in there.entries()} == {r.key for r in report.results}


class Canned(Executor):
    """An executor whose results are those of `answer`, without any worker."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.tasks: list[str] = []
        self.closed = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert fn is worker.build
        self.tasks += args
        future: Future[Any] = Future()
        try:
            future.set_result(self.answer(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.closed = True


def test_any_executor_serves_and_its_failures_are_results(tmp_path: Path) -> None:
    def answer(task: str) -> Any:
        assert json.loads(task)["ship"]
        assert len(task) < 20_000
        raise OSError("the machine is gone")

    executor = Canned(answer)
    report = warm("Causal", **HERE, executor=executor, progress=False, strict=False)
    assert [r.error for r in report.results] == ["the machine is gone"] * 2
    assert len(executor.tasks) == 2
    assert not executor.closed, "it is its owner's"


def test_entries_of_another_version_or_forged_ones_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def result(**fields: Any) -> dict[str, Any]:
        return {
            "key": "0" * 64, "tile": 0, "layer": "compiler", "compiler_id": "gcc-1", "host": "far",
            "compile_s": 1.0, "artifact_bytes": 1, "seconds": 1.0, "warnings": ["it is hot"],
            "entries": [], **fields,
        }  # fmt: skip

    keys = [r.key for r in warm("Causal", **HERE, executor=Canned(lambda _: result()),
                                progress=False, strict=False).results]  # fmt: skip
    cases = {
        "another version of flashattn_jit": lambda task: result(),
        "could not keep the kernel": None,
        "corrupt": None,
    }

    def own(entries: bool) -> Callable[[str], Any]:
        def answer(task: str) -> Any:
            spec = json.loads(task)
            for s in wanted_specs("Causal", **HERE):
                if s.document() == spec["document"]:
                    from flashattn_jit.jit.compilation.toolchain import key_of
                    from flashattn_jit.planner.tiles import build_request

                    key = key_of(build_request(s)).hex
                    shipped = [{"key": key, "compiler_id": "gcc-1", "files": {"artifact.so": b"x"},
                                "meta": {"key": key}}]  # fmt: skip
                    return result(key=key, entries=shipped if entries else [])
            raise AssertionError("an unknown task")

        return answer

    answers = (cases["another version of flashattn_jit"], own(False), own(True))
    for words, answer in zip(cases, answers, strict=True):
        report = warm("Causal", **HERE, executor=Canned(answer), progress=False, strict=False)
        assert [words in r.error for r in report.results] == [True, True], report
        assert [r.key for r in report.results] == keys
        assert list(Store(tmp_path / "cache").entries()) == []
    with caplog.at_level(logging.WARNING, "flashattn_jit"):
        warm("Causal", **HERE, executor=Canned(own(False)), progress=False, strict=False)
    assert "it is hot" in caplog.text
