"""What `BatchAttention.run` does: checks once a signature, then a look-up and a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _C
from ..errors import InputError, LaunchError
from ..variants.binding import Bound, bind, bind_outside_modes
from ..variants.dtypes import DTYPE_NAMES
from . import _check
from ._batch_kernels import Options
from ._batch_plan import Batch, Params, Ready, Variation, mask_values, refuse_mask_params, vary
from ._dense import bind_tensors, result_dtype
from ._workspace import Workspace
from .storage import owner_of

_RAGGED = "[num_kv_tokens, num_kv_heads, {}]"
_CPU = torch.device("cpu")
_PAGED = "[num_pages, page_size, num_kv_heads, {}]"


@dataclass(slots=True)
class Habits:
    """How the runs of an object turned out to be, for its next plan.

    unaligned: rows do not all start at multiples of 16 bytes. dtypes: of params that runs give.
    """

    unaligned: bool
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


class Planned:
    """A plan in force: the first variation of a batch, and those that runs needed since.

    Immutable but for `variations`, which only grow: runs of several threads may share it. With a
    CUDA graph there is one at a time, as there is one place for it.
    """

    __slots__ = (
        "batch", "cpu", "first", "habits", "pointwise", "scale", "state", "variations",
        "workspace",
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        first: Variation,
        unaligned: bool,
        state: Any,
        workspace: Workspace,
        habits: Habits,
    ) -> None:
        self.batch, self.first, self.state, self.workspace = batch, first, state, workspace
        self.cpu = batch.options.cpu
        self.habits = habits
        self.pointwise = first.known.pointwise
        self.scale = _check.check_scale(None, batch.options.head_dim)
        self.variations = {(first.known.handle, unaligned): first}

    @property
    def latest(self) -> Variation:
        """The variation that was planned last: with a CUDA graph, the only one."""
        return next(reversed(self.variations.values()))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: Params,
        scale: float | None,
        return_lse: bool,
        partial: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of a batch; lse is None unless asked for."""
        batch = self.batch
        options = batch.options
        if params:
            refuse_mask_params(batch.variant, params, self.first.mask_params)
        bound = bind(
            batch.variant, batch.dims, {**batch.params, **params} if params else batch.params
        )
        unaligned = not self.cpu and not _aligned(q, k, v, out, options)
        variation = self.variations.get((bound.handle, unaligned))
        if variation is None:
            _check_call(self, q, k, v)
            refuse_mask_params(batch.variant, params, bound.mask_params)
            variation = self._vary(bound, unaligned, params)
        tensors, scalars = variation.values(bound)
        inputs = (q, k, v, *tensors)
        _check.check_grad(inputs)
        addresses, layouts, held = bind_tensors(variation.known, tensors)
        with_lse = return_lse or (partial and not self.pointwise)
        signature = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
            v.dtype, q.device, k.device, v.device, layouts, with_lse, return_lse, partial,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        )  # fmt: skip
        ready = variation.ready.get(signature)
        if ready is None:
            _check_call(self, q, k, v)
            _check.check_lse(return_lse, self.pointwise)
            ready = self._ready(variation, inputs, layouts, with_lse, partial, out)
            if len(variation.ready) >= _KEPT_SIGNATURES:
                variation.ready.clear()
            variation.ready[signature] = ready
        call, shape, dtype = ready.call, ready.shape, ready.dtype
        scale = self.scale if scale is None else _check.check_scale(scale, options.head_dim)
        device = _CPU if self.cpu else q.device
        if out is None:
            result = torch.empty(shape, dtype=dtype, device=device)
        else:
            _check.check_out_grad(out)
            _check.check_apart(out, ready.out_bytes, inputs, ready.input_bytes)
            result = out
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device) if with_lse else None
        space, place = self.workspace.take(variation.native.workspace_bytes)
        if self.cpu:
            address = q.data_ptr()
            call.launch(
                address, k.data_ptr() or address, v.data_ptr() or address, result.data_ptr(),
                0 if lse is None else lse.data_ptr(), scale, torch.get_num_threads(), addresses,
                scalars, place, 0, *variation.pointers,
            )  # fmt: skip
        else:
            from . import _batch_device, _device_launch  # a process without a device need not

            known = variation.known
            launched = _device_launch.LaunchTensors(
                q, k, v, result, lse, held, addresses, tuple(scalars), space,
                page_indices=variation.page_indices, key_blocks=variation.key_blocks,
                names=known.tensor_names, num_params=len(known.ir.tensors),
            )  # fmt: skip
            _batch_device.launch(variation.block, call, launched, scale)
        return result, lse

    def check_transforms(self, params: Params) -> None:
        """Raises GradError or InputError where the variant holds a tensor of a transform."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            batch = self.batch
            bind_outside_modes(batch.variant, batch.dims, {**batch.params, **params})

    def _vary(self, bound: Bound, unaligned: bool, params: Params) -> Variation:
        """Another variation of the batch, planned now."""
        device = self.batch.options.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "a run that needs other kernels than planned is being captured in a CUDA graph: "
                "its params have other dtypes or strides, or its tensors are not aligned to 16 "
                "bytes; make the same run once before the capture"
            )
        made = vary(self.batch, bound, unaligned, mask_values(self.first))
        self.workspace.check(made.native.workspace_bytes)
        made.commit(self.state)
        self.habits.unaligned = unaligned
        self.habits.dtypes.update(
            (n, x.dtype) for n, x in params.items() if isinstance(x, torch.Tensor)
        )
        if self.batch.options.cuda_graph:
            self.variations = {}
        return self.variations.setdefault((bound.handle, unaligned), made)

    def _ready(
        self,
        variation: Variation,
        inputs: Sequence[torch.Tensor],
        layouts: Sequence[Any],
        with_lse: bool,
        partial: bool,
        out: torch.Tensor | None,
    ) -> Ready:
        options = self.batch.options
        q, k, v = inputs[:3]
        heads, head_dim_v = options.num_q_heads, options.head_dim_v
        own = (0, head_dim_v, heads * head_dim_v)
        shape, dtype = (q.shape[0], heads, head_dim_v), result_dtype(q, partial)
        if out is not None:
            _check.check_out_layout(out, shape, dtype, q.device)
            own = (0, out.stride(1), out.stride(0))
        try:
            call = variation.core.bind(
                strides=(
                    (0, q.stride(1), q.stride(0)), _key_strides(k), _key_strides(v), own,
                    (0, 1, heads) if with_lse else (0, 0, 0),
                ),
                layouts=layouts,
                scalar_kinds=variation.known.scalar_kinds,
                num_pages=k.shape[0] if self.batch.keys.page_size else 0,
                flags=(_C.WRITE_LSE if with_lse else 0) | (_C.PARTIAL if partial else 0),
            )  # fmt: skip
        except ValueError as error:
            raise InputError(str(error)) from None
        return Ready(
            call, shape, dtype, 0 if out is None else _check.extent(out),
            tuple(_check.extent(t) for t in inputs),
        )  # fmt: skip


_KEPT_SIGNATURES = 256


def _key_strides(keys: torch.Tensor) -> tuple[int, int, int]:
    """(page, head, slot) of pages, (0, head, token) of ragged keys."""
    if keys.dim() == 4:
        return keys.stride(0), keys.stride(2), keys.stride(1)
    return 0, keys.stride(1), keys.stride(0)


def _aligned(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: Options
) -> bool:
    """Whether every row of q, k, v and out starts at a multiple of 16 bytes and ends at one."""
    if options.head_dim % 8 or options.head_dim_v % 8:
        return False
    for tensor in (q, k, v) if out is None else (q, k, v, out):
        item = tensor.element_size()
        if tensor.data_ptr() % 16 or any(stride * item % 16 for stride in tensor.stride()[:-1]):
            return False
    return True


# --- checks ---------------------------------------------------------------------------------------


def _check_call(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are what the object was made for and what the batch needs."""
    batch = planned.batch
    options, paged = batch.options, batch.keys.page_size > 0
    keys = _PAGED if paged else _RAGGED
    _check_kind(planned, k, v)
    _check.check_tensors(
        q, k, v,
        ("[num_q_tokens, num_q_heads, head_dim]", keys.format("head_dim"),
         keys.format("head_dim_v")),
    )  # fmt: skip
    check_place("q", q, options.device)
    for name, tensor, dtype in (("q", q, options.q_dtype), ("k", k, options.kv_dtype),
                                ("v", v, options.kv_dtype)):  # fmt: skip
        if tensor.dtype != dtype:
            raise InputError(
                f"{name} is {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, but the batch was made "
                f"for {'q' if name == 'q' else 'kv'}_dtype={DTYPE_NAMES[dtype]}; convert it with "
                f"{name}.to({dtype}), or make another batch"
            )
    for name, tensor, dim, what, wanted in (
        ("q", q, 1, "num_q_heads", options.num_q_heads),
        ("k", k, -2, "num_kv_heads", options.num_kv_heads),
        ("v", v, -2, "num_kv_heads", options.num_kv_heads),
        ("q", q, -1, "head_dim", options.head_dim),
        ("k", k, -1, "head_dim", options.head_dim),
        ("v", v, -1, "head_dim_v", options.head_dim_v),
    ):
        if tensor.shape[dim] != wanted:
            raise InputError(
                f"{name} has {what}={tensor.shape[dim]}, but the batch was made with "
                f"{what}={wanted}; make another batch for it"
            )
    _check_rows("q", "num_q_tokens", q.shape[0], batch.lengths.num_q_tokens, "q_indptr", options)
    if paged:
        _check_pages(planned, k, v)
        return
    for name, tensor in (("k", k), ("v", v)):
        rows = batch.lengths.num_kv_tokens
        _check_rows(name, "num_kv_tokens", tensor.shape[0], rows, "kv_indptr", options)


