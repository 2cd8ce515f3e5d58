"""Parsing of a spec's document to the spec, and the lines of manifests that contain documents.

Documents come from files and are not trusted. An accepted document renders only to code of this
project: every name, dtype, operation, number and stride is checked against the values that specs
can have. The exception is hooks given as C++ text, below ``variant.cpp``, which are arbitrary code.
`has_cpp` detects them; `parse_line` refuses them without `allow_cpp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from ..errors import ManifestError
from ..variants.ir.document import (
    check_name,
    choice,
    fail,
    integer,
    record,
    show,
    variant_from_document,
)
from ..variants.ir.ir import KV_HOOKS, ROW_HOOKS, Node, VariantIR, canonical_json
from .budget import MOST_NARROW, fits, padded
from .spec import (
    CODE_DTYPES,
    CUDA_CODES,
    FEATURES,
    KV_DTYPES,
    MAX_HEAD_DIM,
    Q_DTYPES,
    SCHEMA,
    UTILITY_SCHEMA,
    AnySpec,
    KernelSpec,
    TileKind,
    UtilityKernel,
    UtilitySpec,
    append_kernel,
    cuda_dtypes,
    name_of,
    wrong_rows,
)
from .targets import (
    CODE_TARGETS,
    CPU_TARGETS,
    CUDA_TARGETS,
    SPECIFIC_TARGETS,
    called_target,
    is_cuda,
)

MAX_DOCUMENT = 4 << 20
"""Characters of a document. Those of large variants have some ten thousand."""

MANIFEST_SCHEMA = 1
"""Version of a manifest's line."""

_CPU_FEATURES = ("block_mask", "indirect")
_UNIT_BYTES = (1, 2, 4, 8, 16)
_MAX_TILE = 4096

_KERNEL_FIELDS = (
    "schema", "variant", "dtypes", "head_dims", "target", "tile", "warps", "features",
)  # fmt: skip
_LINE_FIELDS = ("manifest_schema", "name", "spec")
_UTILITY_FIELDS = ("utility_schema", "kernel", "target", "unit_bytes")


def spec_from_document(text: str | Mapping[str, object], name: str = "variant") -> AnySpec:
    """The spec of a document: the inverse of ``spec.document()``.

    Args:
        text: JSON, or the parsed object.
        name: the variant's display name. A name in the document (with C++ texts) takes precedence.

    Raises:
        ManifestError: a field has a value that no spec has, or the JSON is not canonical. Names the
            field.
    """
    doc = parse_json("spec", text) if isinstance(text, str) else _plain(text)
    check_name("name", name)
    if not isinstance(doc, dict):
        raise fail("spec", f"an object is expected, got {show(doc)}")
    spec = _utility(doc) if "utility_schema" in doc else _kernel(doc, name)
    if spec.document() != canonical_json(doc):
        raise fail("spec", "is not written as specs are; make it with this version")
    return spec


def has_cpp(spec: AnySpec) -> bool:
    """Whether the spec holds hooks that were given as C++ text."""
    return isinstance(spec, KernelSpec) and bool(spec.variant.cpp)


def parse_json(where: str, text: str) -> object:
    """Parsed untrusted JSON, of limited size, without repeated fields, NaN or infinities.

    Raises ManifestError.
    """
    if len(text) > MAX_DOCUMENT:
        raise fail(where, f"{len(text)} characters are more than the {MAX_DOCUMENT} of any spec")
    try:
        return json.loads(text, object_pairs_hook=_fields, parse_constant=_refuse)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise fail(where, f"is no JSON: {error}") from None


# --- lines of manifests --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel to be built. name: for display; no key depends on it."""

    name: str
    spec: AnySpec

    @property
    def document(self) -> str:
        """The spec's document, which identifies the line."""
        return self.spec.document()


def line_of(spec: AnySpec) -> Line:
    """The line of a spec; characters that a name must not have are replaced by underscores."""
    return Line(name_of(spec), spec)


def line_text(line: Line) -> str:
    """The line's text in a manifest, without the newline."""
    head = canonical_json({"manifest_schema": MANIFEST_SCHEMA, "name": line.name})
    return f'{head[:-1]},"spec":{line.document}}}'


