"""The params of a batch: plan() takes those that the mask reads, run() the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from ...errors import FlashAttnJitError, ParamError
from ...planner.tiles import ALL_ROWS
from ...variants.binding import Bound, bind_on_host
from ...variants.params import MISSING, Dims, Param, declared_params
from ...variants.variant import Variant
from .batch_plan import Kernels, Needs, Pair, note_planned

Params = Mapping[str, object]


def bind_plan(
    variant: Variant, dims: Dims, given: Params, dtypes: Mapping[str, torch.dtype]
) -> Bound:
    """The variant bound to the params of its mask, with stand-ins for those that runs will give.

    dtypes: of params given to previous runs. Raises ParamError if a param of the mask is missing,
    or a given one is not the mask's.
    """
    params, missing = dict(given), []
    for d in _without_value(variant):
        if d.name in params:
            continue
        if d.param.kind == "static":
            raise ParamError(
                f"{variant.name} needs {d.name!r}, which decides its kernels; pass {d.name}=... to "
                "plan() or when making the variant"
            )
        params[d.name] = stand_in(d.param, dims, dtypes.get(d.name))
        missing.append(d.name)
    try:
        bound = bind_on_host(variant, dims, params)
    except FlashAttnJitError as error:
        if not missing:
            raise
        remedy = _declared_dtype(variant, dims, params, missing) or "declare their sizes as ints"
        raise ParamError(
            f"plan() does not know the values of {', '.join(missing)}, which come with run(), and "
            f"{variant.name} cannot be traced without: give them when making the variant, or "
            f"{remedy} ({error})"
        ) from error
    for name in missing:
        if name in bound.mask_params:
            raise ParamError(
                f"the mask of {variant.name} reads the param {name!r}; pass {name}=... to plan(): "
                "work is shared out by what the mask keeps"
            )
    for name in given:
        if name not in bound.mask_params:
            raise ParamError(
                f"param {name!r} of {variant.name} is not read by its mask; give it to run(), "
                "which takes new values without planning again"
            )
    return bound


def _declared_dtype(variant: Variant, dims: Dims, params: Params, missing: list[str]) -> str:
    """The declaration of a dtype of one missing param with which the variant can be traced, in
    words; empty if there is none."""
    for d in _without_value(variant):
        if d.name in missing and d.param.kind == "tensor" and d.param.dtypes is None:
            for dtype in (torch.bool, torch.int64):
                with suppress(FlashAttnJitError):
                    bind_on_host(variant, dims, {**params, d.name: stand_in(d.param, dims, dtype)})
                    sizes = "".join(f"{size!r}, " for size in d.param.dims)
                    return f"declare the dtype of {d.name}: fa.tensor({sizes}dtype={dtype})"
    return ""


def _without_value(variant: Variant) -> list[Any]:
    """The declared params that have neither a default nor a value of the variant's."""
    return [
        d
        for d in declared_params(variant)
        if d.param.default is MISSING and d.param.name not in d.owner.__dict__
    ]


def stand_in(param: Param, dims: Dims, dtype: torch.dtype | None = None) -> object:
    """A value of a param's kind: plans choose kernels by its kind and never read the value."""
    if param.kind == "scalar":
        return param.type(1 if param.limit is None else max(1, param.limit.least))
    sizes = []
    for size in param.dims:
        known = getattr(dims, size.removesuffix("|1"), 2) if isinstance(size, str) else size
        sizes.append(known)
    dtype = dtype or (param.dtypes[0] if param.dtypes else torch.float32)
    return torch.empty(sizes, dtype=dtype, device=dims.device)


def stand_ins(variant: Variant, dims: Dims) -> dict[str, object]:
    """Stand-ins for the declared params that have neither a default nor a value."""
    return {d.name: stand_in(d.param, dims) for d in _without_value(variant)}


def refuse_mask_params(variant: Variant, given: Params, mask_params: frozenset[str]) -> None:
    """Raises ParamError for params given to a run that belong to the plan: the mask's, and those
    that are compiled in."""
    for name in given:
        if name in mask_params:
            compiled = {d.name for d in declared_params(variant) if d.param.kind == "static"}
            if name in compiled:
                raise ParamError(
                    f"param {name!r} of {variant.name} is compiled in; give it when making the "
                    f"variant or to plan({name}=...) instead of run()"
                )
            raise ParamError(
                f"param {name!r} of {variant.name} is read by its mask, which the plan depends on; "
                f"give it to plan({name}=...) instead of run()"
            )


def bound_kernels(
    kernels: Kernels,
    variant: Variant,
    dims: Dims,
    paged: bool,
    sparse: bool,
    mixed: bool,
    tma: bool,
) -> Pair:
    """The kernels of every batch within the limits; on CPUs without their modules."""
    bound = bind_on_host(variant, dims, stand_ins(variant, dims))
    unaligned = not kernels.options.whole_rows
    needs = Needs(ALL_ROWS, True, paged, sparse, mixed, unaligned=unaligned, tma=tma)
    if kernels.options.cpu:
        return kernels.unloaded(bound.structure, needs, variant.name)
    pair = kernels.pair(bound.structure, needs, variant.name)
    note_planned(pair)
    return pair
