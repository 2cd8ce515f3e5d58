"""Shared set-up: a private cache for the whole run, fixed seeds, two threads."""

from __future__ import annotations

import os
import random

import pytest

# Idle OpenMP threads sleep. Where workers of pytest-xdist share the cores, a thread that spins at a
# barrier takes the core of the one it waits for, and short parallel regions take milliseconds.
# OpenMP reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests import budget, last_run

# Kernels built by one test serve the others. Workers inherit the folder.
last_run.begin()

# Workers inherit it: all collect the same tests.
os.environ.setdefault("FAJIT_TEST_SEED", str(random.SystemRandom().randrange(10**6)))


def pytest_report_header():
    from tests.rotation import words

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
    # Neighbouring tests need the same kernels and module fixtures: each worker takes a run of them,
    # and one that is done takes over half of what another has left.
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items):
    # What takes two minutes in one piece comes first: no worker waits for another's at the end.
    items.sort(key=lambda item: item.path.name != "test_packaging.py")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
