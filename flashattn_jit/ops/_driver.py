"""Whether this machine's driver runs an artifact; asked once an artifact, before it is loaded."""

from __future__ import annotations

import torch

from .. import _C
from ..errors import LaunchError
from ..jit.layers import too_old
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
