"""`flashattn-jit cache`: list, show, verify, shrink, empty, explain and share kernels."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .. import env
from ..errors import CacheError
from ..jit.cache.entry import CorruptEntryError
from ..jit.cache.store import Store
from . import exit_codes, output
from .app import Group
from .entries import SHOWN_KEY, Listed, find, kernel_words, listed, spec_of, variant_words
from .options import KeyType, SizeType, SpecType, keys_option, targets_option

if TYPE_CHECKING:
    from ..inspect.lookup import LookUp
    from ..jit.cache.eviction import Collected


@click.group("cache", cls=Group, short_help="List, check, shrink and share the kernel cache.")
def cache_command() -> None:
    """The kernel cache: what it holds, whether it is sound, how large it may be."""


@cache_command.command("ls", short_help="List kernels.")
@targets_option()
@click.option("--layer", type=click.Choice(["user", "read_only"]), help="Only of this layer.")
def ls(targets: tuple[str, ...], layer: str | None) -> None:
    """List the kernels of the user's folder and of the read-only layers."""
    found = [
        one
        for one in listed()
        if layer in (None, one.layer) and (not targets or one.document.get("target") in targets)
    ]
    if output.wants_json():
        output.emit_json({
            "directory": str(env.cache_dir()),
            "kernels": [_brief(one) for one in found],
            "bytes": sum(one.size for one in found),
        })  # fmt: skip
        return
    output.rows(
        ["key", "target", "kernel", "variant", "size", "compiled", "compiler", "layer"],
        [_row(one) for one in found],
        narrower=(("compiler", 0), ("compiled", 0), ("layer", 0), ("size", 0), ("key", 12),
                  ("variant", 20), ("kernel", 12), ("variant", 8)),
    )  # fmt: skip
    total = env.format_bytes(sum(one.size for one in found))
    output.summary(f"{len(found)} kernels, {total}; the user's folder is {env.cache_dir()}")


@cache_command.command("show", short_help="Show all about one kernel.")
@click.argument("key", type=KeyType())
@click.option(
    "--file", "file", help="Print this file of the entry, such as kernel.cpp, and no more."
)
def show(key: str, file: str | None) -> None:
    """Show all about one kernel. KEY may be any beginning of its key that is unique."""
    found = find(key)
    if file:
        content = found[0].read(file)
        if output.wants_json():
            text = content.decode(errors="replace")
            output.emit_json({"key": found[0].key, "file": file, "content": text})
        else:
            click.echo(content, nl=False)
        return
    if output.wants_json():
        output.emit_json({"key": found[0].key, "entries": [_full(one) for one in found]})
        return
    for i, one in enumerate(found):
        if i:
            click.echo()
        _show(one)


@cache_command.command("verify", short_help="Compare entries with their digests.")
@click.argument("keys", nargs=-1, type=KeyType())
@click.option("--repair", is_flag=True, help="Move corrupt entries of the user's folder aside.")
@click.pass_context
def verify(context: click.Context, keys: tuple[str, ...], repair: bool) -> None:
    """Compare every file of every entry with its digest.

    Without KEYS, all entries of all layers. Ends with exit code 5 where one is corrupt, unless
    --repair moved all of them aside; they are compiled again when they are needed.
    """
    entries = [one for key in keys for one in find(key)] if keys else list(listed())
    corrupt: list[tuple[Listed, str]] = []
    repaired = 0
    with output.activity("verifying") as show:
        for done, one in enumerate(entries, 1):
            if reason := _fault(one):
                corrupt.append((one, reason))
                if repair and one.layer == "user":
                    Store(one.location).quarantine(one.path)
                    repaired += 1
            show(f"verifying: {done}/{len(entries)}")
    if output.wants_json():
        output.emit_json({
            "verified": len(entries) - len(corrupt),
            "repaired": repaired,
            "corrupt": [
                {"key": one.key, "layer": one.layer, "location": str(one.location), "reason": why}
                for one, why in corrupt
            ],
        })  # fmt: skip
    else:
        output.rows(
            ["key", "layer", "reason"],
            [[one.key[:SHOWN_KEY], one.layer, why] for one, why in corrupt],
        )
        moved = f", {repaired} moved aside" if repaired else ""
        click.echo(f"{len(entries) - len(corrupt)} sound, {len(corrupt)} corrupt{moved}")
    if len(corrupt) > repaired:
        context.exit(exit_codes.CORRUPT)


