"""From what `warm` is given to the specs that it builds: variants, head dims, dtypes and targets.

A variant becomes an IR as in a real call, by `bind`. Head counts and lengths decide no kernel, so
any will do; where one of them would, warming says which argument it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ...codegen.spec import AnySpec, takes_dtypes, wrong_rows
from ...errors import FlashAttnJitError, InputError, ParamError
from ...formats import Formats
from ...ops.keys.columns import check_values_in_keys
from ...ops.planning.batch_params import stand_in
from ...planner.reachable import FORMATS, reachable, utilities
from ...variants import library
from ...variants.binding import Bound, bind
from ...variants.compose import present_hooks
from ...variants.ir.dtypes import KV_NAMES
from ...variants.ir.ir import VariantIR, unscaled_integers
from ...variants.params import MISSING, Dims, declared_params
from ...variants.variant import Variant, as_variant
from .arguments import Dtypes, HeadDims
from .compositions import OfHeads, compositions, over_codes

_PROBES = (
    Dims(batch=2, num_q_heads=16, num_kv_heads=4, q_len=128, kv_len=256),
    Dims(batch=3, num_q_heads=24, num_kv_heads=3, q_len=192, kv_len=320),
)
"""Sizes that variants are bound with where defaults ask for some: a kernel that is the same for
both is the same for all."""
_GIVE_HEADS = "give num_q_heads= and num_kv_heads="
_PLANNED = ("ragged", "paged", "sparse", "cascade", "tree", "bits", "block_bits")
_MAKERS = ("Natten", "QKNorm", "RelativeBias", "RoPE", "GatedOutput")
"""Functions of the library that make variants."""


def specs_of(
    variants: Sequence[Variant],
    head_dims: Sequence[HeadDims],
    dtypes: Sequence[Dtypes],
    targets: Sequence[str],
    formats: Sequence[str] | None,
    heads: tuple[int, int] | None,
    params: Mapping[str, object],
    stored: Formats | None = None,
    v_in_k: bool = False,
) -> list[AnySpec]:
    """All that `reachable` and `utilities` list for some variants.

    stored: formats of keys and values, in place of their dtypes. v_in_k: of batches alone, whose
    values are the first columns of keys.

    Combinations that a target has no kernels for are left out. Raises InputError where nothing is
    left, of all or of one variant; ParamError, TraceError as a call does.
    """
    if stored is not None:
        names = [form and KV_NAMES[form.dtype] for form in stored]
        dtypes = [(q, names[0] or k, names[1] or v) for q, k, v in dtypes]
    pairs = [(t, d) for t in targets for d in dtypes if takes_dtypes(t, d)]
    if not pairs:
        raise InputError(
            f"none of the targets {', '.join(targets)} takes the dtypes "
            f"{', '.join('/'.join(d) for d in dtypes)}; CUDA targets take bfloat16 and float16 "
            "(sm_75: float16), the same for q, k and v"
        )
    if v_in_k:
        formats = _PLANNED if formats is None else formats
        for head_dim, head_dim_v in head_dims:
            check_values_in_keys(head_dim, head_dim_v, stored or (None, None))
        if not set(formats) <= {*_PLANNED}:
            raise InputError(f"formats: v_in_k is of batches, in {', '.join(_PLANNED)}")
    declared = {d.name for v in variants for d in declared_params(v)}
    for name in params:
        if name not in declared:
            raise ParamError(f"params: no variant has a param {name!r}")
    found: list[AnySpec] = []
    for chosen in variants:
        before = len(found)
        for head_dim, head_dim_v in head_dims:
            made_of = list(
                compositions(chosen, formats or FORMATS)
                if stored is None
                else over_codes(chosen, stored, (head_dim, head_dim_v), formats or FORMATS)
            )
            if not made_of:
                raise InputError(
                    f"formats: no calls of {chosen.name} are {' or '.join(formats or FORMATS)}; "
                    "max_scores is for what flex_attention makes of a score_mod and a mask_mod, "
                    "tree, bits and block_bits are for masks that are no C++ text, append for "
                    "key_mod and value_mod, block_mask and max_scores for values without kv_format"
                )
            for made in made_of:
                dims = (head_dim, made.head_dim_v or head_dim_v)
                given = {**params, **made.params}
                irs = [(bound_for(made.variant, dims, heads, given).ir, made.formats)]
                if planned := tuple(f for f in made.formats if f in _PLANNED):
                    irs += [(ir, planned) for ir in _planned(made.variant, dims, heads, given)]
                for ir, kinds in irs:
                    for target, of in pairs:
                        # The pass for row maxima has values of its own, in q's dtype.
                        own = (of[0], of[1], of[0]) if kinds == ("max_scores",) else of
                        specs = reachable(ir, dims, own, target, kinds, v_in_k)
                        found += [replace(spec, name=chosen.name) for spec in specs]
        if len(found) == before:  # targets take the dtypes: it is int8 that no hook scales
            hooks = present_hooks(made_of[0].variant).__contains__
            words = next(filter(None, (unscaled_integers(hooks, *of[1:]) for _, of in pairs)), "")
            words = words or next(filter(None, (wrong_rows(dims, of) for _, of in pairs)), "")
            words = words or "appends change rows of float32, bfloat16 and float16"
            raise InputError(f"dtypes: {chosen.name}: {words}")
    for target, of in pairs:
        found += utilities(of[1:], target)
    return found


def _planned(
    chosen: Variant,
    dims: HeadDims,
    heads: tuple[int, int] | None,
    params: Mapping[str, object],
) -> list[VariantIR]:
    """What `BatchAttention.plan` asks kernels for, before runs bring the params of other hooks.

    It stands in for them; in later plans with the dtypes that runs gave.
    """
    mask_params = bound_for(chosen, dims, heads, params).mask_params
    late = [
        d for d in declared_params(chosen)
        if d.name in params and d.name not in mask_params and d.param.kind != "static"
    ]  # fmt: skip
    if not late:
        return []
    sizes = _sized(_PROBES[0], dims, heads)
    found = []
    for later in (False, True):
        values = dict(params)
        for d in late:
            value = values.pop(d.name)
            if d.param.default is MISSING and d.param.name not in d.owner.__dict__:
                dtype = value.dtype if later and isinstance(value, torch.Tensor) else None
                values[d.name] = stand_in(d.param, sizes, dtype)
        with suppress(FlashAttnJitError):  # plan() refuses it, too
            found.append(bound_for(chosen, dims, heads, values).ir)
    return found


def bound_for(
    chosen: Variant,
    dims: HeadDims,
    heads: tuple[int, int] | None,
    params: Mapping[str, object],
) -> Bound:
    """A variant for head dims, with the IR that calls of any size have.

    Raises InputError where it depends on the number of heads and `heads` is None, ParamError where
    a param is missing or does not fit, TraceError.
    """
    own = {d.name: d.param.default for d in declared_params(chosen)}
    given = {name: value for name, value in params.items() if name in own}
    reads_sizes = any(callable(default) for name, default in own.items() if name not in given)
    bounds = []
    for probe in _PROBES if reads_sizes else (Dims(),):
        # Sizes that are not known are not compared with those of given tensors.
        sizes = Dims(num_q_heads=probe.num_q_heads, num_kv_heads=probe.num_kv_heads)
        sized = _sized(sizes if given else probe, dims, heads)
        known = {
            name: value.value(2 if sized.num_kv_heads < 0 else sized.num_kv_heads)
            if isinstance(value, OfHeads)
            else value
            for name, value in given.items()
        }
        try:
            bounds.append(bind(chosen, sized, known))
        except ParamError as error:
            remedy = _remedy(chosen, given, reads_sizes and heads is None)
            raise ParamError(f"{error}{remedy}") from error
    if any(bound.ir != bounds[0].ir for bound in bounds):
        remedy = "warm a manifest that was recorded where it runs" if heads else _GIVE_HEADS
        raise InputError(f"the kernels of {chosen.name} depend on sizes: {remedy}")
    return bounds[0]


def _sized(sizes: Dims, dims: HeadDims, heads: tuple[int, int] | None) -> Dims:
    """Sizes with other head dims and, where they are given, numbers of heads."""
    q_heads, kv_heads = heads or (sizes.num_q_heads, sizes.num_kv_heads)
    return sizes._replace(
        head_dim=dims[0], head_dim_v=dims[1], num_q_heads=q_heads, num_kv_heads=kv_heads
    )


def library_names() -> list[str]:
    """Names of the library that make a variant: its variant classes and their makers."""
    return sorted(
        name
        for name in library.__all__
        if name in _MAKERS
        or isinstance(found := getattr(library, name), type)
        and issubclass(found, Variant)
    )


def parse_variant(what: Any) -> Variant:
    """A variant from a variant, a bare hook, or what makes one and its name in the library.

    Raises InputError.
    """
    if isinstance(what, str):
        if what not in library_names():
            raise InputError(
                f"{what!r} is no file and no variant of the library; variants are "
                f"{', '.join(library_names())}"
            )
        what = getattr(library, what)
    if isinstance(what, type) or what in [getattr(library, name) for name in _MAKERS]:
        name = what.__name__
        try:
            what = what()
        except TypeError as error:
            raise InputError(f"{name} needs arguments, give {name}(...): {error}") from None
    return as_variant(what)


def _remedy(chosen: Variant, given: Mapping[str, object], assumed_heads: bool) -> str:
    for name, param, owner in declared_params(chosen):
        if name in given or owner.__dict__.get(param.name, MISSING) is not MISSING:
            continue
        if param.default is MISSING and param.kind == "tensor":
            shape = ", ".join("2" for _ in param.dims)
            return (
                f"; for warm, params={{{name!r}: torch.empty({shape}, dtype=...)}}: its dtype, "
                "rank and contiguity decide the kernel, its values and sizes do not"
            )
        if param.default is MISSING:
            return f"; for warm, params={{{name!r}: ...}}: any value, unless hooks branch on it"
    return f"; {_GIVE_HEADS}" if assumed_heads else ""