def check_place(name: str, tensor: object, device: torch.device) -> None:
    """Raises InputError where something is no dense tensor on the device of its batch."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check.check_readable(name, tensor)
    _check.check_not_lazy(name, tensor)
    if tensor.device != device:
        raise InputError(
            f"{name} is on {tensor.device}, but the batch was made for {device}; move it with "
            f"{name}.to({str(device)!r}), or make another batch"
        )


def _check_kind(planned: Planned, k: object, v: object) -> None:
    """A paged cache to a batch over ragged keys, or the other way round."""
    paged = planned.batch.keys.page_size > 0
    for name, tensor in (("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == (3 if paged else 4):
            planned_as = "pages" if paged else "ragged keys"
            layout = _PAGED if paged else _RAGGED
            raise InputError(
                f"{name} is {list(tensor.shape)}, but the batch is planned over {planned_as}, "
                f"where {name} is {layout.format('head_dim' if name == 'k' else 'head_dim_v')}"
            )


def _check_rows(
    name: str, what: str, rows: int, planned: int, indptr: str, options: Options
) -> None:
    # A captured graph keeps its tensors, which are as long as the largest batch.
    if rows == planned or options.cuda_graph and rows > planned:
        return
    raise InputError(
        f"{name} has {what}={rows}, but the plan's {indptr} ends at {planned}; plan the batch that "
        "is run"
    )


def _check_pages(planned: Planned, k: torch.Tensor, v: torch.Tensor) -> None:
    keys = planned.batch.keys
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[1] != keys.page_size:
            raise InputError(
                f"{name} has page_size={tensor.shape[1]}, but the plan's storage has "
                f"page_size={keys.page_size}"
            )
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v has num_pages={v.shape[0]}, but k has num_pages={k.shape[0]}")
    num_pages = k.shape[0]
    if num_pages > _check.INT32_MAX:
        raise InputError(f"num_pages={num_pages} does not fit 32 bits")
    if keys.pages is None or keys.pages[1] < num_pages or keys.page_indices is None:
        return
    indices = keys.page_indices
    at = int((indices >= num_pages).nonzero()[0, 0])
    raise InputError(
        f"{_named_entry(at, int(indices[at]), keys.page_indptrs)} is outside of "
        f"num_pages={num_pages} of k and v; plan with the pages of this cache"
    )


def _named_entry(at: int, page: int, page_indptrs: Sequence[torch.Tensor]) -> str:
    """An entry of the page tables of requests and levels, which follow one another."""
    for level, indptr in enumerate(page_indptrs, -1):
        if at < int(indptr[-1]):
            where, owner = (f"level {level}: ", "group") if level >= 0 else ("", "request")
            return f"{where}page_indices[{at}]={page}, a page of {owner} {owner_of(at, indptr)},"
        at -= int(indptr[-1])
    return f"page_indices[{at}]={page}"


__all__ = ["Habits", "Planned", "check_place"]
