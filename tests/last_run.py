"""The kernel cache of a run of the tests: it begins with the kernels of the last run.

A kernel's key has all that it is made of, so that those of the last run serve this one exactly
where nothing changed. `FAJIT_TEST_KERNELS=/a/folder` keeps them there instead of in the user's
cache folder; `FAJIT_TEST_KERNELS=cold` keeps none and takes none. A run over a
`FLASHATTN_JIT_CACHE_DIR` that is set uses that one as it is.
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
    """Sets FLASHATTN_JIT_CACHE_DIR for this process and the workers that it starts."""
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
        except OSError as error:  # another run has just put its own there
            print(f"the kernels of the last run are left: {str(error)[:200]}")
            shutil.rmtree(_own, ignore_errors=True)
            _own.mkdir(mode=0o700, exist_ok=True)
    os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(_own)


def end() -> None:
    """Keeps this run's kernels for the next one, those used last if there are too many."""
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
    """Where kernels come from, for the header of the run."""
    if _own is None:
        return f"kernels: {os.environ['FLASHATTN_JIT_CACHE_DIR']}"
    count = sum(1 for _ in _own.glob("v1/*/??/*/meta.json"))
    return f"kernels: {count} of the last run" if count else "kernels: none of an earlier run"


def _link(source: str, target: str) -> None:
    """A second name where the file system has them: no file of a cache is written twice."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _last() -> Path | None:
    """Where the kernels of the last run are; None where none are to be kept."""
    value = os.environ.get(VARIABLE)
    if value == "cold":
        return None
    if value:
        return Path(value).absolute()
    return Path(platformdirs.user_cache_dir("flashattn_jit-tests", appauthor=False)) / "kernels"


def _remove_abandoned(parent: Path) -> None:
    """Folders of runs that were killed: no run takes three days."""
    for path in parent.glob("run-*"):
        if time.time() - path.stat().st_mtime > 3 * 86400:
            shutil.rmtree(path, ignore_errors=True)
