"""Exit codes, in one table: what ended a command, and the errors that mean it."""

from __future__ import annotations

from dataclasses import dataclass

import click

from .. import errors
from ..jit.cache.entry import CorruptEntryError


@dataclass(frozen=True, slots=True)
class ExitCode:
    """A code, a word for it, what it means, and the errors that end a command with it."""

    code: int
    name: str
    meaning: str
    errors: tuple[type[BaseException], ...] = ()


TABLE = (
    ExitCode(0, "ok", "done, nothing wrong"),
    ExitCode(1, "failed", "an error that no other code names"),
    ExitCode(
        2,
        "usage",
        "an unknown command, option, value, param or environment value",
        (
            click.UsageError,
            errors.InputError,
            errors.ParamError,
            errors.EnvironmentVariableError,
        ),
    ),
    ExitCode(
        3,
        "missing",
        "a kernel is in no layer, and compiling is forbidden",
        (errors.MissingKernelError,),
    ),
    ExitCode(4, "compile", "the compiler is missing or failed", (errors.CompileError,)),
    ExitCode(5, "corrupt", "a cache entry is not what was published", (CorruptEntryError,)),
    ExitCode(
        6,
        "unsafe",
        "others could put code into a cache folder: wrong owner, mode or link",
        (errors.UnsafeCacheError,),
    ),
    ExitCode(7, "cache", "the cache cannot be used for another reason", (errors.CacheError,)),
    ExitCode(8, "manifest", "a manifest's line is malformed", (errors.ManifestError,)),
    ExitCode(9, "pack", "a pack is malformed or cannot be written", (errors.PackError,)),
    ExitCode(10, "variant", "a variant cannot become a kernel", (errors.VariantError,)),
    ExitCode(
        11, "target", "a target is unknown, or this machine cannot run it", (errors.TargetError,)
    ),
    ExitCode(12, "checks", "`doctor` found an error"),
    ExitCode(13, "files", "a file cannot be read or written", (OSError,)),
    ExitCode(130, "interrupted", "stopped by Ctrl-C", (KeyboardInterrupt, click.Abort)),
)

FAILED, MISSING, COMPILE, CORRUPT, CHECKS = 1, 3, 4, 5, 12


def exit_code(error: BaseException) -> ExitCode:
    """The code of an error: that of the nearest of its classes which the table names."""
    for cls in type(error).__mro__:
        for row in TABLE:
            if cls in row.errors:
                return row
    return TABLE[FAILED]
