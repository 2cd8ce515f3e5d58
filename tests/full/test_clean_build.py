"""The sdist has all sources of the extension: its wheel is compiled from the sdist alone."""

from __future__ import annotations

import sysconfig
import zipfile
from pathlib import Path

from tests.test_packaging import build, sdist

__all__ = ["sdist"]  # a fixture


def test_the_extension_is_compiled_from_the_sdist(sdist: Path, tmp_path: Path) -> None:
    assert not list(sdist.rglob("*.so"))
    with zipfile.ZipFile(build("build_wheel", sdist, tmp_path)) as archive:
        assert f"flashattn_jit/_C{sysconfig.get_config_var('EXT_SUFFIX')}" in archive.namelist()
