"""Launching: a planned batch on tensors of given strides, on the host, a device or the emulator.

A `Launch` is a plan bound to the strides of a `Call`. `attend` runs dense and packed calls: it
plans the first call of a kind and remembers its launch. Runs of batches pass their plan to
`make_launch` and `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ... import _C, env
from ...codegen.spec import call_target, on_cpu
from ...errors import InputError
from ...torch_modes import increment_version, refuse_capture
from ...variants.binding import Bound, Swap, bind, bind_outside_modes, captured
from ...variants.ir.ir import unscaled_integers
from ...variants.variant import Variant
from ..arguments import checks
from ..arguments.calls import (
    ALIGNMENT,
    KEPT_SIZE,
    BlockMaskLayout,
    Call,
    Form,
    Recent,
    Requests,
    Strides,
    aligned_empty,
    bind_tensors,
    contiguous,
    given_layouts,
    in_order_of,
    is_aligned,
    result_dtype,
)
from ..planning.batch_plan import Batch, Kernels, Options, Variation, vary
from .repeats import Kind, Notes, Repeat, forget_calls, keep_call

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The values that follow from a `Call`, computed at the first one of its kind.

    call: bound to strides. shape, strides, dtype: of the result. lse_strides: of lse. out_bytes,
    lse_bytes, input_bytes: extents of a given out and lse and of q, k, v and params, which tell
    whether they overlap.
    Computing these at every run was half of its time: 17.9 us a run before, 10.4 after (one token,
    one head, given out).
    """

    call: _C.BatchCall
    cpu: bool
    shape: tuple[int, ...]
    strides: Strides
    lse_strides: Strides
    dtype: torch.dtype
    return_lse: bool
    out_bytes: int
    lse_bytes: int
    input_bytes: tuple[int, ...]