@cache_command.command("gc", short_help="Remove the least recently used kernels.")
@click.option("--max-bytes", type=SizeType(), help="What may stay: 500M, 2G; else what "
              "FLASHATTN_JIT_CACHE_MAX_BYTES says.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(max_bytes: int | None, dry_run: bool) -> None:
    """Remove the least recently used kernels of the user's folder until the rest fits.

    Kernels that a process of this user has loaded stay, and so do those just made. What killed
    builds and corrupt entries left behind goes too.
    """
    from ..jit.cache.eviction import collect

    limit = env.cache_max_bytes() if max_bytes is None else max_bytes
    if limit is None:
        raise click.UsageError("give --max-bytes, or set FLASHATTN_JIT_CACHE_MAX_BYTES")
    _collected(collect(Store(env.cache_dir()), limit, dry_run=dry_run))


@cache_command.command("clear", short_help="Remove all kernels and the emulator.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove every kernel of the user's folder that no process has loaded, and the emulator."""
    from ..jit.cache.eviction import collect
    from ..jit.emulator.library import FOLDER

    store = Store(env.cache_dir())
    count = sum(1 for _ in store.entries())
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"this removes {count} kernels and the emulator from {store.root}: add --yes"
            )
        question = f"Remove {count} kernels and the emulator from {store.root}?"
        click.confirm(question, abort=True, err=True)
    _collected(collect(store, 0, grace_s=0.0))
    collect(Store(env.cache_dir() / FOLDER), 0, grace_s=0.0)


@cache_command.command("push", short_help="Copy kernels to a remote folder.")
@click.argument("url")
@targets_option()
@keys_option
def push(url: str, targets: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Copy kernels of the user's folder to URL, for FLASHATTN_JIT_CACHE_REMOTE to name.

    URL is anything that fsspec writes: s3://bucket/kernels, file:///mnt/kernels. What lies there
    already stays as it is. Everyone who may write to URL decides code that its readers run.
    """
    from ..jit.cache import remote

    store = Store(env.cache_dir())
    wanted = {find(prefix)[0].key for prefix in keys}
    chosen = [
        entry.key
        for entry in store.entries()
        if (not wanted or entry.key in wanted)
        and (not targets or entry.document.get("target") in targets)
    ]
    with output.activity("connecting") as show:
        sent, had = remote.push(
            store, url, keys=tuple(chosen),
            progress=lambda done: show(f"sending: {done}/{len(chosen)} kernels"),
        )  # fmt: skip
    output.emit(
        {"url": url, "sent": sent, "had": had},
        f"{sent} kernels sent to {remote.public_url(url)}, {had} were there",
    )


@cache_command.command("explain", short_help="Say why a kernel missed, or how two differ.")
@click.argument("first", type=SpecType())
@click.argument("second", type=SpecType(), required=False)
def explain(first: str, second: str | None) -> None:
    """Say why FIRST is not in the cache, or how FIRST and SECOND differ.

    Each is the beginning of a key, a manifest (file.jsonl, file.jsonl:LINE, or - for standard
    input), or a spec as JSON text, such as the message of a miss prints.
    """
    from ..inspect.lookup import look_up
    from ..jit.cache.misses import differences
    from .specs import read, read_one

    if second is None:
        found = [look_up(named.spec) for named in read(first)]
        output.emit({"kernels": [_looked_up(one) for one in found]}, "\n\n".join(map(str, found)))
        return
    a, b = read_one(first), read_one(second)
    differing = differences(a.document, b.document)
    if output.wants_json():
        output.emit_json({
            "first": a.key,
            "second": b.key,
            "differences": [
                {"field": d.field, "first": d.wanted, "second": d.found} for d in differing
            ],
        })  # fmt: skip
    elif not differing:
        click.echo(f"both are kernel {a.key}")
    else:
        output.rows(
            ["field", a.key[:SHOWN_KEY], b.key[:SHOWN_KEY]],
            [[d.field, d.wanted, d.found] for d in differing],
        )


def _looked_up(found: LookUp) -> dict[str, Any]:
    return {**asdict(found), "found": bool(found.layer)}


def _row(one: Listed) -> list[str]:
    document = one.document
    if not document:
        return [one.key[:SHOWN_KEY], "", "corrupt: see cache verify", "", "", "", "", one.layer]
    stepped = " -> smaller tile" if one.meta.get("stepped_down") else ""
    return [
        one.key[:SHOWN_KEY],
        document.get("target", ""),
        kernel_words(document) + stepped,
        one.variant,
        env.format_bytes(one.size),
        str(one.meta.get("created", ""))[:19],
        one.entry.compiler_id,
        one.layer,
    ]


def _brief(one: Listed) -> dict[str, Any]:
    document, step = one.document, one.meta.get("stepped_down")
    return {
        "key": one.key,
        "layer": one.layer,
        "location": str(one.location),
        "target": document.get("target", ""),
        "kernel": kernel_words(document) if document else "",
        "variant": variant_words(document),
        "name": one.name,
        "compiler": one.entry.compiler_id,
        "created": one.meta.get("created", ""),
        "compile_s": one.meta.get("compile_s"),
        "bytes": one.size,
        "stepped_down_to": step["key"] if step else None,
        "readable": bool(document),
    }


def _full(one: Listed) -> dict[str, Any]:
    document = one.document
    return {
        **_brief(one),
        "flags": document.get("flags", "").split("\n"),
        "sources": document.get("sources", ""),
        "spec": spec_of(document),
        "files": dict(one.meta.get("files", {})),
        "min_driver": one.meta.get("min_driver"),
        "complaints": list(one.meta.get("complaints", ())),
    }


def _show(one: Listed) -> None:
    document, meta = one.document, one.meta
    if not document:
        raise CorruptEntryError(one.path, _fault(one) or "its meta.json cannot be read")
    pairs = [
        ("key", one.key),
        ("layer", f"{one.layer}, {one.location}"),
        ("target", document.get("target", "")),
        ("kernel", kernel_words(document)),
        ("variant", one.variant),
        ("hooks", variant_words(document)),
        ("compiler", f"{one.entry.compiler_id} ({_line(meta['compiler'].get('version', ''))})"),
        ("compiled", f"{meta.get('created', '')[:19]} UTC, in {meta.get('compile_s', 0):.2f} s"),
        ("flags", document.get("flags", "").replace("\n", " ")),
        ("sources", document.get("sources", "")),
    ]
    if "min_driver" in meta:
        pairs.append(("least driver", str(meta["min_driver"])))
    if step := meta.get("stepped_down"):
        pairs.append(("stepped down", f"spills; {step['key'][:SHOWN_KEY]} takes its place"))
    pairs += [("complaint", str(c)) for c in meta.get("complaints", ())]
    pairs += [
        ("file", f"{name}, {env.format_bytes(f['bytes'])}, sha256 {f['sha256'][:16]}")
        for name, f in sorted(meta.get("files", {}).items())
    ]
    pairs.append(("spec", json.dumps(spec_of(document), sort_keys=True)))
    output.fields(pairs)


def _line(text: str) -> str:
    return text.strip().replace("\n", ", ")


def _fault(one: Listed) -> str:
    """What is wrong with an entry; empty where nothing is."""
    try:
        one.verify()
    except CorruptEntryError as error:
        return error.reason
    except FileNotFoundError:
        return ""  # removed in the meantime
    except (CacheError, OSError) as error:
        return str(error)
    return ""


def _collected(found: Collected) -> None:
    did = "would be removed" if found.dry_run else "removed"
    lines = [
        f"{found.removed} kernels ({env.format_bytes(found.removed_bytes)}) {did}, {found.kept} "
        f"({env.format_bytes(found.kept_bytes)}) kept"
    ]
    if found.leftover_bytes:
        lines.append(
            f"{env.format_bytes(found.leftover_bytes)} of abandoned and corrupt builds {did}"
        )
    if found.in_use or found.young:
        lines.append(
            f"kept beyond the limit: {found.in_use} kernels in use, {found.young} made just now"
        )
    output.emit(asdict(found), "\n".join(lines))
