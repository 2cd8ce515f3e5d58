"""Kernels as `cache explain` takes them: a key's beginning, a manifest, or a spec as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.document import spec_from_document
from ..codegen.spec import AnySpec
from ..deploy.manifest import lines_at
from ..errors import InputError
from ..jit.compilation.toolchain import key_of
from ..planner.tiles import request_of
from ..variants.ir.ir import fitting_name
from .entries import find
from .variant_names import is_file

_PREFIX = re.compile(r"[0-9a-fA-F]{1,64}")
_LINE = re.compile(r"(?P<path>.+?)(?::(?P<line>\d+))?")


@dataclass(frozen=True, slots=True)
class Named:
    """A kernel: its spec, and the key and key document under which it was named."""

    spec: AnySpec
    key: str
    document: Sequence[tuple[str, str]]


def read(text: str) -> list[Named]:
    """The kernels that `text` names. Raises InputError, ManifestError, CacheError."""
    if text.lstrip().startswith("{"):
        return [_of(spec_from_document(text))]
    match = _LINE.fullmatch(text)
    if match is None:
        raise InputError("the name of a kernel is empty, or has a line break")
    if match["path"] == "-" or is_file(match["path"]):
        # Nothing of it is compiled here, so hooks given as C++ text may be in it.
        lines = lines_at(match["path"], allow_cpp=True)
        if match["line"] is None:
            return [_of(line.spec) for line in lines]
        number = int(match["line"])
        if not 1 <= number <= len(lines):
            raise InputError(f"{match['path']} has {len(lines)} lines, not {number}")
        return [_of(lines[number - 1].spec)]
    if not _PREFIX.fullmatch(text):
        raise InputError(f"{text!r} is no key, no manifest that exists, and no spec as JSON")
    one = find(text)[0]
    spec = spec_from_document(one.document.get("spec", ""), fitting_name(one.name or "variant"))
    return [Named(spec, one.key, tuple(one.document.items()))]


def read_one(text: str) -> Named:
    """The one kernel that `text` names. Raises InputError where there are several, as `read`."""
    found = read(text)
    if len(found) != 1:
        raise InputError(f"{text} names {len(found)} kernels: name one, as {text}:LINE")
    return found[0]


def _of(spec: AnySpec) -> Named:
    key = key_of(request_of(spec))
    return Named(spec, key.hex, key.document)
