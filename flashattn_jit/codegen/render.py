"""Renders a kernel spec to source text. Imported on a cache miss only: it imports Jinja."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..env import templates_dir
from ..errors import InputError
from ..variants.interval.simplify import range_tables
from ..variants.lower.hooks import lower_hooks
from .budget import (
    changes_rows,
    ctas_per_sm,
    merge_shared_bytes,
    query_stages,
    shared_bytes,
    warpgroup_registers,
)
from .spec import CPP_TYPES, CUDA_CODES, AnySpec, KernelSpec, UtilitySpec, matrix_dtype
from .targets import CPU_ROWS, has_amx, is_cuda, sm_version

_NOT_WITH_SPARSE = {
    "block_mask": "key lists say which blocks are visited",
    "mixed_rows": "rows that share keys cannot have lists of their own",
}


@cache
def environment() -> Environment:
    """The Jinja environment of templates/; undefined names are errors."""
    return Environment(
        loader=FileSystemLoader(str(templates_dir())),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(spec: AnySpec) -> str:
    """The source of the artifact that `spec` names; byte for byte the same on every machine."""
    if isinstance(spec, UtilitySpec):
        return environment().get_template(spec.template).render(spec=spec)
    mask = spec.variant.hook("mask_mod")
    if not is_cuda(spec.target):
        names = _cpu_names(spec)
    else:
        names = _cuda_code(spec) if spec.tile_kind == "append" else _cuda_names(spec)
    return (
        environment()
        .get_template(spec.template)
        .render(
            spec=spec,
            num_tensors=len(spec.variant.tensors),
            num_range_tables=0 if mask is None else 2 * len(range_tables(mask)),
            num_scalars=len(spec.variant.scalars),
            **names,
        )
    )


def _cpu_names(spec: KernelSpec) -> dict[str, object]:
    return {
        "lanes": CPU_ROWS[spec.target].lanes,
        "amx": has_amx(spec.target),
        "fp16": CPU_ROWS[spec.target].fp16,
        "q_type": CPP_TYPES[spec.q_dtype],
        "k_type": CPP_TYPES[spec.k_dtype],
        "v_type": CPP_TYPES[spec.v_dtype],
        "matrix_type": CPP_TYPES[matrix_dtype(spec.target, spec.q_dtype)],
        "hooks": lower_hooks(spec.variant, spec.name),
    }


def _cuda_code(spec: KernelSpec) -> dict[str, object]:
    element = {"float16": "Float16", "bfloat16": "Bfloat16"}[spec.q_dtype]
    appends = spec.tile_kind == "append"
    stored = (CUDA_CODES.get(name, "NoCodes<Element>") for name in (spec.k_dtype, spec.v_dtype))
    return {
        "element": element,
        "codes": tuple(stored) if spec.has_codes or appends else (),
        "hooks": lower_hooks(spec.variant, spec.name, "cuda", codes=spec.has_codes and not appends),
    }


def _cuda_names(spec: KernelSpec) -> dict[str, object]:
    for other in _NOT_WITH_SPARSE if "sparse" in spec.features else ():
        if other in spec.features:
            raise InputError(
                f"no CUDA kernel has features 'sparse' and {other!r}: {_NOT_WITH_SPARSE[other]}"
            )
    if "indirect" in spec.features:
        raise InputError(
            "feature 'indirect' is of CPU kernels; CUDA kernels have 'paged', 'mixed_rows' and "
            "'sparse'"
        )
    return {
        "min_blocks": ctas_per_sm(spec),
        "shared_bytes": shared_bytes(spec),
        "query_stages": query_stages(spec),
        "warpgroup_registers": warpgroup_registers(spec),
        "changes_rows": changes_rows(spec),
        "merge_shared_bytes": merge_shared_bytes(spec),
        "merge_waits": sm_version(spec.target) >= 90,
        **_cuda_code(spec),
    }
