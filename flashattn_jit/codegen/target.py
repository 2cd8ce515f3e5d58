"""Targets: what code is generated for.

A target is a name such as ``cpu:avx512_bf16``. CPU targets are levels: a machine runs its own
level and every lower one.
"""

from __future__ import annotations

from functools import cache

from .. import _C
from ..errors import TargetError

CPU_LEVELS = ("generic", "avx2", "avx512", "avx512_bf16")
"""CPU instruction-set levels, ascending. x86-64 baseline; AVX2 + FMA + F16C; AVX-512 F/BW/DQ/VL;
the same with AVX512-BF16 dot products."""

CPU_TARGETS = tuple(f"cpu:{level}" for level in CPU_LEVELS)

LANES = {"cpu:generic": 4, "cpu:avx2": 8, "cpu:avx512": 16, "cpu:avx512_bf16": 16}
"""fp32 values in one vector register."""


@cache
def host_target() -> str:
    """The highest CPU target that this machine runs, for example ``"cpu:avx512_bf16"``."""
    return f"cpu:{_C.cpu_isa()}"


def resolve_target(target: str | None) -> str:
    """`target` checked, or the host's best when None.

    Raises:
        TargetError: the name is unknown, or this machine cannot run it.
    """
    if target is None:
        return host_target()
    if target not in CPU_TARGETS:
        raise TargetError(f"unknown target {target!r}; known targets: {', '.join(CPU_TARGETS)}")
    if CPU_TARGETS.index(target) > CPU_TARGETS.index(host_target()):
        raise TargetError(
            f"target {target!r} needs instructions that this machine lacks; the highest target "
            f"that runs here is {host_target()!r}"
        )
    return target


def matrix_dtype(target: str, q_dtype: str) -> str:
    """The dtype in which a target multiplies matrices for queries of `q_dtype`.

    bfloat16 where the machine has bf16 dot products, else float32 (rows are converted on load).
    """
    return "bfloat16" if q_dtype == "bfloat16" and target == "cpu:avx512_bf16" else "float32"
