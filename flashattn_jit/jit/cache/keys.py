"""The key of a kernel, and the files of ours that decide its source.

A key is a sha256 over a canonical document of everything that decides a kernel's artifact. The
document holds no path, time, process id, `hash()`, Python or torch version, and needs neither
rendering nor a compiler, so any machine computes the same key for the same kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os.path import isfile
from pathlib import Path

from flashattn_jit import _C, env

# Raised when the meaning of an entry or of a document field changes.
SCHEMA = 1

# The module that renders. With the modules of these folders that it imports, it decides the text of
# a source; the parts of the package below them (errors, environment, paths) do not.
_GENERATOR = "codegen/render.py"
_GENERATING = ("codegen/", "variants/")

# nvcc includes it in front of every source of ours.
_CUDA_PRELUDE = "fajit/cuda/lean/cuda_runtime.h"

# Each begins with a literal, which the search skips to: 2 ms less than anchors at line starts. A
# match inside a comment only adds a file.
_HEADER = re.compile(rb'#[ \t]*include[ \t]*[<"](fajit/(?:\{\{.*?\}\}|[^>"{])+)[>"]')
_EXPRESSION = re.compile(r"\{\{.*?\}\}")
_IMPORT = re.compile(rb"from (flashattn_jit|\.+)\.?([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)")
_WORD = re.compile(rb"\w+")
_TEMPLATE = re.compile(rb"""\{%-?\s*(?:include|import|from|extends)\s+["']([^"']+)["']""")


@dataclass(frozen=True, slots=True)
class KernelKey:
    """`hex` names the kernel; `document` is what it was computed from, field by field, in order."""

    hex: str
    document: tuple[tuple[str, str], ...]


Document = Mapping[str, str] | Iterable[Sequence[str]]
"""A key document: `KernelKey.document`, or what meta.json holds of it."""


def kernel_key(spec: str, template: str, target: str, flags: Sequence[str]) -> KernelKey:
    """The key of a kernel.

    `spec` is the kernel spec's canonical JSON, `template` its root template's name below
    templates/, `flags` the compiler's, in order. Raises FileNotFoundError for a missing template
    or header.
    """
    document = (
        ("schema", str(SCHEMA)),
        ("abi_version", str(_C.ABI_VERSION)),
        ("target", target),
        ("flags", "\n".join(flags)),
        ("sources", sources_digest(template)),
        ("spec", spec),
    )
    return KernelKey(document_digest(document), document)


def document_digest(document: Iterable[Sequence[str]]) -> str:
    """The key of a document. Raises ValueError for text that cannot be encoded."""
    return _digest((name, text.encode()) for name, text in document)


@cache
def sources_digest(template: str) -> str:
    """Digest of what renders and what is included, computed once a process: see `read_sources`."""
    return read_sources(template, env.templates_dir(), env.include_dir(), env.PACKAGE_DIR)


def sources_changed(template: str) -> bool:
    """Whether the files changed since `sources_digest` first read them."""
    fresh = read_sources(template, env.templates_dir(), env.include_dir(), env.PACKAGE_DIR)
    return fresh != sources_digest(template)


def read_sources(template: str, templates: Path, headers: Path, package: Path) -> str:
    """Digest of the files that `reached_sources` finds: of their names and contents."""
    return _digest(sorted(reached_sources(template, templates, headers, package).items()))


def reached_sources(
    template: str, templates: Path, headers: Path, package: Path
) -> dict[str, bytes]:
    """A template, the templates and fajit/ headers that it reaches, and the code generator.

    Names are below these folders: ``include/fajit/abi.h``. Every `#include` and `import` is
    followed, also one that a macro or a condition would skip.
    """
    # Strings and plain stat calls: with pathlib this takes half of the time of a hit on disk.
    folders = {"templates": f"{templates}/", "include": f"{headers}/", "package": f"{package}/"}
    contents: dict[str, bytes] = {}
    pending = [("templates", template)]
    if _is_file(folders["package"] + _GENERATOR):
        pending.append(("package", _GENERATOR))
    if ".cu." in template and _is_file(folders["include"] + _CUDA_PRELUDE):
        pending.append(("include", _CUDA_PRELUDE))
    modules: dict[str, bool] = {}
    while pending:
        kind, name = pending.pop()
        label = f"{kind}/{name}"
        if label in contents:
            continue
        with open(folders[kind] + name, "rb") as file:  # noqa: PTH123
            contents[label] = text = file.read()
        if kind == "package":
            pending += [("package", f) for f in _imported(name, text, folders[kind], modules)]
            continue
        pending += [
            ("include", header)
            for found in _HEADER.findall(text)
            for header in _headers_named(found.decode(), headers)
        ]
        if kind == "templates":
            pending += [("templates", found.decode()) for found in _TEMPLATE.findall(text)]
    return contents


def _headers_named(name: str, headers: Path) -> Iterator[str]:
    """The header `name`; every header that it may become where an expression makes it."""
    if "{{" not in name:
        yield name
        return
    for path in headers.glob(_EXPRESSION.sub("*", name)):
        yield path.relative_to(headers).as_posix()


def _imported(name: str, text: bytes, package: str, modules: dict[str, bool]) -> Iterator[str]:
    """Files of the generating folders that the module in file `name` imports by `from ... import`.

    `modules` remembers which files there are.
    """
    parents = name.split("/")[:-1]
    for start, module, names in _IMPORT.findall(text):
        # A module's first dot is its own folder; the absolute form starts at the package.
        above = 0 if start == b"flashattn_jit" else max(0, len(parents) + 1 - len(start))
        folder = [*parents[:above], *(module.decode().split(".") if module else ())]
        candidates = [folder, *([*folder, word.decode()] for word in _WORD.findall(names))]
        for candidate in candidates:
            found = "/".join(candidate) + ".py"
            if found not in modules:
                modules[found] = found.startswith(_GENERATING) and _is_file(package + found)
            if modules[found]:
                yield found


def _is_file(path: str) -> bool:
    return isfile(path)  # noqa: PTH113


def _digest(fields: Iterable[tuple[str, bytes]]) -> str:
    # Lengths in front of names and values: no two documents share their bytes.
    digest = hashlib.sha256()
    for name, value in fields:
        for part in (name.encode(), value):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()
