"""Where the caches of measurements lie: in folders of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """The cache of this process is below `folder` alone, and compiles what is missing."""
    before = {name: os.environ.get(name) for name in variables(folder)}
    os.environ.update(variables(folder))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def variables(folder: Path) -> dict[str, str]:
    """The environment of a process whose cache is below `folder` alone."""
    return {
        "FLASHATTN_JIT_CACHE_DIR": str(folder / "cache"),
        "FLASHATTN_JIT_CACHE_PATH": "",
        "FLASHATTN_JIT_COMPILE": "missing",
    }
