"""What `BatchAttention.run` does: checks once a call of its kind, then a look-up and a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import InputError
from ...torch_modes import refuse_capture
from ...variants.binding import Bound, bind, bind_outside_modes
from ...variants.ir.dtypes import DTYPE_NAMES
from ...variants.variant import Variant
from ..arguments import checks
from ..arguments.calls import Call, bind_tensors, is_aligned, packed_form, paged_form
from ..keys.storage import check_pages
from ..planning.batch_params import Params, refuse_mask_params
from ..planning.batch_plan import Batch, Options, Variation, mask_values, vary
from .launches import Workspace, check_out, launch, make_launch

_RAGGED = "[num_kv_tokens, num_kv_heads, {}]"
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

    variant, params: what was planned, and the params of its mask.

    Immutable but for `variations`, which only grow: runs of several threads may share it. With a
    CUDA graph there is one at a time, as there is one place for it.
    """

    __slots__ = (
        "batch", "cpu", "first", "form", "habits", "params", "pointwise", "scale", "state",
        "variant", "variations", "workspace",
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        variant: Variant,
        params: Params,
        first: Variation,
        unaligned: bool,
        state: Any,
        workspace: Workspace,
        habits: Habits,
    ) -> None:
        self.batch, self.first, self.state, self.workspace = batch, first, state, workspace
        self.variant, self.params = variant, params
        self.cpu = batch.options.cpu
        self.habits = habits
        self.form = paged_form if batch.keys.page_size else packed_form
        self.pointwise = first.known.pointwise
        self.scale = checks.check_scale(None, batch.options.head_dim)
        self.variations = {(first.known, unaligned): first}

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
        if params:
            refuse_mask_params(self.variant, params, self.first.mask_params)
        bound = bind(self.variant, batch.dims, {**self.params, **params} if params else self.params)
        try:
            form = self.form(q, k, v, True)
        except InputError:
            _check_call(self, q, k, v)  # says what the batch was made for, where it is that
            raise
        unaligned = not self.cpu and not is_aligned(form, q, k, v, out)
        variation = self.variations.get((bound.structure, unaligned))
        if variation is None:
            _check_call(self, q, k, v)
            refuse_mask_params(self.variant, params, bound.mask_params)
            variation = self._vary(bound, unaligned, params)
        tensors, scalars = variation.values(bound)
        checks.check_grad((q, k, v, *tensors))
        addresses, layouts, held = bind_tensors(variation.known, tensors)
        with_lse = return_lse or (partial and not self.pointwise)
        call = Call(
            form, batch.lengths, bound.structure, layouts,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device), with_lse,
            partial, batch.options.target, int(self.cpu), not unaligned,
        )  # fmt: skip
        ready = variation.launches.get(call)
        if return_lse:
            checks.check_lse(return_lse, self.pointwise)
        if ready is None:
            _check_call(self, q, k, v)
            if out is not None:
                check_out(out, form, partial, (q, k, v, *tensors))
            ready = make_launch(variation, call, out, tensors)
            if len(variation.launches) >= _KEPT_LAUNCHES:
                variation.launches.clear()
            variation.launches[call] = ready
        scale = self.scale if scale is None else checks.check_scale(scale, form.head_dim)
        return launch(
            variation, ready, q, k, v, out, scale, held, addresses, scalars, self.workspace
        )

    def check_transforms(self, params: Params) -> None:
        """Raises GradError or InputError where the variant holds a tensor of a transform."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            batch = self.batch
            bind_outside_modes(self.variant, batch.dims, {**self.params, **params})

    def _vary(self, bound: Bound, unaligned: bool, params: Params) -> Variation:
        """Another variation of the batch, planned now."""
        refuse_capture(
            self.batch.options.device,
            "a run needs other kernels than planned",
            "its params have other dtypes or strides, or its tensors are not aligned to 16 bytes; "
            "make the same run once before the capture",
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
        return self.variations.setdefault((bound.structure, unaligned), made)


_KEPT_LAUNCHES = 256


# --- checks ---------------------------------------------------------------------------------------


def _check_call(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are what the object was made for and what the batch needs."""
    batch = planned.batch
    options, paged = batch.options, batch.keys.page_size > 0
    _check_kind(planned, k, v)
    keys = _PAGED if paged else _RAGGED
    checks.check_tensors(
        q, k, v,
        ("[num_q_tokens, num_q_heads, head_dim]", keys.format("head_dim"),
         keys.format("head_dim_v")),
    )  # fmt: skip
    check_place("q", q, options.device)
    for name, tensor, dtype in (("q", q, options.q_dtype), ("k", k, options.k_dtype),
                                ("v", v, options.v_dtype)):  # fmt: skip
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
    checks.check_readable(name, tensor)
    checks.check_not_lazy(name, tensor)
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
    check_pages(keys.pages, keys.page_indices, k.shape[0], keys.page_indptrs)


__all__ = ["Habits", "Planned", "check_place"]
