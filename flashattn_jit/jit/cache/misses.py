"""The report of a miss: the layers searched, the entry that differs least, the remedy."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flashattn_jit.codegen.document import has_cpp, line_of, line_text, spec_from_document
from flashattn_jit.codegen.spec import BuildRequest, host_targets
from flashattn_jit.errors import (
    Difference,
    FlashAttnJitError,
    MissingKernelError,
    Nearest,
    Searched,
    UnsafeCacheError,
)
from flashattn_jit.jit.cache.entry import Document, KernelKey
from flashattn_jit.jit.cache.layers import Layer
from flashattn_jit.variants.ir.ir import HOOKS

log = logging.getLogger(__name__)

_MOST_SHOWN = 12
_MOST_TEXT = 120
_MOST_COMPARED = 20_000
_ABSENT = object()

SHIP = (
    "make a wheel of it on a machine with a compiler (flashattn-jit warm, then flashattn-jit pack "
    "--wheel NAME) and install that here with pip"
)
"""The remedy for a machine without a compiler."""

# Fields that identify a kernel weigh more than fields that differ between builds of one kernel.
_WEIGHTS = {
    "target": 4,
    "spec.variant": 8,
    "spec.kernel": 50,
    "spec.dtypes": 3,
    "spec.head_dims": 3,
}


def differences(wanted: Document, found: Document) -> tuple[Difference, ...]:
    """The fields in which two key documents differ, with the kernel spec split into its fields.

    A hook is one field: "5 operations" against "7 operations".
    """
    return tuple(_compare("", _fields(wanted), _fields(found), depth=3))


def nearest(key: KernelKey, documents: Iterable[tuple[str, str, Document]]) -> Nearest | None:
    """The one of `documents`, each (key, location, document), that differs least from `key`."""
    best: tuple[int, Nearest] | None = None
    for i, (found_key, location, document) in enumerate(documents):
        if i >= _MOST_COMPARED:
            break
        if found_key == key.hex:
            continue  # its layer has given the reason why it cannot be used
        found = Nearest(found_key, location, differences(key.document, document))
        distance = sum(_weight(d.field) for d in found.differences)
        if best is None or distance < best[0]:
            best = distance, found
    return best[1] if best else None


def nearest_in(key: KernelKey, among: Iterable[Layer]) -> Nearest | None:
    """The entry of these layers that differs least from a key that none of them has."""
    return nearest(key, (found for layer in among for found in _documents(layer)))


def _documents(layer: Layer) -> Iterator[tuple[str, str, Document]]:
    try:
        yield from layer.documents()
    except (UnsafeCacheError, OSError) as error:
        log.debug("cannot list %s: %s", layer.location, error)


def build_command(spec: str, name: str = "variant") -> str:
    """The shell command that builds a kernel; empty where `spec` is not valid."""
    try:
        kernel = spec_from_document(spec, name)
    except FlashAttnJitError:
        return ""
    line = line_of(kernel)
    trusted = "--allow-cpp " if has_cpp(line.spec) else ""
    return (
        f"FLASHATTN_JIT_COMPILE=missing flashattn-jit warm {trusted}- <<'MANIFEST'\n"
        f"{line_text(line)}\nMANIFEST"
    )


def fault_of(searched: Sequence[Searched]) -> str:
    """The fault of the first layer that has one, with the layer's location; empty if none has."""
    for one in searched:
        if one.fault:
            return one.reason if one.location in one.reason else f"{one.location}: {one.reason}"
    return ""


