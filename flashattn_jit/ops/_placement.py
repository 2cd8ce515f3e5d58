"""Where a call runs: its target from the tensors' device, and what that target takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..codegen.target import (
    CPU_TARGETS,
    CUDA_TARGETS,
    compiled_target,
    cuda_dtypes,
    cuda_target,
    is_emulated,
    resolve_target,
    sm_version,
    takes_dtypes,
)
from ..errors import InputError, TargetError
from ..variants.dtypes import DTYPE_NAMES

_CPU = frozenset(CPU_TARGETS)


def on_cpu(target: str) -> bool:
    """Whether a resolved target's kernels are CPU code."""
    return target in _CPU


@cache
def device_target(index: int) -> str:
    """The CUDA target of a device. Raises TargetError where no kernels exist for it."""
    return cuda_target(*torch.cuda.get_device_capability(index))


def place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, target: str | None) -> str:
    """The target that a call on these tensors runs on, `target` where it is given.

    Raises:
        TargetError: `target` is unknown, or does not run on the tensors' device.
        InputError: the target does not take the tensors' dtypes.
    """
    if not q.is_cuda:
        target = resolve_target(target)
        if target not in _CPU:
            check_matrix_dtypes((q, k, v), target)
        return target
    index = q.device.index
    target = _checked(target, device_target(0 if index is None else index), q.device)
    check_matrix_dtypes((q, k, v), target)
    return target


def place_utility(tensor: torch.Tensor, target: str | None) -> str:
    """As `place`, for kernels that move data and take any dtype."""
    return place_on(tensor.device, target)


def place_on(device: torch.device, target: str | None) -> str:
    """As `place`, before there are tensors: dtypes are not checked."""
    if device.type != "cuda":
        return resolve_target(target)
    index = device.index
    return _checked(target, device_target(0 if index is None else index), device)


def _checked(target: str | None, own: str, device: torch.device) -> str:
    if target is None or target == own:
        return own
    if target in CUDA_TARGETS:
        # Compiled code runs on every device of its major version that is not older.
        if sm_version(target) // 10 == sm_version(own) // 10 and (
            sm_version(target) <= sm_version(own)
        ):
            return target
        raise TargetError(
            f"target {target!r} does not run on {device}, whose target is {own!r}; leave target "
            "out, or pass that one"
        )
    if is_emulated(target) or target in CPU_TARGETS:
        raise TargetError(
            f"target {target!r} runs on CPU tensors, but the tensors are on {device}; move them "
            "with .cpu(), or leave target out"
        )
    return resolve_target(target)  # says that it is unknown


def check_matrix_dtypes(tensors: Sequence[torch.Tensor], target: str) -> None:
    """q, k and v have one dtype that the matrix units of a CUDA target take."""
    q, k, v = (t.dtype for t in tensors)
    if takes_dtypes(target, (DTYPE_NAMES.get(q), DTYPE_NAMES.get(k), DTYPE_NAMES.get(v))):
        return
    allowed = [f"torch.{name}" for name in cuda_dtypes(target)]
    raise InputError(
        f"CUDA kernels of {compiled_target(target)} take q, k and v of one dtype, "
        f"{' or '.join(allowed)}; got q {q}, k {k}, v {v}. Convert them with .to({allowed[0]}), or "
        "call on CPU tensors without a CUDA target, where float32 is supported"
    )
