"""The kernel cache of a test run, which starts with the kernels of the last run.

A kernel's key covers everything that it is made of, so a kernel of the last run is used only where
nothing has changed. `FAJIT_TEST_KERNELS=/a/folder` keeps the kernels in that folder instead of the
user's cache folder; with `FAJIT_TEST_KERNELS=cold` a run starts with none and keeps none. Where
`FLASHATTN_JIT_CACHE_DIR` is set, the run uses that folder as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import platformdirs

VARIABLE = "FAJIT_TEST_KERNELS"
MOST_BYTES = 1 << 30

_own: Path | None = None


def begin() -> None:
    """Makes this run's folder and sets FLASHATTN_JIT_CACHE_DIR, which workers inherit."""
    global _own
    if os.environ.get("FLASHATTN_JIT_CACHE_DIR"):
        return
    last = _last()
    try:
        parent = None if last is None else last.parent
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_abandoned(parent)
        _own = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    except OSError:
        last, _own = None, Path(tempfile.mkdtemp(prefix="fajit-tests-"))
    if last is not None and last.is_dir():
        try:
            shutil.copytree(
                last, _own, symlinks=True, dirs_exist_ok=True,
                copy_function=_link,
                ignore=shutil.ignore_patterns(".staging", ".quarantine", ".failed"),
            )  # fmt: skip
        except OSError as error:  # another run has just replaced the folder
            print(f"the kernels of the last run are not used: {str(error)[:200]}")
            shutil.rmtree(_own, ignore_errors=True)
            _own.mkdir(mode=0o700, exist_ok=True)
    os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(_own)


def end() -> None:
    """Keeps this run's kernels for the next run: the most recently used ones, up to MOST_BYTES."""
    last = _last()
    if _own is not None and last is not None and _own.parent == last.parent and any(_own.iterdir()):
        _keep(_own, last)
    if _own is not None:
        shutil.rmtree(_own, ignore_errors=True)


def _keep(own: Path, last: Path) -> None:
    from flashattn_jit.errors import CacheError
    from flashattn_jit.jit.cache.eviction import collect
    from flashattn_jit.jit.cache.store import Store

    try:
        collect(Store(own), MOST_BYTES)
        old = Path(tempfile.mkdtemp(prefix="run-", dir=last.parent))
        if last.exists():
            last.rename(old / "kernels")
        own.rename(last)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, CacheError) as error:
        print(f"this run's kernels are not kept: {error}")


def words() -> str:
    """Where the run's kernels come from, as a line of its header."""
    if _own is None:
        return f"kernels: {os.environ['FLASHATTN_JIT_CACHE_DIR']}"
    count = sum(1 for _ in _own.glob("v1/*/??/*/meta.json"))
    return f"kernels: {count} of the last run" if count else "kernels: none of an earlier run"


def _link(source: str, target: str) -> None:
    """Hard-links a file, or copies it where that fails: the files of a cache are never modified."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _last() -> Path | None:
    """The folder of the last run's kernels; None where kernels are not kept."""
    value = os.environ.get(VARIABLE)
    if value == "cold":
        return None
    if value:
        return Path(value).absolute()
    return Path(platformdirs.user_cache_dir("flashattn_jit-tests", appauthor=False)) / "kernels"


def _remove_abandoned(parent: Path) -> None:
    """Removes folders that killed runs left: no run takes three days."""
    for path in parent.glob("run-*"):
        if time.time() - path.stat().st_mtime > 3 * 86400:
            shutil.rmtree(path, ignore_errors=True)
