"""Under any mode of torch calls return their plain results, twice, and after it as well.

Each mode has its own process, in which nothing was called before the mode.
"""

from __future__ import annotations

import pytest

from tests.modes.conftest import Server, run_worker
from tests.modes.worker import CHANGING, MODES


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mode", [m for m in MODES if m != "plain"])
def test_a_mode_changes_nothing(mode: str, server: Server) -> None:
    check(server.run(mode), mode)


@pytest.mark.parametrize("mode", ["device meta", "fake tensors"])
def test_the_package_may_be_imported_under_a_mode(mode: str, server: Server) -> None:
    check(run_worker(f"import under {mode}", server.folder), mode)


def check(outcomes: dict[str, list[str]], mode: str) -> None:
    # Modes that change results: only the plain call after them is compared.
    looked_at = slice(2, 3) if mode in CHANGING else slice(0, 3)
    wrong = {n: seen for n, seen in outcomes.items() if set(seen[looked_at]) != {"equal"}}
    assert not wrong, "\n".join(f"{name}: {seen}" for name, seen in wrong.items())
