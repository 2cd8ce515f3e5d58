"""A temporary cache for measurements, and processes that use it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch


@contextlib.contextmanager
def fresh_cache() -> Iterator[Path]:
    """An empty cache folder, the only layer of this process and of those that it starts."""
    with tempfile.TemporaryDirectory(prefix="flashattn_jit-bench-") as folder:
        cache = Path(folder) / "cache"
        variables = {
            "FLASHATTN_JIT_CACHE_DIR": str(cache),
            "FLASHATTN_JIT_CACHE_PATH": "",
            "FLASHATTN_JIT_COMPILE": "missing",
        }
        with patch.dict(os.environ, variables):
            yield cache


def words_of(code: str, *arguments: str) -> list[str]:
    """The words that Python code prints in a new process, in the checkout's folder.

    Modules are compiled once, as those of an installed package.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    return done.stdout.split()
