"""What an import says where the package has no compiled part beside it."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def require_extension(package: Path) -> None:
    """Raises ImportError, with the reason and remedies, where `package` holds no `_C`."""
    if any((package / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        return
    others = sorted(path.name for path in package.glob("_C.*.so"))
    version = "{}.{}".format(*sys.version_info[:2])
    if others:
        why = f"holds {', '.join(others)}, which Python {version} cannot load"
    else:
        why = "has no compiled part (_C)"
    if (package.parent / "setup.py").is_file():
        raise ImportError(
            f"flashattn_jit was imported from the source folder {package}, which {why}. Python "
            "finds this folder before an installed package, because it lies in the current "
            "folder. Either build it here:\n"
            f"  cd {package.parent} && pip install -e .\n"
            "or use the installed package: run from another folder, or as `python -P ...`, which "
            "does not look in the current one (Python 3.11 or later).",
            name="flashattn_jit._C",
        )
    raise ImportError(
        f"flashattn_jit in {package} {why}; reinstall it: "
        "pip install --force-reinstall --no-deps flashattn_jit",
        name="flashattn_jit._C",
    )
