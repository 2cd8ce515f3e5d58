"""`BatchAttention.run`: a repeat of an earlier run; else checks, a look-up, and a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ... import _C
from ...errors import InputError
from ...torch_modes import refuse_capture
from ...variants.binding import Bound, Captured, bind, bind_outside_modes, captured
from ...variants.ir.dtypes import KV_NAMES, row_dim
from ...variants.variant import Variant
from ..arguments import checks
from ..arguments.calls import (
    Call,
    bind_tensors,
    given_layouts,
    is_aligned,
    packed_form,
    paged_form,
)
from ..keys.storage import check_pages
from ..planning.batch_params import Params, refuse_mask_params
from ..planning.batch_plan import Batch, Options, Variation, mask_values, vary
from .launches import Workspace, check_results, launch, make_launch
from .repeats import Notes, Repeat

if TYPE_CHECKING:
    from ..device.plan_memory import DeviceState


@dataclass(slots=True)
class Observed:
    """Properties of an object's previous runs, which its next plan assumes.

    unaligned: rows do not all start at multiples of 16 bytes. dtypes: of params given to runs.
    """

    unaligned: bool
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


class Planned:
    """A plan in force: the first variation of a batch, and those that later runs needed.

    variant: the planned variant; params: those of its mask. repeats: the newest launches, by what a
    run asks for: its structure, the results that it returns and those that it was given. again:
    the newest of those that C repeats alone.

    Immutable except for `variations`, which only grows, `repeats`, `again` and `notes`: threads may
    share it. With a CUDA graph there is one variation at a time, as there is one block of device
    memory for it.
    """

    __slots__ = (
        "again", "batch", "cpu", "first", "form", "notes", "observed", "params", "pointwise",
        "repeats", "scale", "state", "variant", "variations", "workspace",
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        variant: Variant,
        params: Params,
        first: Variation,
        unaligned: bool,
        state: DeviceState | None,
        workspace: Workspace,
        observed: Observed,
    ) -> None:
        self.batch, self.first, self.state, self.workspace = batch, first, state, workspace
        self.variant, self.params = variant, params
        self.cpu = batch.options.cpu
        self.observed = observed
        self.form = paged_form if batch.keys.page_size else packed_form
        self.pointwise = first.known.pointwise
        self.scale = checks.check_scale(None, batch.options.head_dim)
        self.variations = {(first.known, unaligned): first}
        self.repeats: dict[tuple[Any, ...], tuple[Repeat, ...]] = {}
        self.again: tuple[_C.RepeatedCall, ...] = ()
        self.notes = Notes()

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
        scale: checks.Scale | None,
        return_lse: bool,
        partial: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        more: Pairs = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of a batch; lse is None unless requested. more: k and v of further levels."""
        batch = self.batch
        if more:
            kind = "paged" if batch.keys.page_size else "ragged"
            levels = range(len(more) + 1)
            k, v = only_pair(((k, v), *more), levels, kind)
            params = level_params(params, levels)
        for call in self.again:
            results = call.run_again(
                self.variant, q, k, v, out, lse, scale, return_lse, partial, params
            )
            if results is not None:
                return results
        if params:
            refuse_mask_params(self.variant, params, self.first.mask_params)
        bound = bind(self.variant, batch.dims, {**self.params, **params} if params else self.params)
        factor = self.scale
        if scale is not None:
            factor = checks.check_scale(scale, batch.options.head_dim)
        asked = (bool(return_lse), bool(partial), out is not None, lse is not None)
        earlier = self.repeats.get((bound.structure, asked), ())
        for repeat in earlier:
            results = repeat.run(bound, q, k, v, out, lse, factor)
            if results is not None:
                self._note(repeat, bound, params)
                return results
        try:
            form = self.form(q, k, v, True)
        except InputError:
            _check_call(self, q, k, v)  # its messages also name what the batch was made for
            raise
        unaligned = not self.cpu and not is_aligned(form, q, k, v, out)
        variation = self.variations.get((bound.structure, unaligned))
        if variation is None:
            _check_call(self, q, k, v)
            refuse_mask_params(self.variant, params, bound.mask_params)
            variation = self._vary(bound, unaligned, params)
        tensors, scalars = variation.values(bound)
        checks.check_grad((q, k, v, *tensors), checks.QKV, bound.structure.tensor_names)
        addresses, layouts, held = bind_tensors(variation.known, tensors)
        return_lse = return_lse or lse is not None
        with_lse = return_lse or (partial and not self.pointwise)
        wanted = Call(
            form, batch.lengths, bound.structure, layouts, given_layouts(out, lse), with_lse,
            partial, batch.options.target, int(self.cpu), not unaligned,
        )  # fmt: skip
        ready = variation.launches.get(wanted)
        if return_lse:
            checks.check_lse(return_lse, self.pointwise)
        if ready is None:
            _check_call(self, q, k, v)
            check_results(out, lse, form, partial, (q, k, v, *tensors))
            ready = make_launch(variation, wanted, out, lse, tensors)
            if len(variation.launches) >= KEPT_LAUNCHES:
                variation.launches.clear()
            variation.launches[wanted] = ready
        result, lse = launch(
            variation, ready, q, k, v, out, lse, factor, held, addresses, scalars, self.workspace
        )
        # With a CUDA graph `variations` holds the latest one alone.
        may_repeat = self.cpu and not batch.options.cuda_graph
        if may_repeat and all(repeat.launch is not ready for repeat in earlier):
            made = Repeat(
                variation, ready, layouts, form, asked, bound, self._read(bound, params),
                None if batch.options.v_in_k else self.scale, self.workspace,
            )  # fmt: skip
            self.repeats[bound.structure, asked] = (made, *earlier[: KEPT_REPEATS - 1])
            self._keep(made.native)
        return result, lse

    def _read(self, bound: Bound, params: Params) -> Captured | None:
        return captured(self.variant, self.batch.dims, self.params, params, bound)

    def _keep(self, call: _C.RepeatedCall) -> None:
        if call.can_run_again:
            self.again = (call, *self.again[: KEPT_AGAIN - 1])

    def _note(self, repeat: Repeat, bound: Bound, params: Params) -> None:
        """Notes a run that C did not recognise, and lets it recognise the next ones."""
        if self.notes.count((id(repeat), bound.scalars, *params)):
            self._keep(repeat.of(bound, self._read(bound, params)))

    def check_transforms(self, params: Params) -> None:
        """Raises GradError or InputError if the variant holds a tensor of a transform."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            batch, own = self.batch, level_params(params, None)
            bind_outside_modes(self.variant, batch.dims, {**self.params, **own})

    def variation_of(self, bound: Bound, params: Params) -> Variation:
        """A variation that merges states for a bound variant, planned now if there is none.

        Of any alignment: a kernel of another one merges as well, into memory that is aligned.
        """
        for unaligned in (False, True):
            variation = self.variations.get((bound.structure, unaligned))
            if variation is not None:
                return variation
        refuse_mask_params(self.variant, params, bound.mask_params)
        return self._vary(bound, self.observed.unaligned, params)

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
        self.observed.unaligned = unaligned
        self.observed.dtypes.update(
            (n, x.dtype) for n, x in params.items() if isinstance(x, torch.Tensor)
        )
        if self.batch.options.cuda_graph:
            self.variations = {}
        return self.variations.setdefault((bound.structure, unaligned), made)


KEPT_LAUNCHES = 256
KEPT_REPEATS = 4  # layouts that take turns, as of the layers of a model
KEPT_AGAIN = 8  # likewise, of all kinds of runs

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""k and v of levels of a cascade."""


