"""The entries of the layers that lie on this machine, as commands list, name and describe them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..codegen.spec import tile_words
from ..errors import CacheError, InputError
from ..jit.cache.entry import META, Entry
from ..jit.cache.layers import FolderLayer, local_layers
from ..jit.cache.pack_file import PackedEntry
from ..jit.cache.store import Store

SHOWN_KEY = 16
"""Digits of a key that lists show; a key may be given by any beginning that is unique."""


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
        """What its meta.json says. Raises PackError for a damaged pack."""
        return self.entry.meta

    @property
    def document(self) -> dict[str, str]:
        """What the key was computed from, field by field."""
        return {str(name): str(text) for name, text in self.meta.get("document", ())}

    @property
    def name(self) -> str:
        """Its variant's name when it was built; empty where that was not kept, and for utilities.

        Other variants may have the same kernel. No key depends on it.
        """
        return str(self.meta.get("name", "")) if "variant" in spec_of(self.document) else ""

    @property
    def variant(self) -> str:
        """The name, else what `variant_words` says."""
        return self.name or variant_words(self.document)

    @property
    def size(self) -> int:
        """What its files take."""
        return sum(int(f["bytes"]) for f in self.meta.get("files", {}).values())

    @property
    def path(self) -> Path:
        """Its folder; for one in a pack, the pack."""
        return self.location if isinstance(self.entry, PackedEntry) else self.entry.path

    def verify(self) -> None:
        """Compares every file with its digest. Raises CorruptEntryError, PackError, OSError."""
        if isinstance(self.entry, PackedEntry):
            for name in (META, *self.meta.get("files", {})):
                self.entry.read(name)
        else:
            Store(self.location, read_only=self.layer != "user").verify(self.entry.path)

    def read(self, name: str) -> bytes:
        """One of its files. Raises InputError where there is none, OSError, PackError."""
        if name not in self.meta.get("files", {}):
            raise InputError(f"kernel {self.key[:SHOWN_KEY]} has no {name}")
        if isinstance(self.entry, PackedEntry):
            return self.entry.read(name)
        return self.entry.path.joinpath(name).read_bytes()


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
        return {
            one.key[:SHOWN_KEY]: f"{one.variant} {one.document.get('target', '')} "
            + kernel_words(one.document)
            for one in listed()
            if one.key.startswith(prefix.lower())
        }
    except Exception:
        return {}  # a shell that completes has no use for an error


def spec_of(document: Mapping[str, str]) -> dict[str, Any]:
    """The kernel spec in a key document; empty where it cannot be read."""
    try:
        spec = json.loads(document.get("spec", ""))
    except (ValueError, RecursionError):
        return {}
    return spec if isinstance(spec, dict) else {}


def kernel_words(document: Mapping[str, str]) -> str:
    """The kernel in a few words, such as ``prefill 96x96 d64 fp32 block_mask``."""
    spec = spec_of(document)
    try:
        if "kernel" in spec:
            unit = spec.get("unit_bytes")
            return f"{spec['kernel']} units of {unit} bytes" if unit else str(spec["kernel"])
        return tile_words(spec["tile"], spec["head_dims"], spec["dtypes"], spec.get("features", []))
    except (KeyError, ValueError, TypeError):
        return "unknown"


def variant_words(document: Mapping[str, str]) -> str:
    """The variant's hooks and a digest of it: equal for kernels of one variant."""
    variant = spec_of(document).get("variant")
    if not isinstance(variant, dict):
        return ""
    hooks = [*variant.get("hooks", {}), *(f"{name} (C++)" for name in variant.get("cpp", {}))]
    digest = hashlib.sha256(json.dumps(variant, sort_keys=True).encode()).hexdigest()[:6]
    return f"{' '.join(hooks) or 'no hooks'} {digest}"
