"""Every environment variable that this package reads. All start with FLASHATTN_JIT_.

| variable                  | meaning                                           | default        |
| ------------------------- | ------------------------------------------------- | -------------- |
| FLASHATTN_JIT_CACHE_DIR   | folder of compiled kernels                        | platformdirs'  |
| FLASHATTN_JIT_CHECK_PAGES | `1` checks that page indices are in range before  | 1 for indices  |
|                           | each launch, which reads them from a device; `0`  | on the CPU, 0  |
|                           | does not                                          | for others     |
| FLASHATTN_JIT_COMPILE     | `missing` compiles what the cache lacks, `always` | `missing`      |
|                           | compiles once a process, `never` is an error      |                |
| FLASHATTN_JIT_CUDA_HOME   | folder of the CUDA toolkit: holds bin/nvcc        | $CUDA_HOME, or |
|                           |                                                   | where nvcc is  |
| FLASHATTN_JIT_CXX         | C++ compiler: a command, may have arguments       | $CXX, else c++ |
| FLASHATTN_JIT_EMULATOR_COPIES | when asynchronous copies arrive in the        | `late`         |
|                           | emulator: as `late` as waits allow, or `early`    |                |
| FLASHATTN_JIT_LOCK_DIR    | node-local folder of build locks                  | jit/locks.py's |
| FLASHATTN_JIT_LOCK_WAIT_S | seconds to wait for another process' build        | 300            |
| FLASHATTN_JIT_LOG         | level of the logger `flashattn_jit`               | unset          |

Each is read when it is needed, so a change takes effect without a restart.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, get_args

from flashattn_jit.errors import EnvironmentVariableError

CompileMode = Literal["missing", "always", "never"]
EmulatorCopies = Literal["late", "early"]

_PREFIX = "FLASHATTN_JIT_"


def cache_dir() -> Path:
    """The folder of compiled kernels. It need not exist yet."""
    if value := _read("CACHE_DIR"):
        return Path(value).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("flashattn_jit", appauthor=False))


def check_pages() -> bool | None:
    """Whether page indices are checked; None where each call decides by their device.

    Raises EnvironmentVariableError for anything but 0 and 1.
    """
    value = _read("CHECK_PAGES")
    if value not in ("", "0", "1"):
        raise EnvironmentVariableError(f"{_PREFIX}CHECK_PAGES={value!r} must be 0 or 1")
    return value == "1" if value else None


def compile_mode() -> CompileMode:
    """When to compile. Raises EnvironmentVariableError for an unknown mode."""
    value = _read("COMPILE") or "missing"
    for mode in get_args(CompileMode):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise EnvironmentVariableError(
        f"{_PREFIX}COMPILE={value!r} must be one of {', '.join(get_args(CompileMode))}"
    )


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit, where one is set for this package."""
    value = _read("CUDA_HOME")
    return Path(value).expanduser().absolute() if value else None


def cuda_homes() -> list[Path]:
    """Folders that other programs' variables name as the CUDA toolkit's."""
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    return [Path(value).absolute() for value in named if value]


def cxx() -> str:
    """The C++ compiler's command line."""
    return _read("CXX") or os.environ.get("CXX") or "c++"


def emulator_copies() -> EmulatorCopies:
    """When asynchronous copies arrive in the emulator. Raises EnvironmentVariableError."""
    value = _read("EMULATOR_COPIES") or "late"
    for choice in get_args(EmulatorCopies):
        if value == choice:
            return choice  # type: ignore[no-any-return]
    raise EnvironmentVariableError(
        f"{_PREFIX}EMULATOR_COPIES={value!r} must be one of {', '.join(get_args(EmulatorCopies))}"
    )


def lock_dir() -> Path | None:
    """The folder of build locks, where one is set."""
    value = _read("LOCK_DIR")
    return Path(value).absolute() if value else None


def lock_wait_s() -> float:
    """Seconds to wait for another process' build. Raises EnvironmentVariableError."""
    value = _read("LOCK_WAIT_S") or "300"
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise EnvironmentVariableError(
            f"{_PREFIX}LOCK_WAIT_S={value!r} must be a number of seconds, 0 or more"
        )
    return seconds


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


def _read(name: str) -> str:
    return os.environ.get(_PREFIX + name, "")
