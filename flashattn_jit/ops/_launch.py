"""Launching: a planned batch on tensors of given strides, on the host, a device or the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from ..errors import InputError, ParamError
from ..variants.modes import need_values
from . import _check
from ._call import Call, Form, Layouts, Strides
from ._handles import Structure
from ._workspace import Workspace

if TYPE_CHECKING:
    from ._batch_plan import Variation

_CPU = torch.device("cpu")
_EMPTY = ((), (), ())
_EXACT = 2**53  # float64 holds every integer up to here


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What follows from a `Call`: worked out at the first of its kind.

    call: bound to strides. shape, strides, dtype: of the result. out_bytes, input_bytes: extents of
    a given out and of q, k, v and params, which tell whether they overlap. Working these out at
    every run was half of its time: 17.9 us a run before, 10.4 after (one token, one head, given
    out).
    """

    call: _C.BatchCall
    cpu: bool
    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    return_lse: bool
    out_bytes: int
    input_bytes: tuple[int, ...]


def check_out(out: torch.Tensor, form: Form, partial: bool, inputs: Sequence[torch.Tensor]) -> None:
    """A given result fits the call, and overlaps none of its inputs: q, k, v and params.

    Raises:
        InputError, GradError: it does not.
    """
    dtype = result_dtype(form.dtypes[0], partial)
    _check.check_out_layout(out, form.result_shape, dtype, form.device)
    _check.check_out_grad(out)
    _check.check_apart(out, _check.extent(out), inputs, [_check.extent(t) for t in inputs])


