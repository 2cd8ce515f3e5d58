"""Cache entries that no compiler made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flashattn_jit.jit.cache.entry import Entry, document_digest, sha256
from flashattn_jit.jit.cache.store import Store

COMPILER = "gcc-12.2.0-00000000"


def add_entry(
    store: Store,
    name: str,
    target: str = "cpu:avx2",
    *,
    compiler: str = COMPILER,
    artifact: bytes | None = None,
    more_files: Mapping[str, bytes] | None = None,
    created: str = "2026-01-01T00:00:00+00:00",
) -> Entry:
    """An entry as a build leaves it, whose spec is `name`.

    artifact: the artifact without its key; random bytes by default. more_files: files beyond those
    that every entry has.
    """
    document = [["target", target], ["spec", name]]
    key = document_digest(document)
    content = key.encode() + os.urandom(1000) if artifact is None else artifact + key.encode()
    files = {
        "artifact.so": content,
        "kernel.cpp": f"// {name}\n".encode(),
        "build.log": b"",
        **(more_files or {}),
    }
    meta = {
        "key": key,
        "document": document,
        "compiler": {"id": compiler, "version": "gcc"},
        "created": created,
        "compile_s": 1.0,
        "files": {n: {"bytes": len(c), "sha256": sha256(c)} for n, c in files.items()},
    }
    return store.adopt(key, compiler, files, meta, durable=False)


def contents(root: Path) -> dict[str, bytes]:
    """The files of all entries below a folder by their names."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.glob("v1/[!.]*/??/*/*"))
        if p.is_file()
    }
