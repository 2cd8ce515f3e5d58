"""`flashattn-jit cache`: list, show, verify, shrink, empty, explain and share kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from .. import env
from ..codegen.targets import called_target
from ..deploy.wanted.arguments import parse_targets
from ..jit.cache import remote
from ..jit.cache.entry import Entry
from ..jit.cache.eviction import collect
from ..jit.cache.store import REMEDIES, Store
from . import exit_codes, output
from .command import Group
from .kernels import SHOWN_KEY, find, listed, named, one_key
from .options import KEY, SIZE, SPEC, keys_option, targets_option


@click.group("cache", cls=Group)
def cache_command() -> None:
    """The kernel cache: what it holds, whether it is sound, how large it may be."""


@cache_command.command("ls", short_help="List kernels.")
@targets_option()
@click.option("--layer", type=click.Choice(["user", "read_only"]), help="Only of this layer.")
def ls(targets: tuple[str, ...], layer: str | None) -> None:
    """List the kernels of the user's folder and of the read-only layers."""
    chosen = parse_targets(targets)
    found = [one.record() for one in listed() if layer in (None, one.layer)]
    found = [one for one in found if not chosen or called_target(one["target"]) in chosen]
    size = sum(one["bytes"] for one in found)

    def text() -> None:
        output.rows(
            ["key", "target", "kernel", "variant", "size", "compiled", "compiler", "layer"],
            [_row(one) for one in found],
            narrower=(("compiler", 0), ("compiled", 0), ("layer", 0), ("size", 0), ("key", 12),
                      ("variant", 20), ("kernel", 12), ("variant", 8)),
            summary=f"{len(found)} kernels, {env.format_bytes(size)}; the user's folder is "
            f"{env.cache_dir()}",
        )  # fmt: skip
        for kind, remedy in REMEDIES.items():
            if corrupt := sum(bool(one["fault"]) for one in found if one["layer"] == kind):
                click.echo(f"{corrupt} corrupt: {remedy}", err=True)

    output.emit({"directory": str(env.cache_dir()), "kernels": found, "bytes": size}, text)


def _row(one: dict[str, Any]) -> list[str]:
    stepped = " -> smaller tile" if one["stepped_down_to"] else ""
    return [
        one["key"][:SHOWN_KEY],
        one["target"],
        f"corrupt: {one['fault']}" if one["fault"] else one["kernel"] + stepped,
        one["name"] or one["variant"],
        "" if one["fault"] else env.format_bytes(one["bytes"]),
        one["created"][:19],
        one["compiler"],
        one["layer"],
    ]


@cache_command.command("show", short_help="Show all about one kernel.")
@click.argument("key", type=KEY)
@click.option("--file", help="Print this file of the entry, such as kernel.cpp, and no more.")
def show(key: str, file: str | None) -> None:
    """Show all about one kernel. KEY may be any beginning of its key that is unique.

    Ends with exit code 5 where one of its entries is corrupt.
    """
    found = find(key)
    if file:
        content = next((one for one in found if not one.fault()), found[0]).read(file)
        text = content.decode(errors="replace")
        output.emit(
            {"key": found[0].key, "file": file, "content": text},
            partial(click.echo, content, nl=False),
        )
        return
    records = [one.record(whole=True) for one in found]
    output.emit(
        {"key": found[0].key, "entries": records},
        partial(output.fields, [pair for record in records for pair in _lines(record)]),
    )
    if any(record["fault"] for record in records):
        click.get_current_context().exit(exit_codes.CORRUPT)


