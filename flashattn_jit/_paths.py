"""Where the kernel templates and headers lie: in a checkout, or inside an installed package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent


@cache
def templates_dir() -> Path:
    """The folder of the Jinja templates (holds cpu/, cuda/). Raises FileNotFoundError."""
    return _find("templates", "templates")


@cache
def include_dir() -> Path:
    """The folder that rendered sources include from (holds fajit/). Raises FileNotFoundError."""
    return _find("include", "csrc/include")


@cache
def emulator_dir() -> Path:
    """The folder of the emulator's C++ sources. Raises FileNotFoundError."""
    return _find("emulator", "csrc/emulator")


def _find(installed: str, checkout: str) -> Path:
    # An installed package never sees the second place: beside it lie other packages.
    for folder in (PACKAGE_DIR / "_data" / installed, PACKAGE_DIR.parent / checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"flashattn_jit's kernel sources are missing: neither {PACKAGE_DIR / '_data' / installed} "
        f"nor {PACKAGE_DIR.parent / checkout} exists; reinstall the package"
    )
