"""Dense and packed calls: each kind of them is planned as a batch once, and launched as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..variants.binding import Bound
from ..variants.ir import unscaled_integers
from ..variants.modes import refuse_capture
from . import _handles
from ._batch_kernels import Kernels, Options
from ._batch_plan import Batch, Variation, vary
from ._call import BlockMaskLayout, Call, Form, Requests, is_aligned
from ._direct import learn_device
from ._launch import Launch, bind_tensors, check_out, launch, make_launch
from ._placement import on_cpu
from ._recent import Recent
from ._workspace import Workspace

_launches: Recent[Call, tuple[Variation, Launch]] = Recent(1024)
_kernels: Recent[Options, Kernels] = Recent(64)
_workspaces: dict[torch.device, Workspace] = {}


def attend(
    form: Form,
    requests: Requests,
    bound: Bound,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    target: str,
    return_lse: bool,
    partial: bool,
    out: torch.Tensor | None = None,
    block_states: torch.Tensor | None = None,
    block_size: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of a checked call; lse is None unless `return_lse`.

    block_states: uint8 [batch, num_q_heads, q blocks, kv blocks] of `BlockMask` states, with
    block_size (q_block, kv_block).

    Raises:
        InputError: `out` does not fit; int8 keys or values, which no hook of the variant scales.
        CompileError: a new kernel was needed and the compiler failed.
        LaunchError: CUDA refused the launch; or the call was not planned before a graph's capture.
    """
    known = _handles.structure_of(bound, name)
    addresses, layouts, held = bind_tensors(known, bound.tensors)
    num_threads = torch.get_num_threads() if on_cpu(target) else 0
    mask: BlockMaskLayout | None = None
    if block_states is not None:
        mask = (tuple(block_states.shape), block_states.stride(), block_size[0], block_size[1])
    call = Call(
        form,
        requests.lengths,
        known.handle,
        layouts,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        return_lse,
        partial,
        target,
        num_threads,
        num_threads > 0 or is_aligned(form, q, k, v, out),
        mask,
        bound.scalars if known.schedule_reads_scalars else None,
    )
    found = _launches.get(call)
    if found is None:
        if out is not None:
            check_out(out, form, partial, (q, k, v, *bound.tensors))
        plan = _plan(call, requests, bound, name)
        found = _launches.keep(call, (plan, make_launch(plan, call, out, bound.tensors)))
    plan, ready = found
    workspace = _workspaces.get(form.device)
    if workspace is None:
        workspace = _workspaces.setdefault(form.device, Workspace(None, form.device))
    return launch(
        plan, ready, q, k, v, out, scale, held, addresses, bound.scalars, workspace, block_states
    )


def _plan(call: Call, requests: Requests, bound: Bound, name: str) -> Variation:
    """The plan of a call, where its kernels run."""
    device = call.form.device
    refuse_capture(
        device,
        "a call that was not planned yet is made",
        "make the same call once before the capture, with the same shapes, strides, dtypes and "
        "lengths",
    )
    if device.type == "cuda":
        learn_device(device)
    plan = plan_call(
        options_of(call.form, call.target), requests, bound, name, not call.aligned, call.block_mask
    )
    state = None
    if not call.num_threads:
        from ._batch_device import state_of

        state = state_of(device, call.target)
    plan.commit(state)
    return plan


def options_of(form: Form, target: str) -> Options:
    """What the kernels of a call are chosen for."""
    return Options(
        form.num_q_heads, form.num_kv_heads, form.head_dim, form.head_dim_v, *form.dtypes,
        form.device, target,
    )  # fmt: skip


def plan_call(
    options: Options,
    requests: Requests,
    bound: Bound,
    name: str,
    unaligned: bool = False,
    block_mask: BlockMaskLayout | None = None,
) -> Variation:
    """A dense or packed call, planned; its kernels are compiled where no cache has them.

    Raises:
        InputError: int8 keys or values, which no hook of the variant scales.
        CompileError: a new kernel was needed and the compiler failed.
    """
    if wrong := unscaled_integers(bound.ir.has, options.k_dtype, options.v_dtype):
        raise InputError(wrong)
    kernels = _kernels.get(options)
    if kernels is None:
        kernels = _kernels.keep(options, Kernels(options))
    batch = Batch(
        kernels, name, requests.lengths, requests.dims, block_mask=block_mask, keeps_mask=False
    )
    return vary(batch, bound, unaligned and not options.cpu)


__all__ = ["attend", "options_of", "plan_call"]
