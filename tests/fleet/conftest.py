"""Processes for each test, with their own cache, lock folder and compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.fleet import Compiler, Fleet, entries, environment, servers, write_compiler


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with servers(tmp_path_factory.mktemp("servers")) as sockets:
        yield sockets


@pytest.fixture(scope="session")
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that is the compiler of all tests."""
    return write_compiler(tmp_path_factory.mktemp("compiler"))


def _fleet(root: Path, sockets: tuple[str, str], command: Path) -> Fleet:
    compiler = Compiler(root / "compiler", command)
    compiler.folder.mkdir()
    root.joinpath("answers").mkdir()
    env = {
        **environment(),
        "FLASHATTN_JIT_CACHE_DIR": str(root / "cache"),
        "FLASHATTN_JIT_LOCK_DIR": str(root / "locks"),
        "FLASHATTN_JIT_CXX": str(compiler.command),
        "FLEET_COMPILER": str(compiler.folder),
        "OMP_NUM_THREADS": "1",
    }
    return Fleet(root, *sockets, compiler, env)


@pytest.fixture
def fleet(tmp_path: Path, _servers: tuple[str, str], _compiler: Path) -> Iterator[Fleet]:
    """Processes over a cache folder that does not exist yet."""
    made = _fleet(tmp_path, _servers, _compiler)
    yield made
    made.end()


@pytest.fixture(scope="session")
def _warm_cache(
    tmp_path_factory: pytest.TempPathFactory, _servers: tuple[str, str], _compiler: Path
) -> Path:
    """A cache folder with the kernel of the task `attend`."""
    made = _fleet(tmp_path_factory.mktemp("warm"), _servers, _compiler)
    assert made.start().good()["source"] == "compiler"
    made.end()
    return made.cache


@pytest.fixture
def warm(fleet: Fleet, _warm_cache: Path) -> Fleet:
    """Processes over a cache with one entry, the kernel of the task `attend`."""
    shutil.copytree(_warm_cache, fleet.cache, symlinks=True)
    assert len(entries(fleet.cache)) == 1
    return fleet
