"""Cache entries made by hand: files, and the meta.json that describes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashattn_jit.jit.cache.entry import CompilerIdentity, Entry, document_digest
from flashattn_jit.jit.cache.store import Store

GCC = CompilerIdentity("gcc-12.2.0-00000000", "gcc 12.2.0")
CLANG = CompilerIdentity("clang-19.1.0-00000000", "clang 19.1.0")


@dataclass(frozen=True)
class Made:
    """An entry that no store holds yet."""

    key: str
    compiler_id: str
    files: dict[str, bytes]
    meta: dict[str, Any]


def document(spec: str = "{}", target: str = "cpu:generic", flags: str = "-O3") -> list[list[str]]:
    fields = {
        "schema": "1", "abi_version": "1", "target": target, "flags": flags, "sources": "0" * 64,
        "spec": spec,
    }  # fmt: skip
    return [[name, text] for name, text in fields.items()]


def key_of(spec: str = "{}", target: str = "cpu:generic") -> str:
    return document_digest(document(spec, target))


def make(
    spec: str = "{}",
    *,
    content: bytes = b"",
    compiler: CompilerIdentity = GCC,
    created: str = "2026-01-01",
    target: str = "cpu:generic",
    **more: object,
) -> Made:
    """An entry whose artifact is its key, which every artifact must hold, and `content`."""
    key = key_of(spec, target)
    files = {
        "artifact.so": f"artifact of {key}".encode() + content,
        "kernel.cpp": b"int x;",
        "build.log": b"",
    }
    meta = {
        "key": key,
        "document": document(spec, target),
        "compiler": {"id": compiler.id, "version": compiler.version},
        "created": created,
        "files": {name: digest(text) for name, text in files.items()},
        **more,
    }
    return Made(key, compiler.id, files, meta)


def digest(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def adopt(store: Store, made: Made) -> Entry:
    return store.adopt(made.key, made.compiler_id, made.files, made.meta, durable=False)


def publish(
    store: Store,
    compiler: CompilerIdentity = GCC,
    content: str = "",
    created: str = "2026",
    spec: str = "{}",
) -> Entry:
    """Publishes an entry as a build does, from a staging folder."""
    key = key_of(spec)
    with store.staging() as staging:
        staging.joinpath("artifact.so").write_text(f"artifact of {key}{content}")
        staging.joinpath("kernel.cpp").write_text("int x;")
        staging.joinpath("build.log").write_text("")
        meta = {"created": created, "document": document(spec)}
        return store.publish(staging, key, compiler, meta)


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """`root` and every path below it with its mtime and content."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (root, *sorted(root.rglob("*")))
    }
