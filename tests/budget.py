"""What the tests of each folder take, beside what they may take.

A budget is in seconds of one worker, set-up of fixtures included, with no kernel of an earlier run,
on two cores of a server of 2024 that nothing else uses: 1,180 s in all, ten minutes of two workers.
Nothing fails for being slow: the table at the end of a run marks what is over its budget.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

BUDGET_S = {
    "tests/batch": 120,
    "tests/cli": 40,
    "tests/codegen": 95,
    "tests/cuda": 120,
    "tests/deploy": 65,
    "tests/emulator": 30,
    "tests/fleet": 45,
    "tests/fuzz": 30,
    "tests/inspect": 35,
    "tests/integrations": 45,
    "tests/jit": 50,
    "tests/modes": 80,
    "tests/ops": 225,
    "tests/planner": 45,
    "tests/random": 15,
    "tests/variants": 40,
    "tests/*.py": 100,
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
