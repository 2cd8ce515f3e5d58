"""`fa.merge_states`: combine partial attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .. import _C
from ..codegen.spec import on_cpu, utility_target
from ..errors import InputError
from ..torch_modes import is_direct
from .arguments import checks
from .torch_ops import as_op


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor] | None = None,
    *,
    target: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of the union of disjoint key sets, from the state of each.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): FlashInfer (arXiv
    2501.01005), section 2.2. States without keys (lse = -inf) are ignored, even if out is NaN.

    Args:
        outs: fp32 tensors of one shape [..., head_dim_v], 3-D or 4-D, as ``partial=True`` returns,
            on one device.
        lses: fp32 tensors [...]; None for pointwise variants, whose sums are added.
        target: a CUDA target on CUDA tensors, or one such as ``"emulated:sm_80"`` on CPU tensors;
            the device's own by default.

    Returns:
        (out, lse) fp32; lse is None for pointwise states.

    Raises:
        InputError: shapes, dtypes, devices or counts do not agree.
        TargetError: `target` is unknown, or does not run on that device.

    Example:
        >>> out, lse = fa.merge_states([out_a, out_b], [lse_a, lse_b])
    """
    outs, lses = _states("outs", outs), None if lses is None else _states("lses", lses)
    if not outs:
        raise InputError("outs is empty; merge_states needs at least one state")
    if lses is not None and len(lses) != len(outs):
        raise InputError(f"lses has {len(lses)} states, but outs has {len(outs)}")
    first = outs[0]
    for i, out in enumerate(outs):
        _check_state(f"outs[{i}]", out)
        if out.shape != first.shape:
            raise InputError(f"outs[{i}] is {list(out.shape)}, but outs[0] is {list(first.shape)}")
        if out.dim() not in (3, 4) or out.shape[-1] < 1:
            raise InputError(
                f"outs[{i}] must be [batch, heads, q_len, head_dim_v] or [tokens, heads, "
                f"head_dim_v], got {list(out.shape)}"
            )
    for i, lse in enumerate(lses or ()):
        _check_state(f"lses[{i}]", lse)
        if lse.shape != first.shape[:-1]:
            raise InputError(
                f"lses[{i}] is {list(lse.shape)}, but outs have rows {list(first.shape[:-1])}"
            )
    named = {f"outs[{i}]": t for i, t in enumerate(outs)}
    checks.check_devices(named | {f"lses[{i}]": t for i, t in enumerate(lses or ())})
    checks.check_grad([*outs, *(lses or ())])
    given = list(lses or ())
    if torch.compiler.is_dynamo_compiling() or not is_direct(*outs, *given):
        out, lse = as_op.merge(outs, given, target)
    else:
        out, lse = merge(outs, given, target=target)
    return out, lse if lses is not None else None


def _states(name: str, states: object) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):  # its first dim is that of the states
        checks.check_readable(name, states)
        if states.dim() == 0:
            raise InputError(f"{name} must be a sequence of tensors, got a tensor without dims")
    if not isinstance(states, Iterable):
        raise InputError(f"{name} must be a sequence of tensors, got {type(states).__name__}")
    return list(states)


def _check_state(name: str, tensor: torch.Tensor) -> None:
    checks.check_readable(name, tensor)
    if tensor.dtype != torch.float32 or tensor.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"{name} must be float32 on cpu or cuda (a partial state), got {tensor.dtype} on "
            f"{tensor.device}"
        )


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, target: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's implementation; `merge_states` has checked the states."""
    target = utility_target(outs[0], target)
    if not on_cpu(target):
        from .launching import merge_device

        return merge_device.merge(outs, lses, target)
    out = torch.empty(outs[0].shape, dtype=torch.float32, device="cpu")
    lse = torch.empty(outs[0].shape[:-1] if lses else 0, dtype=torch.float32, device="cpu")
    outs = [o if o.stride(-1) == 1 else o.contiguous() for o in outs]
    _C.merge_states(
        [o.data_ptr() for o in outs],
        [_three(o.stride()[:-1]) for o in outs],
        [x.data_ptr() for x in lses],
        [_three(x.stride()) for x in lses],
        _three(out.shape[:-1], fill=1),
        out.shape[-1],
        out.data_ptr(),
        _three(out.stride()[:-1]),
        lse.data_ptr() if lses else 0,
        _three(lse.stride()) if lses else (0, 0, 0),
        torch.get_num_threads(),
    )
    return out, lse


def _three(dims: Sequence[int], fill: int = 0) -> tuple[int, int, int]:
    """Two or three numbers as three, `fill` first."""
    a, b, c = (fill,) * (3 - len(dims)) + tuple(dims)
    return a, b, c