def _lines(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of a kernel's record, for people; what says nothing is left out."""
    version = record["compiler_version"].strip().replace("\n", ", ")
    step = record["stepped_down_to"]
    texts = {
        "layer": f"{record['layer']}, {record['location']}",
        "corrupt": record["fault"],
        "remedy": REMEDIES[record["layer"]] if record["fault"] else "",
        "variant": record["name"] or record["variant"],
        "hooks": record["variant"],
        "compiler": f"{record['compiler']} ({version})",
        "compiled": f"{record['created'][:19]} UTC, in {record['compile_s'] or 0:.2f} s",
        "flags": " ".join(record["flags"]),
        "least driver": str(record["min_driver"] or ""),
        "stepped down": f"spills; {step[:SHOWN_KEY]} takes its place" if step else "",
    }
    kept = "target kernel variant hooks compiler compiled flags sources".split()
    kept = [*kept, "least driver", "stepped down"] if record["readable"] else []
    for name in ("key", "layer", "corrupt", "remedy", *kept):
        if text := texts.get(name, record.get(name)):
            yield name, text
    if not record["readable"]:
        return
    yield from (("complaint", str(complaint)) for complaint in record["complaints"])
    for name, file in record["files"].items():
        size = env.format_bytes(file["bytes"])
        yield "file", f"{name}, {size}, sha256 {file['sha256'][:16]}"
    yield "spec", json.dumps(record["spec"], sort_keys=True)


@cache_command.command("verify", short_help="Compare entries with their digests.")
@click.argument("keys", nargs=-1, type=KEY)
@click.option("--repair", is_flag=True, help="Move corrupt entries of the user's folder aside.")
def verify(keys: tuple[str, ...], repair: bool) -> None:
    """Compare every file of every entry with its digest.

    Without KEYS, all entries of all layers. Ends with exit code 5 where one is corrupt, unless
    --repair moved all of them aside; they are compiled again when they are needed.
    """
    entries = [one for key in keys for one in find(key)] if keys else list(listed())
    corrupt: list[dict[str, str]] = []
    repaired = 0
    with output.activity("verifying") as show:
        for done, one in enumerate(entries, 1):
            if reason := one.fault():
                corrupt.append({"key": one.key, "layer": one.layer, "location": str(one.location),
                                "reason": reason})  # fmt: skip
                if repair and one.layer == "user" and isinstance(one.entry, Entry):
                    Store(one.location).quarantine(one.entry.path)
                    repaired += 1
            show(f"verifying: {done}/{len(entries)}")
    sound = len(entries) - len(corrupt)

    def text() -> None:
        output.rows(
            ["key", "layer", "reason"],
            [[one["key"][:SHOWN_KEY], one["layer"], one["reason"]] for one in corrupt],
        )
        moved = f", {repaired} moved aside" if repaired else ""
        click.echo(f"{sound} sound, {len(corrupt)} corrupt{moved}")

    output.emit({"verified": sound, "repaired": repaired, "corrupt": corrupt}, text)
    if len(corrupt) > repaired:
        click.get_current_context().exit(exit_codes.CORRUPT)


@cache_command.command("gc", short_help="Remove the least recently used kernels.")
@click.option("--max-bytes", type=SIZE, help="What may stay: 500M, 2G; else what "
              "FLASHATTN_JIT_CACHE_MAX_BYTES says.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(max_bytes: int | None, dry_run: bool) -> None:
    """Remove the least recently used kernels of the user's folder until the rest fits.

    Kernels that a process of this user has loaded stay, and so do those just made. What killed
    builds and corrupt entries left behind goes too.
    """
    limit = env.cache_max_bytes() if max_bytes is None else max_bytes
    if limit is None:
        raise click.UsageError("give --max-bytes, or set FLASHATTN_JIT_CACHE_MAX_BYTES")
    done = collect(Store(env.cache_dir()), limit, dry_run=dry_run)
    output.emit(asdict(done), done)


@cache_command.command("clear", short_help="Remove all kernels and the emulator.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove every kernel of the user's folder that no process has loaded, and the emulator."""
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
    done = collect(store, 0, grace_s=0.0)
    collect(Store(env.cache_dir() / FOLDER), 0, grace_s=0.0)
    output.emit(asdict(done), done)


@cache_command.command("push", short_help="Copy kernels to a remote folder.")
@click.argument("url")
@targets_option()
@keys_option()
def push(url: str, targets: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Copy kernels of the user's folder to URL, for FLASHATTN_JIT_CACHE_REMOTE to name.

    URL is anything that fsspec writes: s3://bucket/kernels, file:///mnt/kernels. What lies there
    already stays as it is. Everyone who may write to URL decides code that its readers run.
    """
    store, chosen_targets = Store(env.cache_dir()), parse_targets(targets)
    wanted = {find(prefix)[0].key for prefix in keys}
    chosen = [
        entry.key
        for entry in store.entries()
        if (not wanted or entry.key in wanted)
        and (not targets or called_target(str(entry.document.get("target"))) in chosen_targets)
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
@click.argument("first", type=SPEC)
@click.argument("second", type=SPEC, required=False)
def explain(first: str, second: str | None) -> None:
    """Say why FIRST is not in the cache, or how FIRST and SECOND differ.

    Each is the beginning of a key, a manifest (file.jsonl, file.jsonl:LINE, or - for standard
    input), or a spec as JSON text, such as the message of a miss prints.
    """
    from ..inspect.lookup import look_up
    from ..jit.cache.misses import differences

    if second is None:
        found = [look_up(spec) for spec, _ in named(first)]
        kernels = [asdict(one) | {"found": bool(one.layer)} for one in found]
        output.emit({"kernels": kernels}, "\n\n".join(map(str, found)))
        return
    a, b = one_key(first), one_key(second)
    cells = [[d.field, d.wanted, d.found] for d in differences(a.document, b.document)]
    names = ["field", "first", "second"]
    table = partial(output.rows, ["field", a.hex[:SHOWN_KEY], b.hex[:SHOWN_KEY]], cells)
    output.emit(
        {"first": a.hex, "second": b.hex,
         "differences": [dict(zip(names, row, strict=True)) for row in cells]},
        table if cells else f"both are kernel {a.hex}",
    )  # fmt: skip
