"""`fa.merge_states`: combine partial attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .. import _C
from ..codegen.spec import Q_DTYPES, on_cpu, target_on_device
from ..errors import InputError
from ..torch_modes import increment_version, is_direct
from ..variants.ir.dtypes import DTYPE_NAMES
from .arguments import checks
from .torch_ops import as_op


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    target: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of the union of disjoint key sets, from the state of each.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): FlashInfer (arXiv
    2501.01005), section 2.2. States without keys (lse = -inf) are ignored, even if out is NaN.

    Args:
        outs: a list or tuple of fp32 tensors of one shape [..., head_dim_v], 3-D or 4-D, as
            ``partial=True`` returns, on one device.
        lses: fp32 tensors [...]; None for pointwise variants, whose sums are added.
        dtype: of the merged out: float32 (the default), bfloat16 or float16. It is rounded once.
        out: tensor to write the merged out to, in its own dtype. It may be ``outs[0]``, which is
            then merged in place; it may share no memory with other inputs.
        lse: fp32 tensor [...] to write the merged lse to; it may be ``lses[0]``.
        mask: bool tensor of rows [...], or of the first dims of rows, such as [num_q_tokens]; dims
            of size 1 are broadcast. Rows where it is False are not merged: they get the state of
            ``outs[0]`` as it is, so that in place they are left untouched, as by FlashInfer's
            ``merge_state_in_place``.
        target: a CUDA target on CUDA tensors, or one such as ``"emulated:sm_80"`` on CPU tensors;
            the device's own by default.

    Returns:
        (out, lse), lse fp32; lse is None for pointwise states.

    Raises:
        InputError: shapes, dtypes, devices or counts do not agree, or a given result shares memory
            with another tensor.
        GradError: a tensor requires grad while grad mode is on.
        TargetError: `target` is unknown, or does not run on that device.

    Example:
        >>> out, lse = fa.merge_states([out_a, out_b], [lse_a, lse_b])
        >>> fa.merge_states([out_a, out_b], [lse_a, lse_b], out=out_a, lse=lse_a, mask=has_prefix)
    """
    outs, lses = _states("outs", outs), None if lses is None else _states("lses", lses)
    _check_states(outs, lses)
    given = {"out": out, "lse": lse, "mask": mask}
    named = {name: checks.check_readable(name, t) for name, t in given.items() if t is not None}
    named |= {f"outs[{i}]": t for i, t in enumerate(outs)}
    named |= {f"lses[{i}]": t for i, t in enumerate(lses or ())}
    checks.check_devices(named)
    states = {name: x for name, x in named.items() if name not in given}
    checks.check_grad(list(states.values()), list(states))
    for name, tensor in given.items():
        if tensor is not None:
            checks.check_out_grad(tensor, name)
            if not torch.compiler.is_dynamo_compiling():  # which has no lazy tensors
                checks.check_not_lazy(name, tensor)
    dtype = _result_dtype(dtype, out)
    if lse is not None and lses is None:
        raise InputError("lse is given without lses: pointwise states have no log-sum-exp")
    if mask is not None:
        _check_mask(mask, outs[0].shape[:-1])
    merging = merge_into
    if torch.compiler.is_dynamo_compiling() or not is_direct(*named.values()):
        merging = as_op.merge
    out, lse = merging(outs, lses or [], mask, dtype, out, lse, target)
    return out, lse if lses is not None else None


def _states(name: str, states: object) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):  # which dim is that of the states is not known
        checks.check_readable(name, states)
        raise InputError(
            f"{name} must be a sequence of tensors, one a state, got a tensor of shape "
            f"{list(states.shape)}; pass {name}.unbind(0) where its dim 0 is that of the states, "
            f"{name}.unbind(1) for FlashInfer's [tokens, states, heads, ...]"
        )
    if not isinstance(states, Iterable):
        raise InputError(f"{name} must be a sequence of tensors, got {type(states).__name__}")
    return list(states)


def _check_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor] | None) -> None:
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


def _check_state(name: str, tensor: torch.Tensor) -> None:
    checks.check_readable(name, tensor)
    if tensor.dtype != torch.float32 or tensor.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"{name} must be float32 on cpu or cuda (a partial state), got {tensor.dtype} on "
            f"{tensor.device}"
        )


def _result_dtype(dtype: object, out: torch.Tensor | None) -> torch.dtype:
    """The dtype of the merged out. Raises InputError."""
    wanted = dtype
    if wanted is None:
        wanted = torch.float32 if out is None else out.dtype
    if not isinstance(wanted, torch.dtype) or DTYPE_NAMES.get(wanted) not in Q_DTYPES:
        name = "out.dtype" if dtype is None else "dtype"
        raise InputError(
            f"{name}={checks.shown(wanted)} is not supported; supported: {', '.join(Q_DTYPES)}"
        )
    if out is not None and out.dtype != wanted:
        raise InputError(f"out is {out.dtype}, but dtype={wanted}; leave dtype out")
    return wanted


def _check_mask(mask: torch.Tensor, rows: Sequence[int]) -> None:
    if mask.dtype != torch.bool:
        raise InputError(f"mask must be a bool tensor, got {mask.dtype}")
    pairs = zip(mask.shape, rows, strict=False)
    if mask.dim() > len(rows) or any(n not in (1, size) for n, size in pairs):
        raise InputError(
            f"mask is {list(mask.shape)}, but outs have rows {list(rows)}: its dims must be the "
            "first ones of the rows, or of size 1"
        )


def merge_into(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    target: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of states that `merge_states` has checked; lse is empty for pointwise states."""
    shape, device = outs[0].shape, outs[0].device
    target = target_on_device(device, target)
    _check_results(outs, lses, mask, dtype, out, lse)
    given = [x for x in (out, lse) if x is not None]
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if lse is None:
        lse = torch.empty(shape[:-1] if lses else 0, dtype=torch.float32, device=device)
    if mask is not None:
        mask = mask.reshape(*mask.shape, *(1,) * (len(shape) - 1 - mask.dim())).expand(shape[:-1])
    if on_cpu(target):
        _merge_on_cpu(outs, lses, mask, out, lse)
    else:
        from .launching import merge_device

        merge_device.merge(outs, lses, mask, out, lse, target)
    if given:
        increment_version(given)
    return out, lse


def _check_results(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Raises InputError for a given result of another layout, or in the memory of an input that is
    not its own first state."""
    shape, device = tuple(outs[0].shape), outs[0].device
    inputs = [*outs, *lses] if mask is None else [*outs, *lses, mask]
    if out is not None:
        checks.check_out_layout(out, shape, dtype, device)
        others = inputs if lse is None else [*inputs, lse]
        _check_apart("out", out, others[1:] if checks.is_same_memory(out, outs[0]) else others)
    if lse is not None and lses:
        checks.check_out_layout(lse, shape[:-1], torch.float32, device, "lse")
        own = len(outs) if checks.is_same_memory(lse, lses[0]) else -1
        _check_apart("lse", lse, [t for i, t in enumerate(inputs) if i != own])


def _check_apart(name: str, result: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    sizes = [checks.extent(t) for t in others]
    checks.check_apart(result, checks.extent(result), others, sizes, name)


def _merge_on_cpu(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
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
        DTYPE_NAMES[out.dtype],
        0 if mask is None else mask.data_ptr(),
        (0, 0, 0) if mask is None else _three(mask.stride()),
        torch.get_num_threads(),
    )


def _three(dims: Sequence[int], fill: int = 0) -> tuple[int, int, int]:
    """Two or three numbers as three, `fill` first."""
    a, b, c = (fill,) * (3 - len(dims)) + tuple(dims)
    return a, b, c
