"""The server of processes that run the subjects under modes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.modes.subjects import subjects

ROOT = Path(__file__).resolve().parents[2]


def run_worker(mode: str, folder: Path) -> dict[str, list[str]]:
    """The outcomes of every subject in a process of its own: twice under the mode, then plain."""
    file = folder / "outcomes.pt"
    result = subprocess.run(
        [sys.executable, "-m", "tests.modes.worker", mode, str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(file)  # type: ignore[no-any-return]


class Server:
    """Forks a process for each mode from one that has imported the package and called nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.errors = folder, folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.modes.worker"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def run(self, mode: str) -> dict[str, list[str]]:
        """As `run_worker`, in a forked process."""
        file = self.folder / "outcomes.pt"
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{mode}\t{file}\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline().strip()
        assert code == "0", f"exit code {code}: {self.errors.read_text()[-3000:]}"
        return torch.load(file)  # type: ignore[no-any-return]

    def end(self) -> None:
        """Ends the process."""
        self.process.communicate(timeout=60)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of processes; in its folder are the results of plain calls."""
    made = Server(tmp_path_factory.mktemp("modes"))
    try:
        outcomes = made.run("plain")
        assert all(seen == ["equal"] * 3 for seen in outcomes.values()), outcomes
        yield made
    finally:
        made.end()


@pytest.fixture(autouse=True, scope="session")
def _prepared():
    for subject in subjects():
        subject.prepare()


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler):
    """Every test here begins with a fresh compiler."""