def make_launch(
    plan: Variation, call: Call, out: torch.Tensor | None, params: Sequence[torch.Tensor]
) -> Launch:
    """The launch of a planned call, whose `out` was checked.

    Raises:
        InputError: a stride or size is more than a kernel takes.
    """
    form = call.form
    shape, dtype = form.result_shape, result_dtype(form.dtypes[0], call.partial)
    strides = result_strides(form) if out is None else out.stride()
    rows = contiguous(shape[:-1])
    try:
        bound = plan.core.bind(
            strides=(
                _by_request(form.strides[0]),
                _by_request(form.strides[1], form.kind == "paged"),
                _by_request(form.strides[2], form.kind == "paged"),
                _by_request(strides),
                _by_request((*rows, 1)) if call.return_lse else (0, 0, 0),
            ),
            layouts=call.layouts,
            scalar_kinds=plan.known.scalar_kinds,
            num_pages=form.k_shape[0] if form.kind == "paged" else 0,
            flags=(_C.WRITE_LSE if call.return_lse else 0) | (_C.PARTIAL if call.partial else 0),
            block_mask=call.block_mask,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from None
    return Launch(
        bound, bool(call.num_threads), shape, strides, dtype, call.return_lse,
        0 if out is None else _check.extent(out),
        (*form.input_bytes, *(_check.extent(t) for t in params)),
    )  # fmt: skip


def _by_request(strides: Strides, pages: bool = False) -> tuple[int, int, int]:
    """Strides as kernels take them: of (request, head, row), of pages of (page, head, slot)."""
    if len(strides) == 3:
        return 0, strides[1], strides[0]
    return (strides[0], strides[2], strides[1]) if pages else (strides[0], strides[1], strides[2])


def launch(
    plan: Variation,
    ready: Launch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    scale: float,
    params: Sequence[torch.Tensor],
    addresses: tuple[int, ...],
    scalars: Sequence[int | float],
    workspace: Workspace,
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a launch on tensors of its call; returns (out, lse), lse None unless it is written.

    params, addresses: of the variant's tensors and their tables. states: of a block mask. On CUDA
    the launch goes to torch's current stream, and nothing waits for it.

    Raises:
        InputError: `out` shares memory with an input.
        LaunchError: CUDA refused the launch.
        EmulatorFault: on an emulated target, a kernel did what it must not.
    """
    call = ready.call
    if scalars:
        _check_exact(scalars)
    # A constant takes 0.2 us less than asking a CPU tensor for its device.
    device = _CPU if ready.cpu else q.device
    if out is None:
        result = torch.empty_strided(ready.shape, ready.strides, dtype=ready.dtype, device=device)
    else:
        _check.check_out_grad(out)
        inputs = (q, k, v, *params[: len(ready.input_bytes) - 3])
        _check.check_apart(out, ready.out_bytes, inputs, ready.input_bytes)
        result = out
    lse = None
    if ready.return_lse:
        lse = torch.empty(ready.shape[:-1], dtype=torch.float32, device=device)
    space, place = workspace.take(plan.native.workspace_bytes)
    if ready.cpu:
        address = q.data_ptr()
        call.launch(
            address,
            # Without keys their address is 0, which kernels refuse; they will not read this one.
            k.data_ptr() or address,
            v.data_ptr() or address,
            result.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            scale,
            torch.get_num_threads(),
            addresses,
            scalars,
            place,
            0 if states is None else states.data_ptr(),
            *plan.pointers,
        )
    else:
        from . import _batch_device, _device  # a process without a device need not have it

        known = plan.known
        launched = _device.LaunchTensors(
            q, k, v, result, lse, params, addresses, tuple(scalars), space, states=states,
            page_indices=plan.page_indices, key_blocks=plan.key_blocks,
            names=known.tensor_names, num_params=len(known.ir.tensors),
        )  # fmt: skip
        _batch_device.launch(plan.block, call, launched, scale)
    return result, lse


def _check_exact(scalars: Sequence[int | float]) -> None:
    """Raises ParamError for an integer that float64 does not hold, as graphs carry scalars."""
    for value in scalars:
        if type(value) is int and not -_EXACT <= value <= _EXACT:
            raise ParamError(
                f"a hook captures the integer {value}; scalar params hold integers up to 2**53: "
                "capture it as a 0-dim int64 tensor"
            )


# --- params and results ---------------------------------------------------------------------------


def bind_tensors(
    known: Structure, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], Layouts, Sequence[torch.Tensor]]:
    """Addresses and layouts of the params and of the min/max tables that their mask needs.

    The tensors themselves come third: whoever launches must hold them, a table may have no other
    owner.
    """
    expected = len(known.ir.tensors)
    if len(tensors) != expected:
        raise InputError(f"the variant reads {expected} tensors, got {len(tensors)}")
    if not tensors:
        return _EMPTY
    if any(t.is_neg() for t in tensors):  # lazy views, whose memory holds the other sign
        tensors = [t.resolve_neg() for t in tensors]
    if known.tables:
        from ..variants.range_table import build_tables  # imports numpy's typing: only when needed

        tensors = [*tensors, *build_tables(known.tables, tensors)]
    addresses = tuple([t.data_ptr() if t.numel() else 0 for t in tensors])
    if 0 in addresses:
        need_values("a tensor of the variant", "a kernel reads them", tensors)
    return (
        addresses,
        tuple([(tuple(t.shape), t.stride()) for t in tensors]),
        tensors,
    )


def result_dtype(q_dtype: torch.dtype, partial: bool) -> torch.dtype:
    """q's dtype; partial states are fp32."""
    return torch.float32 if partial else q_dtype


def result_strides(form: Form) -> Strides:
    """Strides of a result: without gaps, of a dense call in q's order."""
    if form.kind != "dense":
        return contiguous(form.result_shape)
    return _in_order_of(form.q_shape, form.strides[0], form.head_dim_v)


def like_q_strides(q: torch.Tensor, head_dim_v: int) -> Strides:
    """Strides of a dense output in q's stride order, last dim contiguous, without gaps."""
    return _in_order_of(q.shape, q.stride(), head_dim_v)


def _in_order_of(shape: Sequence[int], strides: Sequence[int], head_dim_v: int) -> Strides:
    order = sorted(range(3), key=lambda d: (strides[d], -d))
    out, reach = [0, 0, 0, 1], max(1, head_dim_v)
    for d in order:
        out[d] = reach
        reach *= max(1, shape[d])
    return tuple(out)


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of a contiguous tensor."""
    out, reach = [], 1
    for size in reversed(shape):
        out.append(reach)
        reach *= max(1, size)
    return tuple(reversed(out))


def filled(lse: torch.Tensor | None, like: Any) -> torch.Tensor:
    """An op's lse: empty, on the device of `like`, where there is none."""
    return like.new_empty(0, dtype=torch.float32) if lse is None else lse
