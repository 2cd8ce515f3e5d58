"""Importing a source folder without the compiled extension says what to do, in pytest too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without a built extension."""
    shutil.copytree(
        ROOT / "flashattn_jit", tmp_path / "flashattn_jit", ignore=shutil.ignore_patterns("_C.*so")
    )
    tmp_path.joinpath("setup.py").touch()
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_an_import_names_the_folder_the_reason_and_the_remedies(checkout: Path) -> None:
    done = run(checkout, "-c", "import flashattn_jit")
    assert done.returncode == 1
    assert f"ImportError: flashattn_jit was imported from the source folder {checkout}" in (
        done.stderr
    )
    for words in ("has no compiled part", "pip install -e .", "another folder", "python -P"):
        assert words in done.stderr, words
    assert len(done.stderr.splitlines()) < 16, done.stderr


def test_one_that_was_built_for_another_python_is_named(checkout: Path) -> None:
    checkout.joinpath("flashattn_jit", "_C.cpython-39-x86_64-linux-gnu.so").touch()
    done = run(checkout, "-c", "import flashattn_jit")
    assert "holds _C.cpython-39-x86_64-linux-gnu.so, which Python" in done.stderr


def test_a_broken_installation_is_to_be_reinstalled(checkout: Path) -> None:
    checkout.joinpath("setup.py").unlink()
    done = run(checkout, "-c", "import flashattn_jit")
    assert "reinstall" in done.stderr and "pip install -e" not in done.stderr


def test_pytest_says_it_in_one_block(checkout: Path) -> None:
    checkout.joinpath("tests", "harness").mkdir(parents=True)
    for name in ("conftest.py", "harness/budget.py", "harness/last_run.py"):
        shutil.copyfile(ROOT / "tests" / name, checkout / "tests" / name)
    done = run(checkout, "-m", "pytest", "-p", "no:cacheprovider", "tests")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: flashattn_jit was imported from the source folder" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 10