def parse_line(text: str, *, allow_cpp: bool = False) -> Line:
    """The parsed line of a manifest.

    Raises:
        ManifestError: the text is no line of this version, or holds C++ text without `allow_cpp`.
            Names the field.
    """
    fields = record("line", parse_json("line", text), _LINE_FIELDS)
    schema = fields["manifest_schema"]
    if schema != MANIFEST_SCHEMA or isinstance(schema, bool):
        raise fail(
            "manifest_schema",
            f"this version reads {MANIFEST_SCHEMA}, got {schema!r:.40}; record the manifest again",
        )
    name = check_name("name", fields["name"])
    if not isinstance(fields["spec"], dict):
        raise fail("spec", "an object is expected")
    spec = spec_from_document(fields["spec"], name)
    if has_cpp(spec) and not allow_cpp:
        raise fail(
            "spec.variant.cpp",
            f"{name} has hooks given as C++ text, which is code; where the manifest is trusted, "
            "read it with allow_cpp=True",
        )
    # A spec with C++ texts keeps the name in its document.
    return Line(name, spec)


# --- the checks of a document --------------------------------------------------------------------


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is repeated")
    return fields


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number of JSON")


def _plain(doc: Mapping[str, object]) -> object:
    """A parsed document with JSON types only: dict, list, str, int, bool."""
    try:
        text = json.dumps(dict(doc), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise fail("spec", f"is no document: {error}") from None
    return parse_json("spec", text)


def _utility(doc: dict[str, Any]) -> UtilitySpec:
    record("spec", doc, _UTILITY_FIELDS)
    _schema("utility_schema", doc["utility_schema"], UTILITY_SCHEMA)
    kernel = choice("kernel", doc["kernel"], get_args(UtilityKernel))
    target = choice("target", doc["target"], CUDA_TARGETS)
    unit_bytes = integer("unit_bytes", doc["unit_bytes"], 0, 16)
    if unit_bytes not in (_UNIT_BYTES if kernel == "append_paged_kv" else (0,)):
        raise fail("unit_bytes", f"{kernel} has no kernel of {unit_bytes} bytes")
    return UtilitySpec(cast(UtilityKernel, kernel), target, unit_bytes)


def _schema(where: str, value: object, expected: int) -> None:
    if value != expected or isinstance(value, bool):
        raise fail(
            where,
            f"{expected} is what this version reads, got {show(value)}; record with this version",
        )


def _kernel(doc: dict[str, Any], name: str) -> KernelSpec:
    record("spec", doc, _KERNEL_FIELDS)
    _schema("schema", doc["schema"], SCHEMA)
    target = choice("target", doc["target"], (*CPU_TARGETS, *CODE_TARGETS))
    cuda = is_cuda(target)
    body = doc["variant"]
    if isinstance(body, dict) and body.get("cpp"):
        name = check_name("variant.name", body.get("name"))
        body = {k: v for k, v in body.items() if k != "name"}
    variant = variant_from_document("variant", body)
    dtypes = _dtypes(doc["dtypes"], target)
    head_dim, head_dim_v = (
        integer(f"head_dims[{i}]", n, 1, MAX_HEAD_DIM)
        for i, n in enumerate(_sequence("head_dims", doc["head_dims"], 2))
    )
    _check_rows(variant, head_dim, head_dim_v)
    if wrong := wrong_rows((head_dim, head_dim_v), dtypes):
        raise fail("head_dims", wrong)
    tile_kind, tile_q, tile_kv = _sequence("tile", doc["tile"], 3)
    choice("tile[0]", tile_kind, get_args(TileKind))
    warps, stages = _sequence("warps", doc["warps"], 2)
    _check_tile(target, tile_kind, tile_q, tile_kv, warps, stages)
    spec = KernelSpec(
        variant, *dtypes, head_dim, head_dim_v, target, cast(TileKind, tile_kind), tile_q, tile_kv,
        _features(doc["features"], cuda), name, warps, stages,
    )  # fmt: skip
    if tile_kind == "append":
        _check_append(spec)
    else:
        _check_head_dims(spec)
    return spec


def _check_head_dims(spec: KernelSpec) -> None:
    """Raises ManifestError for a tile or a feature that these head dims do not have."""
    wide = max(padded(spec.head_dim), padded(spec.head_dim_v)) > MOST_NARROW
    if is_cuda(spec.target):
        if wide != (spec.tile_kind == "prefill_wide"):
            raise fail("tile", f"prefill_wide is the kind of head dims above {MOST_NARROW}")
        if wide and not fits(spec):
            raise fail("tile", "it does not fit the target's shared memory")
    if "values_in_keys" in spec.features:
        hooks = {hook for hook, _ in (*spec.variant.hooks, *spec.variant.cpp)}
        changed = spec.has_codes or not hooks.isdisjoint(KV_HOOKS)
        if not wide or changed or spec.head_dim_v > spec.head_dim or spec.k_dtype != spec.v_dtype:
            raise fail("features", "values_in_keys is of wide rows that are read as they are")


def _check_append(spec: KernelSpec) -> None:
    """Raises ManifestError unless a kernel of kind "append" is one of the planner's."""
    dtypes = (spec.k_dtype, spec.v_dtype)
    allowed = (spec.q_dtype, *CODE_DTYPES) if spec.has_codes else Q_DTYPES
    for i, dtype in enumerate(dtypes):
        choice(f"dtypes[{i + 1}]", dtype, allowed)
    choice("target", spec.target, (*CPU_TARGETS, *CUDA_TARGETS))
    for hook, _ in (*spec.variant.hooks, *spec.variant.cpp):
        choice("variant.hooks", hook, KV_HOOKS)
    dims = (spec.head_dim, spec.head_dim_v)
    if spec != append_kernel(
        spec.variant, dims, dtypes, spec.target, new_dtype=spec.q_dtype if spec.has_codes else ""
    ):
        raise fail("tile", "appending has one kernel, of 16 tokens, with the dtype of k for q")


def _sequence(where: str, value: object, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise fail(where, f"a list of {count} is expected, got {show(value)}")
    return value


def _dtypes(value: object, target: str) -> tuple[str, str, str]:
    q, k, v = _sequence("dtypes", value, 3)
    cuda = is_cuda(target)
    choice("dtypes[0]", q, cuda_dtypes(target) if cuda else Q_DTYPES)
    for i, other in ((1, k), (2, v)):
        choice(f"dtypes[{i}]", other, (q, *CUDA_CODES) if cuda else KV_DTYPES)
    return q, k, v


def _check_tile(
    target: str, kind: object, tile_q: object, tile_kv: object, warps: object, stages: object
) -> None:
    cuda = is_cuda(target)
    integer("tile[1]", tile_q, 1, _MAX_TILE)
    integer("tile[2]", tile_kv, 1, _MAX_TILE)
    integer("warps[0]", warps, 1 if cuda else 0, 32 if cuda else 0)
    integer("warps[1]", stages, 1 if cuda else 0, 16 if cuda else 0)
    if cuda and (tile_q % 16 or tile_kv % 16):  # type: ignore[operator]
        raise fail("tile", f"CUDA tiles have multiples of 16, got {tile_q} x {tile_kv}")
    if cuda and kind == "prefill" and tile_q % (16 * warps):  # type: ignore[operator]
        raise fail("tile", f"{tile_q} rows are not blocks of 16 for each of {warps} warps")
    if kind == "prefill_wgmma" and (
        target not in SPECIFIC_TARGETS
        or (tile_q, warps) not in ((64, 8), (64, 12), (128, 12), (128, 16))
        or tile_kv > 256  # type: ignore[operator]
    ):
        raise fail(
            "tile", f"{kind} has 64 or 128 rows, 8, 12 or 16 warps, on {SPECIFIC_TARGETS[0]}"
        )
    if kind == "prefill_wide" and (
        not cuda
        or tile_q not in (32, 64)
        or tile_kv not in (16, 32)
        or tile_q != 8 * warps  # type: ignore[operator]
        or stages not in (1, 2)
        or called_target(target) == "sm_75"
    ):
        raise fail("tile", f"{kind} has 32 or 64 rows, 16 or 32 keys, a warp for 8 rows, on CUDA")
    if cuda and kind == "few_row" and tile_kv % (16 * warps):  # type: ignore[operator]
        raise fail("tile", f"{tile_kv} keys are not blocks of 16 for each of {warps} warps")


def _features(value: object, cuda: bool) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > len(FEATURES):
        raise fail("features", f"a list of features is expected, got {show(value)}")
    allowed = tuple(f for f in FEATURES if f != "indirect") if cuda else _CPU_FEATURES
    for i, feature in enumerate(value):
        choice(f"features[{i}]", feature, allowed)
    if len(set(value)) != len(value) or {"block_mask", "indirect"} <= set(value):
        raise fail("features", f"{show(value)} do not go together")
    if "sparse" in value and {"block_mask", "mixed_rows"} & set(value):
        raise fail("features", f"{show(value)} do not go together")
    return tuple(value)


def _check_rows(variant: VariantIR, head_dim: int, head_dim_v: int) -> None:
    """Raises ManifestError unless rows of row hooks have the length of a head dim."""
    for hook, graph in variant.hooks:
        if hook in ROW_HOOKS:
            length = head_dim if ROW_HOOKS[hook] == "head_dim" else head_dim_v
            rows: list[Node] = [
                n for n in graph.nodes if n.op == "input" and n.attr("name") == "row"
            ]
            for row in (*rows, graph.result):
                # The result may be one number for the whole row.
                if row.shape != (length,) and (row.shape or row is not graph.result):
                    raise fail(
                        f"variant.hooks.{hook}",
                        f"rows of {length} are expected, got {list(row.shape)}",
                    )
