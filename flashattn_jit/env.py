"""Every environment variable that this package reads, and where its own files lie.

All variables start with FLASHATTN_JIT_.

* `FLASHATTN_JIT_BUILD_JOBS`: compilers that the build of this package itself runs at a time.
* `FLASHATTN_JIT_CACHE_DIR`: folder of compiled kernels. Default: the platform's cache folder,
  ~/.cache/flashattn_jit on Linux.
* `FLASHATTN_JIT_CACHE_INSTALLED`: `0`: kernels of installed wheels are not used. Default: `1`.
* `FLASHATTN_JIT_CACHE_MAX_BYTES`: the folder's size, such as `500M` or `2G`: when a kernel is added
  the least recently used ones go. Default: no limit.
* `FLASHATTN_JIT_CACHE_PATH`: further folders and pack files, searched in order and never written;
  separated by `:`. Default: none.
* `FLASHATTN_JIT_CACHE_REMOTE`: URL of a folder that fsspec reads, searched before a kernel is
  compiled. Default: none.
* `FLASHATTN_JIT_CACHE_REMOTE_TIMEOUT_S`: seconds that one look-up there may take, the transfer
  included. Default: 20.
* `FLASHATTN_JIT_CHECK_PAGES`: `1` checks that page indices are in range before each launch, which
  reads them from a device; `0` does not. Default: 1 for indices on the CPU, 0 for others.
* `FLASHATTN_JIT_COMPILE`: `missing` compiles what the cache lacks, `always` compiles once a
  process, `never` raises an error where a kernel is missing. Default: `missing`.
* `FLASHATTN_JIT_CUDA_HOME`: folder of the CUDA toolkit: holds bin/nvcc. Default: $CUDA_HOME, or
  where nvcc is.
* `FLASHATTN_JIT_CXX`: C++ compiler: a command, may have arguments. Default: $CXX, else c++.
* `FLASHATTN_JIT_EMULATOR_COPIES`: when asynchronous copies complete in the emulator: as `late` as
  waits allow, `early`, or at moments drawn from a seed: `random:7`. Default: `late`.
* `FLASHATTN_JIT_LOCK_DIR`: node-local folder of build locks. Default: a folder of the user in
  $XDG_RUNTIME_DIR, /dev/shm or the system's folder of temporary files.
* `FLASHATTN_JIT_LOCK_WAIT_S`: seconds to wait for another process' build. Default: 300.
* `FLASHATTN_JIT_LOG`: level of the logger `flashattn_jit`. Default: unset.
* `FLASHATTN_JIT_RECORD`: file to which the manifest of the kernels that ran is written when the
  process ends. Default: none.
* `FLASHATTN_JIT_TARGET`: target of calls on CPU tensors that name none: a CPU target that this
  machine runs. Default: the machine's own, see docs/guides/cpus.md.

Each is read when it is needed, so a change takes effect without a restart. The kernel templates and
headers are in a checkout, or inside an installed package.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from flashattn_jit import _C
from flashattn_jit.errors import EnvironmentVariableError

CompileMode = Literal["missing", "always", "never"]
EmulatorCopies = Literal["late", "early"] | int

_PREFIX = "FLASHATTN_JIT_"

VARIABLES = tuple(
    _PREFIX + name
    for name in (
        "BUILD_JOBS CACHE_DIR CACHE_INSTALLED CACHE_MAX_BYTES CACHE_PATH CACHE_REMOTE "
        "CACHE_REMOTE_TIMEOUT_S CHECK_PAGES COMPILE CUDA_HOME CXX EMULATOR_COPIES LOCK_DIR "
        "LOCK_WAIT_S LOG RECORD TARGET"
    ).split()
)
"""All known variables; setup.py reads BUILD_JOBS."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def cache_dir() -> Path:
    """The folder of compiled kernels. It need not exist.

    If the user has no home, a path that cannot be made. Raises EnvironmentVariableError for `~`
    without a home.
    """
    if value := _read("CACHE_DIR"):
        return _path("CACHE_DIR", value)
    import platformdirs

    # An older platformdirs leaves the ~, a newer one raises.
    with contextlib.suppress(RuntimeError):
        folder = Path(platformdirs.user_cache_dir("flashattn_jit", appauthor=False))
        if folder.is_absolute():
            return folder
    return Path(os.devnull) / "flashattn_jit"


def cache_installed() -> bool:
    """Whether kernels of installed wheels are layers.

    Raises EnvironmentVariableError for anything but 0 and 1.
    """
    return _switch("CACHE_INSTALLED") is not False


def cache_max_bytes() -> int | None:
    """The size limit of the cache, None for no limit. Raises EnvironmentVariableError."""
    value = _read("CACHE_MAX_BYTES")
    if not value:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise EnvironmentVariableError(f"{_PREFIX}CACHE_MAX_BYTES={value!r} {error}") from None


def parse_bytes(text: str) -> int:
    """``"500M"`` as a number of bytes; K, M, G and T are powers of 1024. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("must be a number of bytes, or one with K, M, G or T behind it")
    return int(found[1]) * _UNITS[found[2].upper()]


def format_bytes(value: float) -> str:
    """Bytes, such as ``312 KiB`` or ``1.2 GiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            digits = ".3g" if value < 1000 * factor else ".0f"
            return f"{value / factor:{digits}} {unit}"
    return f"{value:.0f} B"


