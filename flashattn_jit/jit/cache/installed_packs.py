"""Packs that wheels brought: being installed makes them read-only layers.

A distribution announces one by an entry point of the group `flashattn_jit.kernels`, whose value is
the name of a package of data: its `kernels.pack` lies in that package's folder, beside the
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

# No path can be made of it that leaves the folder.
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)


class InstalledPack(NamedTuple):
    """A pack that a distribution announces. There need be no file at `path`."""

    distribution: str
    version: str
    path: Path


def installed_packs() -> tuple[InstalledPack, ...]:
    """What the distributions on `sys.path` announce, by their normalised names.

    Of distributions of one name the first on `sys.path` counts, as for an import. Looked for once
    a process and value of `sys.path`: 1 to 10 ms for a hundred distributions.
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
        except Exception as error:  # of whoever wrote that metadata
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
        # In a ZIP archive on sys.path this is no file that can be opened: the layer says so.
        place = distribution.locate_file(f"{package.replace('.', '/')}/{PACK}")
        packs.append(InstalledPack(name, distribution.version, Path(str(place)).absolute()))
    return packs
