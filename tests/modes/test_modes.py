"""Under any mode of torch: the plain result, twice, and after it plain calls are what they were.

Each mode has a process of its own, which remembers nothing when the mode begins.
"""

from __future__ import annotations

import pytest

from tests.modes.conftest import Server, run_worker
from tests.modes.worker import CHANGING, MODES


@pytest.mark.parametrize("mode", [m for m in MODES if m != "plain"])
def test_a_mode_changes_nothing(mode: str, server: Server) -> None:
    check(server.run(mode), mode)


@pytest.mark.parametrize("mode", ["device meta", "fake tensors"])
def test_the_package_may_be_imported_under_a_mode(mode: str, server: Server) -> None:
    check(run_worker(f"import under {mode}", server.folder), mode)


def check(outcomes: dict[str, list[str]], mode: str) -> None:
    # Such a mode changes what it sees; what follows it is plain all the same.
    looked_at = slice(2, 3) if mode in CHANGING else slice(0, 3)
    wrong = {n: seen for n, seen in outcomes.items() if set(seen[looked_at]) != {"equal"}}
    assert not wrong, "\n".join(f"{name}: {seen}" for name, seen in wrong.items())
