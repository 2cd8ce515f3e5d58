"""One thing that `doctor` has looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ...errors import FlashAttnJitError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `str()` gives it, with the remedy below.

    status: "warning" where something will be slower or is not available, "error" where calls fail
    or the cache is refused. detail: what was found. remedy: what to do; empty where nothing.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<7}  {self.name}: {self.detail}"
        return f"{line}\n         -> {self.remedy}" if self.remedy else line


# `doctor` gives the checks of a section its name.
ok = partial(Check, "", "ok")
warning = partial(Check, "", "warning")
error = partial(Check, "", "error")


def refused(failure: Exception, remedy: str = "correct or unset it") -> Check:
    """An error check with the message of an exception.

    Errors of this package end with their remedy, after a semicolon. remedy: for all others.
    """
    detail, _, last = str(failure).rpartition("; ")
    own = bool(detail) and isinstance(failure, FlashAttnJitError)
    return error(detail, last) if own else error(str(failure), remedy)


def named(name: str, checks: Iterable[Check]) -> Iterator[Check]:
    """The checks under a name, but for those that have one."""
    return (check if check.name else replace(check, name=name) for check in checks)
