"""Kernels of the layers on this machine, as commands list, name and describe them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..codegen.document import spec_from_document
from ..codegen.spec import AnySpec
from ..deploy.manifest.file import read_manifest
from ..deploy.warm.report import kernel_words
from ..errors import CacheError, InputError, PackError
from ..jit.cache.entry import META, CorruptEntryError, Entry, KernelKey
from ..jit.cache.layers import FolderLayer, found_in_folder, local_layers
from ..jit.cache.pack_file import PackedEntry
from ..jit.cache.store import REMEDIES, Store
from ..jit.compilation.toolchain import key_of
from ..planner.tiles import build_request
from ..variants.ir.ir import fitting_name
from .variant_names import is_file

SHOWN_KEY = 16
"""Digits of a key that lists show; a key may be given by any beginning that is unique."""

_PREFIX = re.compile(r"[0-9a-fA-F]{1,64}")
_LINE = re.compile(r"(?P<path>.+?)(?::(?P<line>\d+))?")


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry and where it was found. layer: "user" or "read_only"; location: folder or pack."""

    layer: str
    location: Path
    entry: Entry | PackedEntry

    @property
    def key(self) -> str:
        """The kernel's key."""
        return self.entry.key

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its meta.json; empty where that is corrupt."""
        try:
            return self.entry.meta
        except PackError:
            return {}

    def record(self, whole: bool = False) -> dict[str, Any]:
        """What `cache ls` says of it, or all that is known.

        name: of its variant when it was built; empty where that was not kept, and for utilities.
        Other variants may have the same kernel: no key depends on it. fault: see `fault`; without
        `whole` only meta.json is looked at.
        """
        meta = self.meta
        document = {str(name): str(text) for name, text in meta.get("document", ())}
        spec, files = spec_of(document), meta.get("files", {})
        step = meta.get("stepped_down")
        brief = {
            "key": self.key,
            "layer": self.layer,
            "location": str(self.location),
            "target": document.get("target", ""),
            "kernel": kernel_words(spec) if document else "",
            "variant": variant_words(spec),
            "name": str(meta.get("name", "")) if "variant" in spec else "",
            "compiler": self.entry.compiler_id,
            "created": str(meta.get("created", "")),
            "compile_s": meta.get("compile_s"),
            "bytes": sum(int(f["bytes"]) for f in files.values()),
            "stepped_down_to": step["key"] if step else None,
            "readable": bool(document),
            "fault": self.fault() if whole or not document else "",
        }
        if not whole:
            return brief
        return brief | {
            "compiler_version": meta.get("compiler", {}).get("version", ""),
            "flags": document.get("flags", "").split("\n"),
            "sources": document.get("sources", ""),
            "min_driver": meta.get("min_driver"),
            "complaints": list(meta.get("complaints", ())),
            "files": dict(sorted(files.items())),
            "spec": spec,
        }

    def fault(self) -> str:
        """What is wrong with its files; empty where they are what was published."""
        try:
            if isinstance(self.entry, PackedEntry):
                for name in (META, *self.entry.meta.get("files", {})):
                    self.entry.read(name)
            else:
                Store(self.location, read_only=self.layer != "user").verify(self.entry.path)
        except CorruptEntryError as error:
            return error.reason
        except FileNotFoundError:
            return ""  # removed in the meantime
        except (CacheError, OSError) as error:
            return str(error)
        return ""

    def read(self, name: str) -> bytes:
        """One of its files, verified; others may be damaged.

        Raises CorruptEntryError, InputError where there is none, OSError.
        """
        reason = "" if self.meta else self.fault()
        if not reason and name not in self.meta.get("files", {}):
            raise InputError(f"kernel {self.key[:SHOWN_KEY]} has no {name}")
        try:
            if reason:
                raise ValueError(reason)
            if isinstance(self.entry, PackedEntry):
                return self.entry.read(name)
            read_only = self.layer != "user"
            return found_in_folder(self.entry, self.layer, read_only=read_only).read(name)
        except (PackError, ValueError) as error:
            path = getattr(self.entry, "path", self.location)
            raise CorruptEntryError(path, f"{error}; {REMEDIES[self.layer]}") from None


def listed() -> Iterator[Listed]:
    """Every entry of the user's folder, then of each read-only layer. Raises CacheError.

    An installed pack that cannot be read is named on stderr and left: calls do without it as well.
    """
    for layer in local_layers():
        try:
            held = layer.store if isinstance(layer, FolderLayer) else layer.pack()
        except (CacheError, OSError) as error:
            if isinstance(layer, FolderLayer) or not layer.installed:
                raise
            click.echo(f"left: the installed kernels {layer.location}: {error}", err=True)
            continue
        for entry in held.entries():
            yield Listed(layer.name, Path(layer.location), entry)


def find(prefix: str) -> list[Listed]:
    """The entries of the one key that begins with `prefix`, of every layer and compiler.

    Raises InputError where no key, or more than one, begins so.
    """
    if not prefix:
        raise InputError("a key's beginning is empty: write at least a digit of it")
    matching = [one for one in listed() if one.key.startswith(prefix.lower())]
    keys = sorted({one.key for one in matching})
    if not keys:
        raise InputError(f"no kernel's key begins with {prefix!r}: see `flashattn-jit cache ls`")
    if len(keys) > 1:
        some = ", ".join(key[:SHOWN_KEY] for key in keys[:4])
        raise InputError(
            f"{len(keys)} kernels' keys begin with {prefix!r}: {some}; write more of it"
        )
    return matching


def key_names(prefix: str) -> dict[str, str]:
    """Keys that begin with `prefix`, shortened, with what they are, for a shell to complete."""
    try:
        found = [one.record() for one in listed() if one.key.startswith(prefix.lower())]
    except Exception:
        return {}  # a shell that completes has no use for an error
    return {
        one["key"][:SHOWN_KEY]: f"{one['name'] or one['variant']} {one['target']} {one['kernel']}"
        for one in found
    }


def named(text: str) -> list[tuple[AnySpec, KernelKey]]:
    """The kernels that a key's beginning, a manifest, its line, or a spec as JSON stand for.

    Raises InputError, ManifestError, CacheError.
    """
    if text.lstrip().startswith("{"):
        spec = spec_from_document(text)
        return [(spec, key_of(build_request(spec)))]
    match = _LINE.fullmatch(text)
    if match is None:
        raise InputError("the name of a kernel is empty, or has a line break")
    if match["path"] == "-" or is_file(match["path"]):
        # Nothing of it is compiled here, so hooks given as C++ text may be in it.
        lines = read_manifest(match["path"], allow_cpp=True)
        number = int(match["line"] or 0)
        if match["line"] and not 1 <= number <= len(lines):
            raise InputError(f"{match['path']} has {len(lines)} lines, not {number}")
        chosen = lines[number - 1 : number] if number else lines
        return [(line.spec, key_of(build_request(line.spec))) for line in chosen]
    if not _PREFIX.fullmatch(text):
        raise InputError(f"{text!r} is no key, no manifest that exists, and no spec as JSON")
    one = find(text)[0]
    document = tuple(one.entry.meta.get("document", ()))
    name = fitting_name(one.record()["name"] or "variant")
    spec = spec_from_document(dict(document).get("spec", ""), name)
    return [(spec, KernelKey(one.key, document))]


def one_key(text: str) -> KernelKey:
    """The key of the one kernel that `text` stands for. Raises InputError, and as `named`."""
    found = named(text)
    if len(found) != 1:
        raise InputError(f"{text} names {len(found)} kernels: name one, as {text}:LINE")
    return found[0][1]


def spec_of(document: Mapping[str, str]) -> dict[str, Any]:
    """The kernel spec in a key document; empty where it cannot be read."""
    try:
        spec = json.loads(document.get("spec", ""))
    except (ValueError, RecursionError):
        return {}
    return spec if isinstance(spec, dict) else {}


def variant_words(spec: Mapping[str, Any]) -> str:
    """The variant's hooks and a digest of it, equal for kernels of one variant; else the kernel."""
    variant = spec.get("variant")
    if not isinstance(variant, dict):
        return str(spec.get("kernel", ""))
    hooks = [*variant.get("hooks", {}), *(f"{name} (C++)" for name in variant.get("cpp", {}))]
    digest = hashlib.sha256(json.dumps(variant, sort_keys=True).encode()).hexdigest()[:6]
    return f"{' '.join(hooks) or 'no hooks'} {digest}"
