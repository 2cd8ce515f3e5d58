"""What plain calls return, from a process that met no mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_worker(mode: str, folder: Path) -> dict[str, list[str]]:
    """The outcomes of every subject in a process of its own: twice under the mode, then plain."""
    place = folder / "outcomes.pt"
    result = subprocess.run(
        [sys.executable, "-m", "tests.modes.worker", mode, str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(place)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of plain calls."""
    folder = tmp_path_factory.mktemp("modes")
    outcomes = run_worker("plain", folder)
    assert all(seen == ["equal"] * 3 for seen in outcomes.values()), outcomes
    return folder


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
