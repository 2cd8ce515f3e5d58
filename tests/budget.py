"""What the tests of each folder take, beside what they may take.

A budget is in seconds of one worker, set-up of fixtures included, with no kernel of an earlier run,
on two cores of a server of 2024 that nothing else uses. Nothing fails for being slow on another
machine: the table at the end of a run marks what is over its budget.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

BUDGET_S = {
    "tests/batch": 120,
    "tests/cli": 60,
    "tests/codegen": 100,
    "tests/cuda": 200,
    "tests/deploy": 90,
    "tests/emulator": 60,
    "tests/fleet": 60,
    "tests/fuzz": 60,
    "tests/inspect": 60,
    "tests/integrations": 30,
    "tests/jit": 60,
    "tests/modes": 90,
    "tests/ops": 240,
    "tests/planner": 70,
    "tests/random": 60,
    "tests/variants": 80,
    "tests/*.py": 120,
}

_spent: dict[str, float] = defaultdict(float)
_tests: dict[str, int] = defaultdict(int)


def add(report: pytest.TestReport) -> None:
    """Count a phase of a test."""
    folder = report.nodeid.split("::")[0].rpartition("/")[0]
    folder = "/".join(folder.split("/")[:2]) if "/" in folder else "tests/*.py"
    _spent[folder] += report.duration
    _tests[folder] += report.when == "call"


def table() -> list[str]:
    """A line a folder, the slowest first."""
    lines = []
    for folder, spent in sorted(_spent.items(), key=lambda item: -item[1]):
        budget = BUDGET_S.get(folder)
        words = "" if budget is None else f" of {budget:4d} s"
        over = "  over its budget" if budget is not None and spent > budget else ""
        lines.append(f"{spent:7.1f}{words}  {_tests[folder]:5d} tests  {folder}{over}")
    return lines
