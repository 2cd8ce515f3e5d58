"""Shared set-up: a private cache for the whole run, fixed seeds, two threads."""

from __future__ import annotations

import os
import random

import pytest

# Idle OpenMP threads sleep. Where workers of pytest-xdist share the cores, a thread that spins at a
# barrier takes the core from the thread that it waits for, and short parallel regions take
# milliseconds. OpenMP reads the variable when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests.harness import budget, last_run

# All tests share one kernel cache. Workers inherit the variable that names its folder.
last_run.begin()

# Installed wheels of kernels would serve kernels that a test is meant to compile.
os.environ["FLASHATTN_JIT_CACHE_INSTALLED"] = "0"

# Workers inherit the seed, so that all of them collect the same tests.
os.environ.setdefault("FAJIT_TEST_SEED", str(random.SystemRandom().randrange(10**6)))


def pytest_report_header():
    from tests.harness.rotation import words

    return [f"by turns: {words()}", last_run.words()]


def pytest_runtest_logreport(report):
    budget.add(report)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds of workers")
    for line in budget.table():
        terminalreporter.write_line(line)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        last_run.end()


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "by_turns(share): a run takes one in `share` of a test's cases, more until each value of a "
        "parameter that several cases share is taken, and all with FAJIT_TEST_TURNS=all",
    )
    try:
        import flashattn_jit  # noqa: F401
    except ImportError as error:
        raise pytest.UsageError(str(error)) from None
    # Neighbouring tests need the same kernels and module fixtures: each worker takes a contiguous
    # range of tests, and a worker that is done takes half of the tests that another has left.
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(config, items):
    from tests.harness.rotation import left_out

    if any("::" in argument for argument in config.args):  # tests that are named run as they are
        return
    if left := left_out(items):
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def restored_threads():
    """torch's number of threads after the test is that of before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler():
    """torch.compile remembers nothing of other tests, and nothing of this one after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
