"""Plants mistakes in a private copy of the checkout, and runs the tests that must notice them.

A mistake is caught when a test that it names fails (pytest's exit code 1) in its call, not while
tests are collected or set up, and passes without the mistake: all tests that failed are run once
more in the unchanged copy.

The copy has the extension of the package that is imported here. For a mistake in csrc/runtime,
csrc/scheduler, csrc/interval or a header of intervals, the files that depend on it are compiled
again. Where FLASHATTN_JIT_CACHE_DIR is set, its kernels are a read-only layer, and its emulator is
copied. Kernels that it lacks are compiled again for each mistake, so warm it first: `--clean` runs
the tests of all mistakes without a mistake. FAJIT_PLANTING_SEED, 13 by default, is the seed of what
tests take by turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pybind11

from flashattn_jit import _C
from tests.full.planted_mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
EXTENSION = Path(str(_C.__file__))
SOURCES = ("csrc/runtime", "csrc/scheduler", "csrc/interval")
"""Folders of the extension's sources."""
HEADERS = "csrc/include/fajit/interval"
"""Prefix of the headers whose code is part of the extension."""

LONGEST_S = 1800.0
"""Time limit of one run of tests."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run of tests. failed: (id, message) of the tests that failed in their call.
    problem: why the result does not count."""

    seconds: float
    failed: tuple[tuple[str, str], ...] = ()
    problem: str = ""


