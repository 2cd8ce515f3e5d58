"""`flashattn-jit pack` and `unpack`: kernels in one file, with digests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from . import output
from .app import Command
from .options import KeyType, TargetType, allow_cpp_option


@click.command("pack", cls=Command, short_help="Write kernels to one file.")
@click.argument("path", type=click.Path(dir_okay=False))
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Only what a manifest needs.",
)
@click.option(
    "--target",
    "targets",
    type=TargetType(groups=True),
    multiple=True,
    help="Only kernels for these.",
)
@click.option("--key", "keys", type=KeyType(), multiple=True, help="Only these kernels.")
@allow_cpp_option
def pack_command(
    path: str,
    manifest: str | None,
    targets: tuple[str, ...],
    keys: tuple[str, ...],
    allow_cpp: bool,
) -> None:
    """Write the cache's kernels to the file PATH, every file with its digest.

    The file can be unpacked, or named in FLASHATTN_JIT_CACHE_PATH as it is.
    """
    from ..deploy.pack import pack
    from .entries import find

    full = [find(prefix)[0].key for prefix in keys]
    with output.activity("packing") as show:
        report = pack(
            path, manifest=manifest, targets=targets, keys=full, allow_cpp=allow_cpp,
            progress=lambda done, total: show(f"packing: {done}/{total} kernels"),
        )  # fmt: skip
    _show("pack", report)


@click.command("unpack", cls=Command, short_help="Put a pack's kernels into the cache.")
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--directory", "-d", type=click.Path(file_okay=False),
              help="The cache folder to unpack to; else FLASHATTN_JIT_CACHE_DIR.")  # fmt: skip
@click.option(
    "--target",
    "targets",
    type=TargetType(groups=True),
    multiple=True,
    help="Only kernels for these.",
)
def unpack_command(path: str, directory: str | None, targets: tuple[str, ...]) -> None:
    """Put the kernels of the pack PATH into the cache, once every digest was compared.

    A pack decides which code runs: unpack only what you would run. Refused are path escapes,
    links, wrong digests, and packs that others may write to.
    """
    from ..deploy.unpack import unpack

    with output.activity("unpacking") as show:
        report = unpack(
            path, directory, targets=targets,
            progress=lambda done, total: show(f"unpacking: {done}/{total} kernels"),
        )  # fmt: skip
    _show("unpack", report)


def _show(command: str, report: Any) -> None:
    if output.wants_json():
        output.emit_json(command, asdict(report))
    else:
        output.lines(str(report))