def missing_kernel(
    request: BuildRequest, key: KernelKey, searched: Sequence[Searched], closest: Nearest | None
) -> MissingKernelError:
    """The error of a miss where nothing may be compiled: layers, nearest entry, remedy."""
    spec, target = request.spec, request.target
    command = build_command(spec, request.name)
    cause = fault_of(searched)
    lines = [cause] if cause else []
    lines += [
        f"kernel {key.hex} of {request.name} for {target} is in no layer of the cache, and "
        "FLASHATTN_JIT_COMPILE=never forbids to compile it",
        *(f"  {layer}" for layer in searched),
    ]
    if closest:
        lines.append(f"  nearest: {closest.key[:16]} in {closest.location}; wanted -> there:")
        lines += [f"    {difference}" for difference in closest.differences[:_MOST_SHOWN]]
        if (more := len(closest.differences) - _MOST_SHOWN) > 0:
            lines.append(f"    and {more} more")
        differ = {d.field: d.found for d in closest.differences}
        target_alone = differ.keys() <= {"target", "flags", "spec.target", "spec.tile"}
        if target_alone and differ.get("target") in host_targets():
            lines.append(f"  FLASHATTN_JIT_TARGET={differ['target']} runs that one here")
    if command:
        lines.append(
            f"{SHIP[0].upper()}{SHIP[1:]}; or compile it ahead, with the same "
            f"FLASHATTN_JIT_CACHE_DIR:\n{command}"
        )
    else:
        lines.append(
            f"  spec: {spec}\ncompile it ahead, with the same FLASHATTN_JIT_CACHE_DIR and "
            "FLASHATTN_JIT_COMPILE=missing"
        )
    return MissingKernelError(
        "\n".join(lines),
        spec=spec,
        key=key.hex,
        target=target,
        layers=searched,
        nearest=closest,
        command=command,
    )


def _fields(document: Document) -> dict[str, Any]:
    """The fields of a key document, with the spec and the flags parsed."""
    fields: dict[str, Any] = dict(document)  # type: ignore[arg-type]
    if isinstance(flags := fields.get("flags"), str):
        fields["flags"] = flags.split("\n")
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        if isinstance(spec := json.loads(fields.get("spec", "")), dict):
            fields["spec"] = spec
    return fields


def _weight(field: str) -> int:
    return next((w for name, w in _WEIGHTS.items() if field.startswith(name)), 1)


def _compare(
    parent: str, first: dict[str, Any], second: dict[str, Any], depth: int
) -> Iterator[Difference]:
    """The differing fields of two objects; `depth` levels of objects inside are split too."""
    for name in {**first, **second}:
        a, b = first.get(name, _ABSENT), second.get(name, _ABSENT)
        path = f"{parent}.{name}" if parent else name
        if a == b:
            continue
        if name in HOOKS and isinstance(a, dict) and isinstance(b, dict):
            yield _hook_difference(path, a, b)
        elif depth and isinstance(a, dict) and isinstance(b, dict):
            yield from _compare(path, a, b, depth - 1)
        elif path == "flags" and isinstance(a, list) and isinstance(b, list):
            yield _flag_difference(a, b)
        elif path == "sources":
            yield Difference(path, "templates and headers here", "another version of them")
        else:
            yield Difference(path, _show(a), _show(b))


def _hook_difference(path: str, first: dict[str, Any], second: dict[str, Any]) -> Difference:
    """The difference of two graphs of a hook: their operations, else the first differing node."""
    a, b = _operations(first), _operations(second)
    if a != b:
        return Difference(path, a, b)
    for i, (x, y) in enumerate(zip(first.get("nodes", ()), second.get("nodes", ()), strict=False)):
        if x != y:
            return Difference(f"{path}.nodes[{i}]", _show(x), _show(y))
    return Difference(path, _show(first), _show(second))


def _operations(graph: dict[str, Any]) -> str:
    nodes = graph.get("nodes")
    names = [str(node[0]) for node in nodes if node] if isinstance(nodes, list) else []
    return _show(f"{len(names)} operations: {' '.join(n for n in names if n != 'input')}")


def _flag_difference(wanted: list[str], found: list[str]) -> Difference:
    here = [flag for flag in wanted if flag not in found]
    there = [flag for flag in found if flag not in wanted]
    if not here and not there:
        return Difference("flags", "another order", "another order")
    return Difference(
        "flags", " ".join(here) or "none of these", " ".join(there) or "none of these"
    )


def _show(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
