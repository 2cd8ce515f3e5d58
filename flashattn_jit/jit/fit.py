"""Whether this machine can run an artifact; asked before it is loaded.

An artifact that needs other instructions, another machine or a newer driver is a miss with its
reason: the layers below may have one that fits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flashattn_jit.codegen.target import CPU_TARGETS, host_target, is_cuda
from flashattn_jit.jit import cuda_toolkit

_MAGIC = b"\x7fELF"
_MACHINES = {0x03: "x86", 0x28: "arm", 0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv"}


def unfit_target(target: str) -> str:
    """Why this machine cannot run a CPU target's code; empty where it can."""
    if target not in CPU_TARGETS:
        return ""
    if CPU_TARGETS.index(target) <= CPU_TARGETS.index(host_target()):
        return ""
    return f"it needs the instructions of {target}, and this machine runs at most {host_target()}"


def unfit_machine(head: bytes) -> str:
    """Why this machine cannot load an ELF file that begins with `head`; empty where it can."""
    own = _own_head()
    if not head.startswith(_MAGIC) or not own or _kind(head) == _kind(own):
        return ""
    return f"it is code for {machine_name(head)}, and this machine is {machine_name(own)}"


def unfit_driver(target: str, needed: object) -> str:
    """Why this machine's driver cannot run a CUDA artifact; empty where it can.

    Empty as well where there is no driver: then the artifact is emulated, or only looked at.
    """
    if not is_cuda(target) or not isinstance(needed, int):
        return ""
    version = driver_version()
    if not version or not too_old(version, needed):
        return ""
    return (
        f"it needs driver {needed} or newer, and this machine's supports CUDA "
        f"{version // 1000}.{version % 1000 // 10}"
    )


@cache
def driver_version() -> int:
    """The CUDA version that the driver supports, 12040 for 12.4; 0 where there is no driver."""
    import torch

    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    try:
        return int(ask()) if ask else 0
    except RuntimeError:
        return 0


def too_old(driver_version: int, needed: int) -> bool:
    """Whether a driver that supports CUDA `driver_version` (12040 for 12.4) is below a branch.

    Within one major version of CUDA its first driver runs what every later compiler made, as
    artifacts hold machine code and no PTX.
    """
    major = driver_version // 1000
    return major < 11 or cuda_toolkit.min_driver(major) < needed


@cache
def _own_head() -> bytes:
    try:
        with Path("/proc/self/exe").open("rb") as file:
            head = file.read(20)
    except OSError:
        return b""
    return head if head.startswith(_MAGIC) and len(head) == 20 else b""


def _kind(head: bytes) -> tuple[bytes, bytes]:
    # Word size and byte order; the machine.
    return head[4:6], head[18:20]


def machine_name(head: bytes) -> str:
    """The machine that an ELF file is for, by its first 20 bytes or more, such as "x86_64"."""
    number = int.from_bytes(head[18:20], "big" if head[5:6] == b"\x02" else "little")
    return _MACHINES.get(number, f"machine {number}")
