"""The pack: all kernels of the benchmark and of tests/gpu, compiled on a machine without a GPU.

A dry run at reduced sizes needs the same kernels as the real one, since kernels depend on classes
of sizes alone. The folder has a cache of its own, so it holds nothing else.
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

import flashattn_jit as fa
from benchmarks.gpu import rates
from benchmarks.gpu.memory import VARIABLE
from benchmarks.parts.measure import ROOT, commit, versions

KERNELS, ABOUT = "kernels.pack.xz", "about.json"
TARGET = "sm_90"


def build(folder: Path, dry_run: Callable[[], int], tests: bool) -> int:
    """Writes a pack into a folder; returns the exit status of the dry run. tests: those of
    tests/gpu too."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(folder.resolve() / "cache")
    rates.build(folder, TARGET)
    made: dict[str, object] = {"commit": commit(), "versions": versions()}
    _write(folder, made)
    status = dry_run()
    if tests:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                   "-o", "addopts=--import-mode=importlib", "tests/gpu"]  # fmt: skip
        environment = {**os.environ, VARIABLE: f"compile:{TARGET}"}
        status |= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    with tempfile.TemporaryDirectory() as work:
        report = fa.pack(Path(work) / "kernels.pack", targets=TARGET)
        # PTX and machine code of similar kernels: a tenth of the size, in a minute.
        with (
            Path(report.path).open("rb") as raw,
            lzma.open(folder / KERNELS, "wb", preset=1) as packed,
        ):
            shutil.copyfileobj(raw, packed, 1 << 20)
    _write(folder, made | {"kernels": report.entries})
    print(report)
    return status


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
    with tempfile.TemporaryDirectory() as work:
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
