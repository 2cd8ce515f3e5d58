"""`fa.doctor`: the checks in order.

Writes nothing but what the compiler's probe puts into a temporary folder, and never raises: a check
that fails by itself is an error of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...errors import EnvironmentVariableError
from . import cache, kernels, machine, tools
from .check import Check, named

Section = Callable[[], Check | Iterable[Check]]

_SECTIONS: dict[str, Section] = {
    "torch": machine.torch_version,
    "cpu": machine.cpu,
    "gpu": machine.gpu,
    "openmp": machine.openmp,
    "sources": machine.sources,
    "c++": tools.cxx,
    "ninja": tools.ninja,
    "cuda toolkit": tools.cuda,
    "cache": cache.layers,
    "kernels": kernels.residency,
    "locks": cache.locks,
    "environment": cache.environment,
}


class Checks(tuple[Check, ...]):
    """The checks of one `doctor`, in order. `str()` gives the report."""

    __slots__ = ()

    @property
    def healthy(self) -> bool:
        """Whether no check is an error."""
        return all(check.status != "error" for check in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def doctor() -> Checks:
    """Checks torch, CPU, compilers, CUDA, every layer of the cache, locks and the environment.

    Takes under three seconds. Where torch has CUDA, asks its driver for the devices and loads
    kernels of the cache on them, which starts CUDA in this process.

    >>> print(fa.doctor())
    """
    return Checks(check for name, section in _SECTIONS.items() for check in _run(name, section))


def _run(name: str, section: Section) -> list[Check]:
    try:
        found = section()
        return list(named(name, [found] if isinstance(found, Check) else found))
    except EnvironmentVariableError as wrong:
        return [Check(name, "error", f"cannot be checked: {wrong}", "correct or unset it")]
    except Exception as failure:
        words = f"{type(failure).__name__}: {failure}".strip()
        return [Check(name, "error", f"the check itself failed: {words}", "report this as a bug")]