def check_results(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    form: Form,
    partial: bool,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Raises InputError or GradError unless given results fit the call and overlap no tensor."""
    dtype = result_dtype(form.dtypes[0], partial)
    check_given(out, lse, form.result_shape, dtype, form.device, inputs)


def check_given(
    out: torch.Tensor | None, lse: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, inputs: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """As `check_results`, for a result of this shape and dtype."""
    if out is not None:
        checks.check_out_layout(out, shape, dtype, device)
    if lse is not None:
        checks.check_out_layout(lse, shape[:-1], torch.float32, device, "lse")
    out_bytes, lse_bytes = (0 if t is None else checks.extent(t) for t in (out, lse))
    sizes = [checks.extent(t) for t in inputs]
    _check_written(out, lse, out_bytes, lse_bytes, inputs, sizes)


def _check_written(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_bytes: int,
    lse_bytes: int,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> None:
    """Raises InputError or GradError for given results that autograd tracks or that overlap."""
    if out is not None:
        checks.check_out_grad(out)
        checks.check_apart(out, out_bytes, inputs, sizes)
    if lse is not None:
        checks.check_out_grad(lse, "lse")
        checks.check_apart(lse, lse_bytes, inputs, sizes, "lse")
        if out is not None:
            checks.check_apart(lse, lse_bytes, (out,), (out_bytes,), "lse", "out")


def make_launch(
    plan: Variation,
    call: Call,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    params: Sequence[torch.Tensor],
) -> Launch:
    """The launch of a planned call, whose `out` and `lse` were checked.

    Raises InputError for a stride or size that is too large for a kernel.
    """
    form = call.form
    shape, dtype = form.result_shape, result_dtype(form.dtypes[0], call.partial)
    if out is not None:
        strides = out.stride()
    elif form.kind == "dense":
        strides = in_order_of(form.q_shape, form.strides[0], form.head_dim_v)
    else:
        strides = contiguous(shape)
    rows = contiguous(shape[:-1]) if lse is None else lse.stride()
    kv_requests, kv_rows = form.kv_extents
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
            num_pages=kv_requests if form.kind == "paged" else 0,
            kv_requests=kv_requests,
            kv_rows=kv_rows,
            flags=(_C.WRITE_LSE if call.return_lse else 0) | (_C.PARTIAL if call.partial else 0),
            block_mask=call.block_mask,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from None
    return Launch(
        bound, bool(call.num_threads), shape, strides, rows, dtype, call.return_lse,
        0 if out is None else checks.extent(out), 0 if lse is None else checks.extent(lse),
        (*form.input_bytes, *(checks.extent(t) for t in params)),
    )  # fmt: skip


def _by_request(strides: Strides, pages: bool = False) -> tuple[int, int, int]:
    """Strides in the kernels' order: (request, head, row), or (page, head, slot) for pages."""
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
    lse: torch.Tensor | None,
    scale: float,
    params: Sequence[torch.Tensor],
    addresses: tuple[int, ...],
    scalars: Sequence[int | float],
    workspace: Workspace,
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a launch on tensors of its call; returns (out, lse), lse None unless it is written.

    params: the variant's tensors and their tables; addresses: theirs. states: of a block mask. On
    CUDA the launch is enqueued on torch's current stream, without synchronisation.

    Raises:
        InputError: `out` or `lse` shares memory with an input.
        LaunchError: CUDA refused the launch.
        EmulatorFault: on an emulated target, a kernel made an illegal access or another error.
    """
    call = ready.call
    # The constant takes 0.2 us less than reading the device of a CPU tensor.
    device = _CPU if ready.cpu else q.device
    if out is None:
        result = torch.empty_strided(ready.shape, ready.strides, dtype=ready.dtype, device=device)
    else:
        result = out
    given: Sequence[torch.Tensor] = ()
    if out is not None or lse is not None:
        given = [x for x in (out, lse) if x is not None]
        inputs = (q, k, v, *params[: len(ready.input_bytes) - 3])
        _check_written(out, lse, ready.out_bytes, ready.lse_bytes, inputs, ready.input_bytes)
    if lse is None and ready.return_lse:
        lse = torch.empty(ready.shape[:-1], dtype=torch.float32, device=device)
    wanted = plan.native.workspace_bytes
    if ready.cpu:
        space, space_address = workspace.borrow(wanted)
        address = q.data_ptr() or _stand_in("q", q, 0)
        call.launch(
            address,
            k.data_ptr() or _stand_in("k", k, address),
            v.data_ptr() or _stand_in("v", v, address),
            result.data_ptr() or _stand_in("out", result, 0),
            0 if lse is None else lse.data_ptr(),
            scale,
            torch.get_num_threads(),
            addresses,
            scalars,
            space_address,
            0 if states is None else states.data_ptr(),
            *plan.pointers,
        )
        workspace.give_back(space, space_address)
    else:
        space, _ = workspace.take(wanted)
        from ..device import cuda, plan_memory  # only processes that use a device import it

        known = plan.known
        launched = cuda.LaunchTensors(
            q, k, v, result, lse, params, addresses, tuple(scalars), space, states=states,
            page_indices=plan.page_indices, key_blocks=plan.key_blocks,
            names=known.tensor_names, num_params=len(known.ir.tensors),
        )  # fmt: skip
        plan_memory.launch(plan.block, call, launched, scale)
    if given:
        increment_version(given)
    return result, lse


def _stand_in(name: str, tensor: torch.Tensor, address: int) -> int:
    """For the address 0 of a tensor without entries, which kernels refuse: one that is never read.

    Raises InputError for a tensor with entries.
    """
    if tensor.numel():
        raise InputError(
            f"{name} has no memory: its storage was freed or resized to 0 bytes; pass a tensor "
            "that has its values"
        )
    return address


# --- dense and packed calls -----------------------------------------------------------------------

_launches: Recent[Call, tuple[Variation, Launch]] = Recent(KEPT_SIZE)
_kernels: Recent[Options, Kernels] = Recent(64)
_notes = Notes()
_workspaces: dict[torch.device, Workspace] = {}


def attend(
    form: Form,
    requests: Requests,
    variant: Variant,
    params: Mapping[str, object],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: checks.Scale | None = None,
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    target: str | None = None,
    swap: Swap | None = None,
    direct: bool = True,
    block_states: torch.Tensor | None = None,
    block_size: Sequence[int] = (),
    kind: Kind | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of a dense or packed call with known `requests`; lse is None unless requested.

    scale, return_lse, partial, out, lse, target: as for `fa.attention`. swap: see `bind`. direct:
    the result of `is_direct` for q, k and v. block_states: uint8 [batch, num_q_heads, q blocks, kv
    blocks] of `BlockMask` states, with block_size (q_block, kv_block). kind: of a call that
    `call_again` may make again: without target and swap.

    Raises:
        InputError, ParamError, TraceError, CompileError, TargetError, LaunchError, EmulatorFault,
        GradError: as `fa.attention`.
    """
    bound = (bind if direct else bind_outside_modes)(variant, requests.dims, params, swap)
    known = bound.structure
    checks.check_grad((q, k, v, *bound.tensors), checks.QKV, known.tensor_names)
    asked = (bool(return_lse), bool(partial), out is not None, lse is not None)
    return_lse = return_lse or lse is not None
    checks.check_lse(return_lse, known.pointwise)
    return_lse = return_lse or (partial and not known.pointwise)
    scale = checks.check_scale(scale, form.head_dim)
    target = call_target(q, k, v, target)
    addresses, layouts, held = bind_tensors(known, bound.tensors)
    num_threads = torch.get_num_threads() if on_cpu(target) else 0
    mask: BlockMaskLayout | None = None
    if block_states is not None:
        mask = BlockMaskLayout(tuple(block_states.shape), block_states.stride(), *block_size)
    if out is not None:
        checks.check_readable("out", out)
    if lse is not None:
        checks.check_readable("lse", lse)
    call = Call(
        form,
        requests.lengths,
        known,
        layouts,
        given_layouts(out, lse),
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
        check_results(out, lse, form, partial, (q, k, v, *bound.tensors))
        plan = _plan(call, requests, bound, variant.name)
        made = plan, make_launch(plan, call, out, lse, bound.tensors)
        found = _launches.keep(call, made, requests.size)
    plan, ready = found
    workspace = _workspaces.get(form.device)
    if workspace is None:
        workspace = _workspaces.setdefault(form.device, Workspace(None, form.device))
    result = launch(
        plan, ready, q, k, v, out, lse, scale, held, addresses, bound.scalars, workspace,
        block_states,
    )  # fmt: skip
    if kind is None or not direct or not num_threads:
        return result
    if _notes.count((id(ready), bound.scalars, kind, *params)):
        repeat = Repeat(
            plan, ready, layouts, form, asked, bound,
            captured(variant, requests.dims, {}, params, bound),
            checks.check_scale(None, form.head_dim), workspace, num_threads,
            env.target() or "",
        )  # fmt: skip
        if repeat.native.can_run_again:
            keep_call(variant, kind, repeat.native, requests.size)
    return result


def forget_launches() -> None:
    """Forget the launches of dense and packed calls. For tests and benchmarks."""
    _launches.clear()
    _notes.clear()
    forget_calls()


def _plan(call: Call, requests: Requests, bound: Bound, name: str) -> Variation:
    """The plan of a call, in the memory that its kernels read."""
    device = call.form.device
    refuse_capture(
        device,
        "a call that was not planned yet is made",
        "make the same call once before the capture, with the same shapes, strides, dtypes and "
        "lengths",
    )
    form = call.form
    options = Options(
        form.num_q_heads, form.num_kv_heads, form.head_dim, form.head_dim_v, *form.dtypes, device,
        call.target,
    )  # fmt: skip
    plan = plan_call(
        options, requests, bound, name, not call.aligned, call.block_mask, form.heads_apart
    )
    state = None
    if not call.num_threads:
        from ..device.plan_memory import state_of

        state = state_of(device, call.target)
    plan.commit(state)
    return plan


def plan_call(
    options: Options,
    requests: Requests,
    bound: Bound,
    name: str,
    unaligned: bool = False,
    block_mask: BlockMaskLayout | None = None,
    heads_apart: bool = False,
) -> Variation:
    """The plan of a dense or packed call; kernels that no cache has are compiled.

    Raises:
        InputError: int8 keys or values that no hook of the variant scales.
        CompileError: a new kernel was needed and the compiler failed.
    """
    if wrong := unscaled_integers(bound.ir.has, options.k_dtype, options.v_dtype):
        raise InputError(wrong)
    kernels = _kernels.get(options)
    if kernels is None:
        kernels = _kernels.keep(options, Kernels(options))
    batch = Batch(
        kernels, name, requests.lengths, requests.dims, block_mask=block_mask, keeps_mask=False,
        heads_apart=heads_apart,
    )  # fmt: skip
    return vary(batch, bound, unaligned and not options.cpu)


# --- workspaces -----------------------------------------------------------------------------------

_KEPT_BYTES, _KEPT_SPACES = 1 << 20, 8  # of a workspace, and of them


class Workspace:
    """Memory for the partial states of runs: the user's, or allocated by torch.

    Runs on devices `take` it: torch's allocator orders memory by stream, so runs on several threads
    and streams do not share it. Runs of CPU kernels `borrow` what an earlier one gave back:
    allocating took 0.03 of the 0.25 ms of one token over 1,024 keys (by hand, 2 cores of a Xeon).
    The user's memory is shared by all runs, so it serves one stream, in order.

    given: uint8 tensor [bytes] on the device, or None.
    """

    __slots__ = ("_device", "_given", "_spare", "given")

    def __init__(self, given: object, device: torch.device) -> None:
        """Raises InputError if `given` is another object or tensor."""
        self._device = device
        self.given: torch.Tensor | None = None
        self._given: torch.Tensor | None = None
        self._spare: list[tuple[torch.Tensor, int]] = []  # given back, with its address
        if given is None:
            return
        if not isinstance(given, torch.Tensor) or given.dtype != torch.uint8:
            got = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise InputError(f"workspace must be a uint8 tensor [bytes], got {got}")
        checks.check_readable("workspace", given)
        if given.device != device:
            raise InputError(f"workspace is on {given.device}, the batch on {device}")
        if given.dim() != 1 or not given.is_contiguous():
            raise InputError(
                f"workspace must be a contiguous uint8 tensor [bytes], got {list(given.shape)} "
                f"with strides {list(given.stride())}"
            )
        self.given = given
        self._given = given[-given.data_ptr() % ALIGNMENT :]

    def check(self, wanted: int) -> None:
        """Raises InputError if the user's memory has less than `wanted` bytes."""
        given = self._given
        if given is not None and given.numel() < wanted:
            raise InputError(
                f"the plan needs a workspace of {wanted} bytes, workspace has {given.numel()} from "
                f"its first multiple of {ALIGNMENT} bytes on; pass a larger one, or none (see "
                "workspace_bytes(limits))"
            )

    def take(self, wanted: int) -> tuple[torch.Tensor | None, int]:
        """Memory for one run and its aligned address; (None, 0) if it needs none."""
        if not wanted:
            return None, 0
        if self._given is not None:
            space = self._given[:wanted]
        elif self._device.type == "cpu":
            space = aligned_empty(wanted)
        else:
            space = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        return space, space.data_ptr()

    def borrow(self, wanted: int) -> tuple[torch.Tensor | None, int]:
        """As `take`, of host memory that `give_back` may keep, and that may be larger."""
        if not wanted or self._given is not None:
            return self.take(wanted)
        with suppress(IndexError):  # none is there, or another thread has it
            space, address = self._spare.pop()
            if space.numel() >= wanted:
                return space, address
            self.give_back(space, address)
        return self.take(wanted)

    def give_back(self, space: torch.Tensor | None, address: int) -> None:
        """Keeps borrowed memory for later runs, unless there is enough."""
        if space is None or self._given is not None:
            return
        if space.numel() <= _KEPT_BYTES and len(self._spare) < _KEPT_SPACES:
            self._spare.append((space, address))