def only_pair(pairs: Pairs, levels: Sequence[int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The k and v of levels in one storage. Raises InputError for different ones.

    kind: "ragged" or "paged", for the message.
    """
    for level, pair in zip(levels, pairs, strict=True):
        for name, tensor, own in zip("kv", pair, pairs[0], strict=True):
            checks.check_readable(f"{name} of level {level}", tensor)
            if tensor is not own and not checks.is_same_memory(tensor, own):
                raise InputError(
                    f"levels {levels[0]} and {level} are both {kind}, but have different {name}: "
                    + ("pages of one cache" if kind == "paged" else "rows of one tensor")
                    + ", the same (k, v) for both, is what they are planned in"
                )
    return pairs[0]


def level_param(level: int, name: str) -> str:
    """The name of a param that `Stored` keys or values of one level bring, beside user's params."""
    return f"{level}:{name}"


def level_params(params: Params, levels: Sequence[int] | None) -> Params:
    """The params of a part of a cascade: user's, and those that the k and v of its levels bring.

    levels: the part's; None for all. Raises InputError where levels of one k and v differ.
    """
    found: dict[str, object] = {}
    for key, value in params.items():
        level, colon, name = key.rpartition(":")
        if not colon:
            found[key] = value
            continue
        if levels is not None and int(level) not in levels:
            continue
        own = found.setdefault(name, value)
        same = own is value or (
            checks.is_same_memory(own, value)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
            else own == value
        )
        if not same:
            raise InputError(
                f"level {level} has the codes of another level, but a {name} of its own; levels of "
                "one kind and format have one k and one v, the same fa.kv.Stored"
            )
    return found


# --- checks ---------------------------------------------------------------------------------------


def _check_call(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises InputError if q, k and v do not fit the object's options or the planned batch."""
    batch = planned.batch
    options, paged = batch.options, batch.keys.page_size > 0
    _check_kind(planned, k, v)
    checks.check_tensors(q, k, v, checks.PAGED if paged else checks.PACKED)
    check_device("q", q, options.device)
    for name, tensor, dtype in (("q", q, options.q_dtype), ("k", k, options.k_dtype),
                                ("v", v, options.v_dtype)):  # fmt: skip
        if tensor.dtype != dtype:
            raise InputError(
                f"{name} is {KV_NAMES.get(tensor.dtype, tensor.dtype)}, but the batch was made "
                f"for {'q' if name == 'q' else 'kv'}_dtype={KV_NAMES[dtype]}; convert it with "
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
        has = row_dim(tensor) if dim == -1 else tensor.shape[dim]
        if has != wanted:
            hint = ""
            if paged and dim == -2 and tensor.shape[1] == wanted:
                hint = (
                    f"; if {name} is [pages, num_kv_heads, page_size, head_dim], pass "
                    f"{name}.transpose(1, 2)"
                )
            raise InputError(
                f"{name} has {what}={has}, but the batch was made with "
                f"{what}={wanted}; make another batch for it{hint}"
            )
    _check_rows("q", "num_q_tokens", q.shape[0], batch.lengths.num_q_tokens, "q_indptr", options)
    if paged:
        _check_pages(planned, k, v)
        return
    for name, tensor in (("k", k), ("v", v)):
        rows = batch.lengths.num_kv_tokens
        _check_rows(name, "num_kv_tokens", tensor.shape[0], rows, "kv_indptr", options)


def check_device(name: str, tensor: object, device: torch.device) -> None:
    """Raises InputError for an object that is no readable tensor on the batch's device."""
    tensor = checks.check_readable(name, tensor)
    checks.check_not_lazy(name, tensor)
    if tensor.device != device:
        raise InputError(
            f"{name} is on {tensor.device}, but the batch was made for {device}; move it with "
            f"{name}.to({str(device)!r}), or make another batch"
        )


def _check_kind(planned: Planned, k: object, v: object) -> None:
    """Raises InputError for a paged cache in a batch over ragged keys, or the reverse."""
    paged = planned.batch.keys.page_size > 0
    layouts = checks.PAGED if paged else checks.PACKED
    for name, tensor, layout in zip("kv", (k, v), layouts[1:], strict=True):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == (3 if paged else 4):
            raise InputError(
                f"{name} is {list(tensor.shape)}, but the batch is planned over "
                f"{'pages' if paged else 'ragged keys'}, where {name} is {layout}"
            )


def _check_rows(
    name: str, what: str, rows: int, planned: int, indptr: str, options: Options
) -> None:
    # The tensors of a captured graph have the size of the largest batch.
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
