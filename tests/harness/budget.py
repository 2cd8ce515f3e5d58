"""The time that the tests of each folder take, and their budgets.

A budget is in seconds of one worker, including the set-up of fixtures, with the kernels of the last
run, on two cores of an idle server of 2024. Without the kernels of an earlier run the tests take
half as long again, most of it in ops and batch.
No test fails because a folder is slow: the table at the end of a run marks it.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

BUDGET_S = {
    "tests/batch": 90,
    "tests/benchmark_gpu": 110,
    "tests/cli": 45,
    "tests/codegen": 95,
    "tests/cuda": 110,
    "tests/deploy": 75,
    "tests/distributed": 330,
    "tests/docs": 240,
    "tests/emulator": 60,
    "tests/fleet": 60,
    "tests/fuzz": 35,
    "tests/harness": 20,
    "tests/inspect": 25,
    "tests/integrations": 90,
    "tests/jit": 55,
    "tests/kv": 80,
    "tests/modes": 75,
    "tests/ops": 195,
    "tests/planner": 50,
    "tests/random": 20,
    "tests/registry": 10,
    "tests/variants": 45,
    "tests/*.py": 110,
}

_spent: dict[str, float] = defaultdict(float)
_tests: dict[str, int] = defaultdict(int)


def add(report: pytest.TestReport) -> None:
    """Adds the time of one phase of a test: set-up, call or tear-down."""
    folder = report.nodeid.split("::")[0].rpartition("/")[0]
    folder = "/".join(folder.split("/")[:2]) if "/" in folder else "tests/*.py"
    _spent[folder] += report.duration
    _tests[folder] += report.when == "call"


def table() -> list[str]:
    """One line for each folder, the slowest first, and one for the sum of those with a budget."""
    lines = []
    for folder, spent in sorted(_spent.items(), key=lambda item: -item[1]):
        budget = BUDGET_S.get(folder)
        words = "" if budget is None else f" of {budget:4d} s"
        over = "  over its budget" if budget is not None and spent > budget else ""
        lines.append(f"{spent:7.1f}{words}  {_tests[folder]:5d} tests  {folder}{over}")
    ran = [folder for folder in _spent if folder in BUDGET_S]
    if not ran:
        return lines
    spent, budget = sum(_spent[f] for f in ran), sum(BUDGET_S[f] for f in ran)
    tests = sum(_tests[f] for f in ran)
    lines.append(f"{spent:7.1f} of {budget:4d} s  {tests:5d} tests  in all")
    return lines
