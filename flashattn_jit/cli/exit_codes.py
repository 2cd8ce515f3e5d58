"""Exit codes, in one table: what ended a command, and the errors that mean it."""

from __future__ import annotations

from typing import NamedTuple

import click

from .. import errors
from ..jit.cache.entry import CorruptEntryError


class ExitCode(NamedTuple):
    """A code, a word for it, and what it means."""

    code: int
    name: str
    meaning: str


TABLE = (
    ExitCode(0, "ok", "done, nothing wrong"),
    ExitCode(1, "failed", "an error that no other code names"),
    ExitCode(2, "usage", "an unknown command, option, value, param or environment value"),
    ExitCode(3, "missing", "a kernel is in no layer, and compiling is forbidden"),
    ExitCode(4, "compile", "the compiler is missing or failed"),
    ExitCode(5, "corrupt", "a cache entry is not what was published"),
    ExitCode(6, "unsafe", "others could put code into a cache folder: wrong owner, mode or link"),
    ExitCode(7, "cache", "the cache cannot be used for another reason"),
    ExitCode(8, "manifest", "a manifest is empty, or a line of it is malformed"),
    ExitCode(9, "pack", "a pack is malformed or cannot be written"),
    ExitCode(10, "variant", "a variant cannot become a kernel"),
    ExitCode(11, "target", "a target is unknown, or this machine cannot run it"),
    ExitCode(12, "checks", "`doctor` found an error"),
    ExitCode(13, "files", "a file cannot be read or written"),
    ExitCode(130, "interrupted", "stopped by Ctrl-C"),
)

FAILED, MISSING, COMPILE, CORRUPT, CHECKS = 1, 3, 4, 5, 12

_ERRORS: dict[type[BaseException], int] = {
    click.UsageError: 2,
    errors.InputError: 2,
    errors.ParamError: 2,
    errors.EnvironmentVariableError: 2,
    errors.MissingKernelError: MISSING,
    errors.CompileError: COMPILE,
    CorruptEntryError: CORRUPT,
    errors.UnsafeCacheError: 6,
    errors.CacheError: 7,
    errors.ManifestError: 8,
    errors.PackError: 9,
    errors.VariantError: 10,
    errors.TargetError: 11,
    OSError: 13,
    KeyboardInterrupt: 130,
    click.Abort: 130,
}


def exit_code(error: BaseException) -> ExitCode:
    """The code of an error: that of the nearest of its classes which has one."""
    code = next((_ERRORS[cls] for cls in type(error).__mro__ if cls in _ERRORS), FAILED)
    return next(row for row in TABLE if row.code == code)
