"""Packs of installed wheels, which are read-only layers.

A distribution announces a pack by an entry point of the group `flashattn_jit.kernels`, whose value
is the name of a package of data: `kernels.pack` is in that package's folder, beside the
distribution's metadata. Only metadata is read; nothing of the distribution is imported.
"""

from __future__ import annotations

import logging
import re
import sys
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

GROUP = "flashattn_jit.kernels"
PACK = "kernels.pack"

log = logging.getLogger(__name__)

# Excludes path traversal.
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)


class InstalledPack(NamedTuple):
    """A pack that a distribution announces. `path` need not exist."""

    distribution: str
    version: str
    path: Path


def installed_packs() -> tuple[InstalledPack, ...]:
    """The packs of the distributions on `sys.path`, in the order of their normalised names.

    Of distributions with one name the first on `sys.path` counts, as for an import. The result is
    cached for each value of `sys.path`; a search takes 1 to 10 ms for a hundred distributions.
    """
    return _installed(tuple(p for p in sys.path if isinstance(p, str) and "\0" not in p))


@lru_cache(maxsize=4)
def _installed(search_path: tuple[str, ...]) -> tuple[InstalledPack, ...]:
    found: dict[str, list[InstalledPack]] = {}
    for distribution in distributions(path=list(search_path)):
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = str(distribution.metadata["Name"])
            packs = list(_announced(name, distribution))
        except Exception as error:  # invalid metadata may raise anything
            log.warning("the entry points of a distribution cannot be read: %s", error)
            continue
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), packs)
    return tuple(one for name in sorted(found) for one in found[name])


def _announced(name: str, distribution: Distribution) -> list[InstalledPack]:
    packages = {e.value for e in distribution.entry_points if e.group == GROUP}
    packs = []
    for package in sorted(packages):
        if not _PACKAGE.fullmatch(package):
            log.warning("%s announces kernels in %r, which names no package", name, package[:80])
            continue
        # Inside a ZIP archive on sys.path the file cannot be opened: the layer reports that.
        path = Path(str(distribution.locate_file(f"{package.replace('.', '/')}/{PACK}")))
        packs.append(InstalledPack(name, distribution.version, path.absolute()))
    return packs
