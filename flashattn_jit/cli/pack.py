"""`flashattn-jit pack` and `unpack`: kernels in one file, with digests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from .._version import __version__
from ..deploy.pack.pack import pack
from ..deploy.pack.unpack import unpack
from ..deploy.pack.wheel import pack_wheel
from . import output
from .command import Command
from .kernels import find
from .options import allow_cpp_option, keys_option, targets_option


@click.command("pack", cls=Command)
@click.argument("path", type=click.Path(), required=False)
@click.option(
    "--wheel", metavar="NAME", help="Write a wheel of this name, for pip, into the folder PATH."
)
@click.option("--wheel-version", metavar="VERSION", help="The wheel's; else flashattn_jit's.")
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Only what a manifest needs.",
)
@targets_option()
@keys_option()
@allow_cpp_option
def pack_command(
    path: str | None, wheel: str | None, wheel_version: str | None, keys: tuple[str, ...],
    **what: Any,
) -> None:  # fmt: skip
    """Write the cache's kernels to the file PATH, every file with its digest.

    The file can be unpacked, or named in FLASHATTN_JIT_CACHE_PATH as it is.

    With --wheel it is a wheel in the folder PATH, here by default. Once pip has installed it, its
    kernels are found without further settings.
    """
    if wheel is None and path is None:
        raise click.UsageError("give the PATH of the file, or --wheel NAME")
    if wheel is None and wheel_version is not None:
        raise click.UsageError("--wheel-version is for --wheel NAME")
    what["keys"] = [find(prefix)[0].key for prefix in keys]
    with output.activity("packing") as show:
        what["progress"] = lambda done, total: show(f"packing: {done}/{total} kernels")
        if wheel is None:
            report = pack(str(path), **what)
        else:
            version = __version__ if wheel_version is None else wheel_version
            report = pack_wheel(wheel, path or ".", version=version, **what)
    output.emit(asdict(report), report)


@click.command("unpack", cls=Command)
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--directory", "-d", type=click.Path(file_okay=False),
              help="The cache folder to unpack to; else FLASHATTN_JIT_CACHE_DIR.")  # fmt: skip
@targets_option()
def unpack_command(path: str, directory: str | None, targets: tuple[str, ...]) -> None:
    """Put the kernels of the pack PATH into the cache, once every digest was compared.

    A pack decides which code runs: unpack only what you would run. Refused are path escapes,
    links, wrong digests, and packs that others may write to.
    """
    with output.activity("unpacking") as show:
        report = unpack(
            path, directory, targets=targets,
            progress=lambda done, total: show(f"unpacking: {done}/{total} kernels"),
        )  # fmt: skip
    output.emit(asdict(report), report)
