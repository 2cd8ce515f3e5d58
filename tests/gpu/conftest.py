"""Skips all tests here without a CUDA device; with one, compiles kernels in parallel first.

`place.py` says where else they run.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import env
from flashattn_jit.kv import step
from flashattn_jit.ops.device import plan_memory
from tests.batch import oracle
from tests.gpu.place import COMPILE_ONLY, EMULATED, NAMED, REASON, SHARE, TARGET
from tests.harness import rotation
from tests.ops import cases

if COMPILE_ONLY:  # before the tests import these names
    for module, name in (
        (plan_memory, "launch"), (cases, "assert_close"), (oracle, "check"),
        (torch.testing, "assert_close"),
    ):  # fmt: skip
        setattr(module, name, lambda *args, **options: None)

HERE = Path(__file__).parent
LONG = ("test_formats", "test_lists_at_full_size")
"""Not taken by turns in the emulator: tests/batch runs the same there, some of them smaller."""


def _here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EMULATED:
        mine = [
            item
            for item in items
            if _here(item)
            and not any(m.args[0] for m in item.iter_markers("skipif"))
            and (rotation.takes_all() or getattr(item, "originalname", "") not in LONG)
        ]
        taken = rotation.chosen(mine, SHARE, lambda item: item.path.name)
        items[:] = [item for item in items if not _here(item) or item in taken]
    if REASON:
        for item in filter(_here, items):
            item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A kernel takes one core one to two seconds, and the tests need hundreds."""
    mine = [item for item in session.items if _here(item)]
    if REASON or not mine or session.config.option.collectonly:
        return
    if env.compile_mode() == "never":  # all kernels are in a pack
        return
    if hasattr(session.config, "workerinput"):  # pytest -n: the tests compile in parallel
        return
    from tests.gpu.harness import Want, device_target
    from tests.gpu.prewarm import compile_one

    wants: dict[Want, None] = {}
    for item in mine:
        values = getattr(item, "callspec", None) and item.callspec.params
        if values and {"case", "shape", "dtype"} <= set(values):
            wants[Want(values["case"], values["shape"], values["dtype"])] = None
        wants |= dict.fromkeys(() if EMULATED else getattr(item.module, "WANTS", ()))
    if not wants:
        return
    begin, target = time.perf_counter(), NAMED or device_target()
    spawn = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), len(wants))
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        failed = [f for f in pool.map(compile_one, wants, [target] * len(wants), chunksize=4) if f]
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    if report is not None:
        seconds = time.perf_counter() - begin
        report.write_line(f"{len(wants)} kernels, {workers} processes: {seconds:.0f} s")
        for text in failed:  # the test that needs the kernel fails with the reason
            report.write_line(text)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Where nothing is launched, values are wrong; a kernel that does not compile is a failure."""
    try:
        return (yield)
    except AssertionError:
        if not COMPILE_ONLY or not _here(pyfuncitem):
            raise
        return True


@pytest.fixture(autouse=True)
def _steps_append_on_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of fa.kv has no target: where tensors are on the CPU, its appends would run there."""
    monkeypatch.setattr(step, "plan_append", partial(fa.plan_append, target=TARGET))