class Copy:
    """A copy of the checkout to plant mistakes in. kernels: the folder of a warm cache, if any."""

    def __init__(self, folder: Path, kernels: Path | None) -> None:
        self.root = folder / "checkout"
        self._objects = folder / "objects"
        self._report = folder / "report.xml"
        self._cache = folder / "cache"
        self._kernels = kernels
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT)
        self._put_extension()

    def caught(self, mistake: Mistake) -> Result:
        """Plants a mistake and runs its tests until one fails."""
        begin = time.monotonic()
        path = self.root / mistake.file
        text = path.read_text()
        count = text.count(mistake.old)
        if count != 1:
            return Result(0.0, problem=f"{mistake.file} has its text {count} times: correct it")
        compiled = mistake.file.startswith((*SOURCES, HEADERS))
        path.write_text(text.replace(mistake.old, mistake.new))
        try:
            if compiled:
                self._build()
            result = self.test(mistake.tests, "-x")
        except subprocess.CalledProcessError as error:
            result = Result(0.0, problem=f"it does not compile: {error.stdout[-2000:]}")
        finally:
            path.write_text(text)
            if compiled:
                self._put_extension()
        problem = result.problem or ("" if result.failed else "not caught")
        return Result(time.monotonic() - begin, result.failed, problem)

    def test(self, *arguments: str) -> Result:
        """Runs tests of the copy."""
        begin = time.monotonic()
        shutil.rmtree(self._cache, ignore_errors=True)
        if self._kernels and (emulator := self._kernels / "emulator").is_dir():
            shutil.copytree(emulator, self._cache / "emulator", symlinks=True)
        self._report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
        try:
            ended = subprocess.run(
                [*command, f"--junitxml={self._report}"],
                cwd=self.root, env=self._environment(), timeout=LONGEST_S, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(LONGEST_S, problem=f"the tests take more than {LONGEST_S:.0f} s")
        seconds = time.monotonic() - begin
        failed = tuple(self._failures())
        if ended.returncode == 0 or (ended.returncode == 1 and failed):
            return Result(seconds, failed)
        last = "\n".join(ended.stdout.splitlines()[-15:])
        return Result(seconds, problem=f"pytest ended with {ended.returncode}:\n{last}")

    def _failures(self) -> Iterator[tuple[str, str]]:
        """Tests that failed in their call; the report lists failures of fixtures as errors."""
        if not self._report.exists():
            return
        for case in ET.parse(self._report).iter("testcase"):
            failure = case.find("failure")
            if failure is not None:
                # A classname is the file's module, as no tests are in classes.
                file = case.get("classname", "").replace(".", "/") + ".py"
                lines = failure.get("message", "").splitlines() or [""]
                yield f"{file}::{case.get('name')}", lines[0]

    def _environment(self) -> dict[str, str]:
        # The default tests, which take some things by turns, must notice the mistake.
        kept = {k: v for k, v in os.environ.items()
                if not k.startswith(("FLASHATTN_JIT_", "FAJIT_TEST_"))}  # fmt: skip
        layers = {"FLASHATTN_JIT_CACHE_PATH": str(self._kernels)} if self._kernels else {}
        return {
            **kept,
            "FAJIT_TEST_SEED": os.environ.get("FAJIT_PLANTING_SEED", "13"),
            **layers,
            "FLASHATTN_JIT_CACHE_DIR": str(self._cache),
            "PYTHONPATH": str(self.root),
        }

    def _put_extension(self) -> None:
        """Copies the extension of the package that is imported here, which has no mistake."""
        path = self.root / "flashattn_jit" / EXTENSION.name
        path.unlink(missing_ok=True)  # makes a new inode: the old one may still be mapped
        shutil.copy2(EXTENSION, path)

    def _build(self) -> None:
        """Compiles the changed parts of the extension. Raises CalledProcessError."""
        self._objects.mkdir(exist_ok=True)
        script = self._objects / "build.ninja"
        if not script.exists():
            script.write_text("".join(_ninja(self.root, self._objects)))
        subprocess.run(
            ["ninja", "-C", str(self._objects)],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def _ninja(root: Path, objects: Path) -> Iterator[str]:
    """A ninja script that builds the extension incrementally."""
    include = [root / "csrc/include", pybind11.get_include(), sysconfig.get_path("include")]
    flags = " ".join(f"-I{folder}" for folder in include)
    yield "rule cxx\n  deps = gcc\n  depfile = $out.d\n"
    yield f"  command = c++ -std=c++17 -fPIC -fvisibility=hidden $flags {flags} -MMD -MF $out.d "
    yield "-c $in -o $out\nrule link\n  command = c++ -shared $in $flags -o $out\n"
    made = []
    for folder in SOURCES:
        for source in sorted((root / folder).rglob("*.cpp")):
            name = source.relative_to(root).with_suffix(".o")
            made.append(str(objects / "_".join(name.parts)))
            yield f"build {made[-1]}: cxx {source}\n"
            yield f"  flags = -O1 -fopenmp -I{root / folder} -I{root}/{SOURCES[0]}\n"
    library = root / "flashattn_jit" / EXTENSION.name
    yield f"build {library}: link {' '.join(made)}\n  flags = -fopenmp -ldl\n"


def chosen(names: Sequence[str]) -> tuple[Mistake, ...]:
    """The mistakes whose names contain one of `names`; all mistakes if there are none."""
    if not names:
        return MISTAKES
    return tuple(m for m in MISTAKES if any(name in m.name for name in names))


def plant(mistakes: Iterable[Mistake]) -> dict[str, str]:
    """Plants mistakes one by one and prints a line for each. Returns problems by mistake name."""
    kernels = os.environ.get("FLASHATTN_JIT_CACHE_DIR")
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="fajit-mistakes-") as folder:
        copy = Copy(Path(folder), Path(kernels).absolute() if kernels else None)
        for mistake in mistakes:
            result = results[mistake.name] = copy.caught(mistake)
            words = result.problem or "{}  [{:.80}]".format(*result.failed[0])
            print(f"{mistake.name:36} {mistake.tests:38} {result.seconds:6.1f} s  {words}",
                  flush=True)  # fmt: skip
        wrong = {name: result.problem for name, result in results.items() if result.problem}
        caught = {name: result.failed[0][0] for name, result in results.items() if result.failed}
        # The tests that failed with a mistake must pass without it.
        clean = copy.test(*sorted(set(caught.values()))) if caught else Result(0.0)
    for test, message in clean.failed:
        wrong |= {n: f"{test} fails without it: {message}" for n in caught if caught[n] == test}
    if clean.problem:
        wrong["no mistake"] = clean.problem
    for name, problem in wrong.items():
        print(f"{name}: {problem}")
    total = sum(result.seconds for result in results.values()) + clean.seconds
    good = sum(name not in wrong for name in results)
    print(f"{good} of {len(results)} mistakes are caught, in {total / 60:.1f} minutes")
    return wrong


def main() -> None:
    """The command line; ends with 1 where a mistake is not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="parts of the names of mistakes; all by default")
    parser.add_argument("--clean", action="store_true", help="run their tests without a mistake")
    options = parser.parse_args()
    mistakes = chosen(options.names)
    if options.clean:
        tests = sorted({mistake.tests for mistake in mistakes})
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT))
    sys.exit(bool(plant(mistakes)))
