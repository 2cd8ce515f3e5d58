"""The CUDA toolkit of this machine: where nvcc is, and what its kernels need of a driver."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit import env

MISSING = (
    "no CUDA compiler was found: install a CUDA toolkit (12.8 or later compiles for every target; "
    "https://developer.nvidia.com/cuda-downloads, or pip install nvidia-cuda-nvcc "
    "nvidia-cuda-runtime), or set FLASHATTN_JIT_CUDA_HOME to the folder that holds bin/nvcc; no "
    "GPU and no driver are needed to compile"
)

# The oldest driver that runs what a toolkit of this major version compiles (minor version
# compatibility: CUDA Compatibility guide, table 1).
_MIN_DRIVERS = {11: 450, 12: 525, 13: 580}

# Toolkits that fajit/cuda/lean/cuda_runtime.h serves, as CUDART_VERSION says it: tried with the
# first and the last.
_LEAN = range(13000, 13060)

_HEADER = "cuda_runtime_api.h"
_INCLUDES = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
_LIBRARIES = (
    "lib64",
    "lib",
    "targets/x86_64-linux/lib",
    "targets/sbsa-linux/lib",
    "lib/x86_64-linux-gnu",
)
_STATIC_RUNTIME = "libcudart_static.a"
_VERSION = re.compile(rb"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder that holds bin/nvcc, the runtime's headers and its static library."""

    home: Path

    @property
    def nvcc(self) -> Path:
        """The compiler."""
        return self.home / "bin" / "nvcc"

    @property
    def libraries(self) -> Path | None:
        """The folder of libcudart_static.a, None where it is not installed."""
        folders = [self.home / name for name in _LIBRARIES]
        return next((f for f in folders if f.joinpath(_STATIC_RUNTIME).is_file()), None)

    def runtime_version(self) -> int:
        """CUDART_VERSION of its headers, such as 13000; 0 where it cannot be read."""
        for name in _INCLUDES:
            header = self.home / name / _HEADER
            if header.is_file() and (found := _VERSION.search(header.read_bytes())):
                return int(found[1])
        return 0

    def takes_lean_header(self) -> bool:
        """Whether our cut-down cuda_runtime.h may stand in for the toolkit's."""
        return self.runtime_version() in _LEAN


def find_toolkit() -> Toolkit | None:
    """The toolkit that the environment names, else on PATH, in /usr/local/cuda, or from wheels."""
    chosen = env.cuda_home()
    for home in [chosen] if chosen else _candidates():
        toolkit = Toolkit(home)
        # A script on PATH that runs an nvcc elsewhere has no headers beside it.
        if toolkit.nvcc.is_file() and any((home / i / _HEADER).is_file() for i in _INCLUDES):
            return toolkit
    return None


def cuda_version(compiler_version: str) -> tuple[int, int] | None:
    """(13, 0) from nvcc's words about itself."""
    found = _RELEASE.search(compiler_version)
    return (int(found[1]), int(found[2])) if found else None


def min_driver(cuda_major: int) -> int:
    """The lowest driver branch (such as 580) that runs what CUDA `cuda_major` compiled.

    A toolkit that is newer than this table is taken to need at least the newest known branch.
    """
    return _MIN_DRIVERS.get(cuda_major, max(_MIN_DRIVERS.values()))


def _candidates() -> Iterator[Path]:
    yield from env.cuda_homes()
    if on_path := shutil.which("nvcc"):
        yield Path(on_path).resolve().parent.parent
    yield Path("/usr/local/cuda")
    yield from sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"), reverse=True)
