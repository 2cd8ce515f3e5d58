"""`doctor`: what on this machine would keep kernels from being compiled, kept, found or run.

Writes nothing but what the compiler's probe puts into a temporary folder, and never raises: a check
that fails by itself is an error of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import EnvironmentVariableError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `str()` gives it, with the remedy below.

    status: see `ok`, `warning` and `error`. detail: what was found. remedy: what to do; empty where
    nothing.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<7}  {self.name}: {self.detail}"
        return f"{line}\n         -> {self.remedy}" if self.remedy else line


def ok(detail: str, remedy: str = "") -> Check:
    """Nothing is amiss. `doctor` gives the checks of a section its name."""
    return Check("", "ok", detail, remedy)


def warning(detail: str, remedy: str) -> Check:
    """Something will be slower or is not available."""
    return Check("", "warning", detail, remedy)


def error(detail: str, remedy: str) -> Check:
    """Calls fail, or the cache is refused."""
    return Check("", "error", detail, remedy)


def named(name: str, checks: Iterable[Check]) -> Iterator[Check]:
    """The checks under a name, but for those that have one."""
    return (check if check.name else replace(check, name=name) for check in checks)


class Checks(tuple[Check, ...]):
    """The checks of one `doctor`, in order. `str()` gives the report."""

    __slots__ = ()

    @property
    def healthy(self) -> bool:
        """Whether no check is an error."""
        return all(check.status != "error" for check in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


Section = Callable[[], Check | Iterable[Check]]


def doctor() -> Checks:
    """Checks torch, CPU, compilers, CUDA, every layer of the cache, locks and the environment.

    Takes under three seconds. Where torch has CUDA, asks its driver for the devices, which starts
    CUDA in this process.

    >>> print(fa.doctor())
    """
    from . import _check_cache, _check_machine, _check_tools

    sections: Sequence[tuple[str, Section]] = (
        ("torch", _check_machine.torch_version),
        ("cpu", _check_machine.cpu),
        ("gpu", _check_machine.gpu),
        ("openmp", _check_machine.openmp),
        ("sources", _check_machine.sources),
        ("c++", _check_tools.cxx),
        ("ninja", _check_tools.ninja),
        ("cuda toolkit", _check_tools.cuda),
        ("cache", _check_cache.layers),
        ("locks", _check_cache.locks),
        ("environment", _check_cache.environment),
    )
    return Checks(check for name, section in sections for check in _run(name, section))


def _run(name: str, section: Section) -> list[Check]:
    try:
        found = section()
        return list(named(name, [found] if isinstance(found, Check) else found))
    except EnvironmentVariableError as wrong:
        return [Check(name, "error", f"cannot be checked: {wrong}", "correct or unset it")]
    except Exception as failure:
        words = f"{type(failure).__name__}: {failure}".strip()
        return [Check(name, "error", f"the check itself failed: {words}", "report this as a bug")]
