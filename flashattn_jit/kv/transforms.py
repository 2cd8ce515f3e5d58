"""Transforms of groups before there is a batch: whether they fit, and what identifies them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ..errors import FlashAttnJitError, ParamError
from ..ops.append import check_transform
from ..ops.planning.batch_params import stand_ins
from ..variants.binding import Bound, bind_outside_modes
from ..variants.ir.ir import variant_to_json
from ..variants.params import Dims, declared_params, parts_of
from ..variants.variant import Variant

if TYPE_CHECKING:
    from .spec import Group


def bind_transform(group: Group) -> Bound | None:
    """A group's transform, bound to one token and zeros for the params that appends give.

    None where it cannot be bound before an append: its tensors have the sizes of a batch, lie on a
    device, or its hooks depend on sizes of the params. Raises VariantError, TraceError for hooks
    that do not fit the head dims.
    """
    transform = check_transform(group.transform)
    assert transform is not None and group.head_dim_v is not None
    heads = group.num_kv_heads
    dims = Dims(1, heads, heads, 1, 1, group.head_dim, group.head_dim_v, torch.device("cpu"))
    given = {
        name: torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
        for name, value in stand_ins(transform, dims).items()
    }
    try:
        return bind_outside_modes(transform, dims, given)
    except FlashAttnJitError as error:
        if given or isinstance(error, ParamError):
            return None
        raise


def transform_document(group: Group) -> object:
    """What tells a group's transform from others, for JSON: its hooks, and the values they read."""
    if group.transform is None:
        return None
    transform = check_transform(group.transform)
    assert transform is not None
    bound = bind_transform(group)
    made = _made_by(transform)
    if bound is None:
        values = [d.owner.__dict__.get(d.param.name) for d in declared_params(transform)]
        return [transform.name, made, [_value(x) for x in values]]
    # Default tables of the library follow from what made it; machines may round them differently.
    derived = {d.name for d in declared_params(transform) if _is_derived(d.owner, d.param.name)}
    tensors = [
        None if p.name in derived else _value(t)
        for p, t in zip(bound.ir.tensors, bound.tensors, strict=True)
    ]
    scalars = [_value(x) for x in bound.scalars]
    return [transform.name, made, variant_to_json(bound.ir), tensors, scalars]


def _is_derived(owner: Variant, name: str) -> bool:
    return "__fajit_made_by__" in type(owner).__dict__ and name not in owner.__dict__


def _made_by(variant: Variant) -> list[str]:
    """The arguments that the library made the classes of a variant's parts with."""
    made = [repr(x) for x in type(variant).__dict__.get("__fajit_made_by__", ())[1:]]
    return made + [text for part in parts_of(variant) for text in _made_by(part)]


def _value(x: object) -> str | None:
    if not isinstance(x, torch.Tensor):
        return None if x is None else repr(x)
    entries = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return f"{x.dtype} {list(x.shape)} {hashlib.sha256(entries.tobytes()).hexdigest()}"
