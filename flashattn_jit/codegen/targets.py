"""Targets as data: what code is generated for, and which machines and devices run it.

A CPU target is a row of `CPU_ROWS`. Rows are partially ordered by what they include: a machine that
runs a target runs those that it includes. A CUDA target is an architecture: ``sm_80`` runs on
devices of its major version that are not older, ``sm_90a``, which may use instructions that later
devices lack, on devices of compute capability 9.0 alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from ..errors import TargetError

# --- CPUs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """One instruction set that CPU kernels are compiled for.

    Args:
        name: as users write it.
        lanes: fp32 values in one vector register.
        machine: the architecture, as `os.uname` names it; empty for any.
        includes: targets whose kernels run wherever this one's do, and by those what they include.
        features: what `_C.cpu_features` must report, beyond what the included targets need.
        fast_with: what it reports where the target is faster than those that it includes.
        flags: of the compiler, beside those of all targets.
        bf16_rate: bf16 products a clock over fp32 ones; 0 without instructions for them.
        fp16: whether kernels add products of codes as halves.
        amx: whether kernels use AMX tiles.
    """

    name: str
    lanes: int
    machine: str = ""
    includes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    fast_with: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    bf16_rate: int = 0
    fp16: bool = False
    amx: bool = False


_V4_VNNI = ("-march=x86-64-v4", "-mavx512vnni")
_V4_BF16 = (*_V4_VNNI, "-mavx512bf16")

CPU_ROWS = {
    row.name: row
    for row in (
        CpuTarget("cpu:generic", 4),
        CpuTarget(
            "cpu:avx2", 8, "x86_64", ("cpu:generic",), ("x86-64-v3",), flags=("-march=x86-64-v3",)
        ),
        CpuTarget(
            "cpu:avx512", 16, "x86_64", ("cpu:avx2",), ("x86-64-v4",), flags=("-march=x86-64-v4",)
        ),
        CpuTarget(
            "cpu:avx512_vnni", 16, "x86_64", ("cpu:avx512",), ("avx512_vnni",), flags=_V4_VNNI
        ),
        # AVX512-FP16 and AMX are written as asm: compilers without their flags build them too.
        CpuTarget(
            "cpu:avx512_fp16", 16, "x86_64", ("cpu:avx512_vnni",), ("avx512_fp16",),
            flags=_V4_VNNI, fp16=True,
        ),
        CpuTarget(
            "cpu:avx512_bf16", 16, "x86_64", ("cpu:avx512_vnni",), ("avx512_bf16",),
            ("fast_avx512_bf16",), _V4_BF16, bf16_rate=2,
        ),
        CpuTarget(
            "cpu:amx_bf16", 16, "x86_64", ("cpu:avx512_fp16", "cpu:avx512_bf16"),
            ("amx_tile", "amx_bf16"), flags=_V4_BF16, bf16_rate=16, fp16=True, amx=True,
        ),
    )
}  # fmt: skip
"""By name. A row stands after those that it includes, and a machine takes the last that it runs and
whose `fast_with` it reports."""

CPU_TARGETS = tuple(CPU_ROWS)

_BASELINE_FLAGS = {"x86_64": ("-march=x86-64",)}
"""Flags of targets that name none, by machine; elsewhere the compiler's default is the baseline."""


def machine() -> str:
    """This machine's architecture, such as ``"x86_64"`` or ``"aarch64"``."""
    return os.uname().machine


def included(target: str) -> tuple[str, ...]:
    """The CPU targets whose kernels run where those of `target` do, itself last.

    >>> included("cpu:avx512")
    ('cpu:generic', 'cpu:avx2', 'cpu:avx512')
    """
    found = {target}
    for row in reversed(CPU_ROWS.values()):
        if row.name in found:
            found.update(row.includes)
    return tuple(name for name in CPU_ROWS if name in found)


def runnable_cpu_targets(features: Collection[str]) -> tuple[str, ...]:
    """The CPU targets that this machine runs, where it has these features, in the table's order."""
    return tuple(
        name
        for name, row in CPU_ROWS.items()
        if row.machine in ("", machine())
        and all(set(CPU_ROWS[other].features) <= set(features) for other in included(name))
    )


def best_cpu_target(features: Collection[str]) -> str:
    """The last CPU target of the table that this machine, with these features, runs fast."""
    runs = runnable_cpu_targets(features)
    return [name for name in runs if set(CPU_ROWS[name].fast_with) <= set(features)][-1]


def compiled_here(target: str) -> bool:
    """Whether compilers of this machine make code for a CPU target, whether or not it runs it."""
    return CPU_ROWS[target].machine in ("", machine())


def cpu_flags(target: str) -> tuple[str, ...]:
    """The compiler's flags for the instruction set of a CPU target, on this machine."""
    return CPU_ROWS[target].flags or _BASELINE_FLAGS.get(machine(), ())


def has_amx(target: str) -> bool:
    """Whether kernels of `target` use AMX tiles."""
    return CPU_ROWS[target].amx


# --- CUDA ----------------------------------------------------------------------------------------

CUDA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""CUDA targets, ascending. A suffixed one, ``sm_90a``, follows the one without."""

SPECIFIC_TARGETS = ("sm_90a",)
"""Targets of kernels that calls on the target without the suffix choose by themselves."""

CODE_TARGETS = (*CUDA_TARGETS, *SPECIFIC_TARGETS)
"""What CUDA kernels are compiled for."""

EMULATED = "emulated:"
"""What stands before a CUDA target whose PTX is to run on the CPU."""

EMULATED_TARGETS = tuple(EMULATED + target for target in CUDA_TARGETS)


def is_cuda(target: str) -> bool:
    """Whether `target` is compiled by nvcc."""
    return target.startswith("sm_")


def is_emulated(target: str) -> bool:
    """Whether the kernels of `target` run in the emulator."""
    return target.startswith(EMULATED)


def compiled_target(target: str) -> str:
    """The target that code is compiled for: ``sm_80`` for ``emulated:sm_80``, else itself."""
    return target.removeprefix(EMULATED)


def called_target(target: str) -> str:
    """The target of calls that choose kernels of `target`: ``sm_90`` for ``sm_90a``."""
    return architecture(target) if target in SPECIFIC_TARGETS else target


def sm_version(target: str) -> int:
    """80 for ``sm_80``, 90 for ``sm_90a``. Raises TargetError for what names no architecture."""
    name = compiled_target(target)
    number = name.removeprefix("sm_").removesuffix("a")
    if not is_cuda(name) or not number.isdecimal():
        raise TargetError(
            f"{target!r} is no CUDA target: that is sm_ and a version, such as sm_90, and it may "
            "end with a, as sm_90a, for devices of that version alone; nvcc's suffix f, for those "
            "of a family, is not supported"
        )
    return int(number)


def architecture(target: str) -> str:
    """What devices of a CUDA target are: ``sm_90`` for ``sm_90``, ``sm_90a``, ``emulated:sm_90a``.

    Tables of what devices have are by it.
    """
    return f"sm_{sm_version(target)}"


def runs_on(target: str, major: int, minor: int) -> bool:
    """Whether code for a CUDA target runs on devices of compute capability `major`.`minor`."""
    own_major, own_minor = divmod(sm_version(target), 10)
    if compiled_target(target) != architecture(target):
        return (own_major, own_minor) == (major, minor)
    return own_major == major and own_minor <= minor
