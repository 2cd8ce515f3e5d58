"""Stand-ins for the compiler and the loader, and one real module over `minimal_artifact.cpp`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401  (first: its OpenMP runtime is the process')

from flashattn_jit import _C, env
from flashattn_jit.jit.cache import entry
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.compile_job import Compiler, SpillError
from flashattn_jit.jit.module import KernelCache
from tests.harness.private_cache import private_environment  # noqa: F401 - a fixture of all tests here

MINIMAL_ARTIFACT = Path(__file__).with_name("minimal_artifact.cpp")


class FakeBuild:
    """A compiler that writes bytes. `before` runs during each build; it may raise or wait.

    A source with the word SPILLS makes a kernel that spills registers.
    """

    def __init__(self) -> None:
        self.builds: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.content = "artifact of {key}"
        self._lock = threading.Lock()

    def __call__(
        self, source: str, key: str, target: str, compiler: Compiler | None, staging: Path
    ) -> float:
        with self._lock:
            self.builds.append(key)
        staging.joinpath(toolchain.source_name(target)).write_text(source)
        staging.joinpath(toolchain.LOG).write_text("all is well\n")
        self.before()
        staging.joinpath("artifact.so").write_text(self.content.format(key=key))
        if "SPILLS" in source:
            needs = re.search(r"SPILLS (\d+) BYTES", source)
            raise SpillError(["the kernel spills"], 0.25, int(needs[1]) if needs else None)
        return 0.25


class FakeModule:
    """The module that an artifact of FakeBuild is loaded as."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.key = Path(path).read_text().removeprefix("artifact of ")
        self.description = json.dumps({"abi_version": 1, "key": self.key})


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    """The folder of this test's cache, which does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with templates/, include/ and package/ that stands in for the package's own.

    templates/kernel.cpp.j2 includes fajit/a.h, which includes fajit/nested/b.h, and imports
    macros.j2; other.h is not reached.
    """
    root = tmp_path / "sources"
    files = {
        "templates/kernel.cpp.j2": "#include <fajit/a.h>\n"
        '{% import "macros.j2" as m %}\n#include <fajit/cpu/{{ "x" if a > 1 else "y" }}.h>\n',
        "templates/macros.j2": "{% macro f() %}1{% endmacro %}\n",
        "templates/unused.j2": "x\n",
        "include/fajit/a.h": "#pragma once\n  #  include <fajit/nested/b.h>\n#include <stdint.h>\n",
        "include/fajit/nested/b.h": '#include "fajit/a.h"\nint b;\n',
        "include/fajit/cpu/x.h": "int x;\n",
        "include/fajit/cpu/y.h": "int y;\n",
        "include/fajit/other.h": "int other;\n",
        "package/codegen/render.py": "from ..variants.lower import hooks\nfrom .spec import Spec\n",
        "package/codegen/spec.py": "from flashattn_jit.variants.ir.ir import Graph\n",
        "package/codegen/other.py": "x = 1\n",
        "package/variants/lower/hooks.py": "from . import (\n    row,\n)\n",
        "package/variants/lower/row.py": "from ... import errors\nfrom .missing import x\n",
        "package/variants/ir/ir.py": "y = 1\n",
        "package/variants/trace/tracer.py": "z = 1\n",
        "package/errors.py": "class E: ...\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(env, "templates_dir", lambda: root / "templates")
    monkeypatch.setattr(env, "include_dir", lambda: root / "include")
    monkeypatch.setattr(env, "PACKAGE_DIR", root / "package")
    entry.sources_digest.cache_clear()
    yield root
    entry.sources_digest.cache_clear()


@pytest.fixture
def fake_build() -> FakeBuild:
    """A compiler that writes bytes."""
    return FakeBuild()


@pytest.fixture
def new_cache(sources: Path, fake_build: FakeBuild) -> Callable[[], KernelCache]:
    """Makes kernel caches over one fake compiler; each cache stands for a new process."""
    return lambda: KernelCache(build=fake_build, load=FakeModule)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def minimal_module(tmp_path_factory: pytest.TempPathFactory) -> _C.Module:
    """The minimal artifact, compiled by the real compiler and loaded."""
    from flashattn_jit.jit.compilation.toolchain import find_compiler

    staging = tmp_path_factory.mktemp("minimal")
    source = MINIMAL_ARTIFACT.read_text()
    toolchain.build(source, "0" * 64, "cpu:generic", find_compiler(), staging)
    return _C.Module(str(staging / "artifact.so"))
