"""`flashattn-jit manifest`: look into manifests, merge them, write the library's."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from ..deploy.manifest.file import merge_manifests, read_manifest, write_manifest
from ..deploy.warm.report import kernel_words
from . import output
from .command import Group
from .kernels import variant_words
from .options import OUTPUT, dtypes_option, head_dims_option, targets_option

_output_option = click.option(
    "--output", "-o", "out", required=True, type=OUTPUT,
    help="The file to write.",
)  # fmt: skip


@click.group("manifest", cls=Group)
def manifest_command() -> None:
    """Look into manifests, which say what kernels a service needs, and merge them."""


@manifest_command.command("show")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
def show(path: str) -> None:
    """List the kernels of the manifest PATH (- for standard input)."""
    found = []
    for line in read_manifest(path, allow_cpp=True):  # nothing of it is compiled here
        spec = json.loads(line.spec.document())
        found.append({"name": line.name, "target": line.spec.target, "kernel": kernel_words(spec),
                      "variant": variant_words(spec)})  # fmt: skip
    table = partial(
        output.rows,
        ["variant", "target", "kernel", "hooks"],
        [[*one.values()] for one in found],
        narrower=(("hooks", 0), ("variant", 20), ("kernel", 12), ("variant", 8)),
        summary=f"{len(found)} kernels",
    )
    output.emit({"path": path, "lines": found}, table)


@manifest_command.command("merge")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_output_option
def merge(paths: tuple[str, ...], out: str) -> None:
    """Merge manifests into one, each kernel once. What --output held before is replaced."""
    _written(out, len(merge_manifests(paths, out)))


@manifest_command.command("library")
@_output_option
@head_dims_option("Head dims: 64, or 192/128 (q and k, v); else 64 and 128.", ("64", "128"))
@dtypes_option("Dtypes of q, k and v; else fp32 and bf16.", ("fp32", "bf16"))
@targets_option("A target, host, cpu, cuda or all; else cpu.", ("cpu",))
def library(out: str, **kernels: Any) -> None:
    """Write a manifest of all variants of the library, for calls of the format dense.

    What --output held before is replaced. `warm` compiles it, `pack --wheel` ships it.
    """
    from ..deploy.manifest.library import library_lines

    _written(out, len(write_manifest(out, library_lines(**kernels), merge=False)))


def _written(path: str, lines: int) -> None:
    output.emit({"path": path, "lines": lines}, f"{path}: {lines} kernels")
