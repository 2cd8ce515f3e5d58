"""The pack: all kernels of the benchmark and of tests/gpu, compiled on a machine without a GPU.

A dry run of all cases at reduced sizes needs the same kernels as the real run, since kernels depend
on classes of sizes alone. The folder has a cache of its own, so it holds nothing else.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import rates
from benchmarks.gpu.memory import VARIABLE
from benchmarks.parts.measure import ROOT, commit, versions
from flashattn_jit.deploy.pack.pack import chosen_entries, members, without_files
from flashattn_jit.deploy.pack.wheel import FOR_PEOPLE
from flashattn_jit.jit.cache.entry import sources_digest
from flashattn_jit.jit.cache.pack_file import write_archive
from flashattn_jit.jit.compilation.nvcc import PTX

KERNELS, ABOUT = "kernels.pack.xz", "about.json"
TARGET = "sm_90"
MOST_BYTES = 50 << 20  # of a pack: it travels with the checkout
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}]


def build(folder: Path, dry_run: Callable[[], int], tests: bool) -> int:
    """Writes a pack into a folder; returns the exit status of the dry run. tests: those of
    tests/gpu too."""
    folder.mkdir(parents=True, exist_ok=True)
    rates.build(folder, TARGET)
    made: dict[str, object] = {"commit": commit(), "sources": sources(), "versions": versions()}
    _write(folder, made)
    with tempfile.TemporaryDirectory() as cache:  # with no kernel of an earlier run
        os.environ["FLASHATTN_JIT_CACHE_DIR"] = cache
        return _fill(folder, made, dry_run, tests)


def _fill(folder: Path, made: dict[str, object], dry_run: Callable[[], int], tests: bool) -> int:
    status = dry_run()
    if tests:
        status |= _compiled_tests()
    _write(folder, made | {"kernels": write_kernels(folder)})
    size = (folder / KERNELS).stat().st_size
    print(f"{folder / KERNELS}: {size / 1e6:.1f} MB")
    if tests:
        with used(folder):  # whether it holds all of them
            status |= _compiled_tests()
    return status or int(size > MOST_BYTES)


def _compiled_tests() -> int:
    """The status of tests/gpu, where kernels are looked up or compiled, and none is launched."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
               "-o", "addopts=--import-mode=importlib", "tests/gpu"]  # fmt: skip
    environment = {**os.environ, VARIABLE: f"compile:{TARGET}"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def write_kernels(folder: Path) -> int:
    """Writes the kernels of the user's folder of the cache; returns how many.

    Without their sources and PTX, which a GPU has no use for: 34 MB instead of 64.
    """
    chosen = [
        without_files(one, FOR_PEOPLE | {PTX})
        for one in chosen_entries(None, (TARGET,), (), allow_cpp=True)
    ]
    with tempfile.TemporaryFile() as raw:
        write_archive(raw, members(chosen))
        raw.seek(0)
        # Kernels resemble each other, over a distance of many: a large dictionary.
        with lzma.open(folder / KERNELS, "wb", filters=_FILTERS) as packed:
            shutil.copyfileobj(raw, packed, 1 << 20)
    return len(chosen)


def sources() -> str:
    """A digest of what attention kernels are made from: templates, headers and the generator."""
    return sources_digest("cuda/attention.cu.j2")


def _write(folder: Path, made: dict[str, object]) -> None:
    (folder / ABOUT).write_text(json.dumps(made, indent=1) + "\n")


@contextlib.contextmanager
def used(folder: Path) -> Iterator[None]:
    """Inside of it this process and its children take kernels from a pack, and compile none.

    Raises SystemExit if the folder holds no pack.
    """
    if not (folder / KERNELS).is_file():
        raise SystemExit(f"benchmarks.gpu: {folder} holds no {KERNELS}; make it with "
                         f"`python -m benchmarks.gpu pack {folder}`")  # fmt: skip
    if about(folder)["sources"] != sources():
        raise SystemExit(f"benchmarks.gpu: {folder} was made from other sources; make "
                         "it anew")  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(Path(work) / "cache")
        unpacked = Path(work) / "kernels.pack"
        with lzma.open(folder / KERNELS) as packed, unpacked.open("wb") as raw:
            shutil.copyfileobj(packed, raw, 1 << 20)
        os.environ["FLASHATTN_JIT_CACHE_PATH"] = str(unpacked)
        os.environ["FLASHATTN_JIT_COMPILE"] = "never"
        yield


def about(folder: Path) -> dict[str, object]:
    """What `build` wrote about a pack."""
    found: dict[str, object] = json.loads((folder / ABOUT).read_text())
    return found
