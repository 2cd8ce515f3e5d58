"""Whether this machine's driver runs an artifact; asked once an artifact, before it is loaded."""

from __future__ import annotations

import torch

from .. import _C
from ..errors import LaunchError
from ..jit import cuda_toolkit
from ..jit.module import min_driver

_checked: set[str] = set()


def check(module: _C.Module) -> None:
    """Raises LaunchError where the driver is older than the artifact's compiler needs."""
    if module.path in _checked:
        return
    needed = min_driver(module)
    version = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    if needed is not None and too_old(version, needed):
        raise LaunchError(
            f"this machine's driver supports CUDA {version // 1000}.{version % 1000 // 10}, but "
            f"the kernel needs driver {needed} or newer: update the driver, or compile with an "
            f"older toolkit (FLASHATTN_JIT_CUDA_HOME)\n  artifact: {module.path}"
        )
    _checked.add(module.path)


def too_old(driver_version: int, needed: int) -> bool:
    """Whether a driver that supports CUDA `driver_version` (12040 for 12.4) is below a branch.

    Within one major version of CUDA its first driver runs what every later compiler made, as
    artifacts hold machine code and no PTX.
    """
    major = driver_version // 1000
    return major < 11 or cuda_toolkit.min_driver(major) < needed