def cache_path() -> tuple[Path, ...]:
    """Folders and pack files that are searched after the user's folder, in order.

    Raises EnvironmentVariableError for `~` without a home.
    """
    parts = _read("CACHE_PATH").split(os.pathsep)
    return tuple(_path("CACHE_PATH", part) for part in parts if part)


def cache_remote() -> str | None:
    """The URL of the remote layer, or None."""
    return _read("CACHE_REMOTE").rstrip("/") or None


def cache_remote_timeout_s() -> float:
    """Seconds that a look-up in the remote layer may take. Raises EnvironmentVariableError."""
    return _seconds("CACHE_REMOTE_TIMEOUT_S", "20")


def check_pages() -> bool | None:
    """Whether page indices are checked; None if unset: then it depends on their device.

    Raises EnvironmentVariableError for anything but 0 and 1.
    """
    return _switch("CHECK_PAGES")


def compile_mode() -> CompileMode:
    """When to compile. Raises EnvironmentVariableError for an unknown mode."""
    return cast(CompileMode, _choice("COMPILE", get_args(CompileMode)))


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit set by FLASHATTN_JIT_CUDA_HOME, or None.

    Raises EnvironmentVariableError for `~` without a home.
    """
    return _optional_path("CUDA_HOME")


def cuda_homes() -> list[Path]:
    """Folders of CUDA toolkits set by CUDA_HOME and CUDA_PATH."""
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    return [Path(value).absolute() for value in named if value]


def cxx() -> str:
    """The C++ compiler's command line."""
    return _read("CXX") or os.environ.get("CXX") or "c++"


def cxx_variable() -> str:
    """The variable that `cxx` comes from; empty for the default."""
    if _read("CXX"):
        return f"{_PREFIX}CXX"
    return "CXX" if os.environ.get("CXX") else ""


def emulator_copies() -> EmulatorCopies:
    """When asynchronous copies arrive in the emulator: a name, or the seed of random moments.

    Raises EnvironmentVariableError.
    """
    value = _read("EMULATOR_COPIES") or "late"
    if value in ("late", "early"):
        return cast(EmulatorCopies, value)
    found = re.fullmatch(r"random:(\d{1,18})", value, re.ASCII)
    if found is None:
        raise EnvironmentVariableError(
            f"{_PREFIX}EMULATOR_COPIES={value!r} must be one of late, early, random:SEED"
        )
    return int(found[1])


def lock_dir() -> Path | None:
    """The folder of build locks, or None if unset.

    Raises EnvironmentVariableError for `~` without a home.
    """
    return _optional_path("LOCK_DIR")


def lock_wait_s() -> float:
    """Seconds to wait for another process' build. Raises EnvironmentVariableError."""
    return _seconds("LOCK_WAIT_S", "300")


def record_path() -> Path | None:
    """The file for this process' manifest, or None.

    Raises EnvironmentVariableError for `~` without a home.
    """
    return _optional_path("RECORD")


def target() -> str:
    """The target of calls on CPU tensors that name none, unchecked; empty if unset.

    Every such call reads it: this takes 0.1 us of about 12; `os.environ.get` takes 1.5 us.
    """
    return _C.target_variable() or ""


def apply_log_level() -> None:
    """Sets the level of the logger `flashattn_jit`. Raises EnvironmentVariableError."""
    value = _read("LOG")
    if not value:
        return
    try:
        logging.getLogger("flashattn_jit").setLevel(value.upper())
    except ValueError:
        raise EnvironmentVariableError(
            f"{_PREFIX}LOG={value!r} must be a level: debug, info, warning, error"
        ) from None


def _switch(name: str) -> bool | None:
    value = _read(name)
    if value not in ("", "0", "1"):
        raise EnvironmentVariableError(f"{_PREFIX}{name}={value!r} must be 0 or 1")
    return value == "1" if value else None


def _choice(name: str, choices: tuple[str, ...]) -> str:
    """One of the choices, the first by default."""
    value = _read(name) or choices[0]
    if value not in choices:
        raise EnvironmentVariableError(
            f"{_PREFIX}{name}={value!r} must be one of {', '.join(choices)}"
        )
    return value


def _seconds(name: str, default: str) -> float:
    value = _read(name) or default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise EnvironmentVariableError(
            f"{_PREFIX}{name}={value!r} must be a number of seconds, 0 or more"
        )
    return seconds


def _optional_path(name: str) -> Path | None:
    value = _read(name)
    return _path(name, value) if value else None


def _path(name: str, value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:
        raise EnvironmentVariableError(
            f"{_PREFIX}{name}={value!r} begins with ~, and this user has no home: write it out"
        ) from None


def _read(name: str) -> str:
    return os.environ.get(_PREFIX + name, "")


# --- the package's own files ---------------------------------------------------------------------

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
    # Only a checkout has the second folder: beside an installed package are other packages.
    folders = (PACKAGE_DIR / "_data" / installed, PACKAGE_DIR.parent / checkout)
    for folder in folders:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"flashattn_jit's kernel sources are missing: neither "
        f"{' nor '.join(map(str, folders))} exists; reinstall the package"
    )
