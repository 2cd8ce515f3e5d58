"""`flashattn-jit manifest`: look into manifests, merge them, write the library's."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import click

from ..deploy.manifest import lines_at
from . import output
from .app import Group
from .entries import kernel_words, variant_words
from .options import DtypesType, HeadDimType, targets_option

_output_option = click.option(
    "--output", "-o", "out", required=True, type=click.Path(dir_okay=False),
    help="The file to write.",
)  # fmt: skip


@click.group("manifest", cls=Group, short_help="Look into manifests and merge them.")
def manifest_command() -> None:
    """Look into manifests, which say what kernels a service needs, and merge them."""


@manifest_command.command("show")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
def show(path: str) -> None:
    """List the kernels of the manifest PATH (- for standard input)."""
    found = []
    for line in lines_at(path, allow_cpp=True):  # nothing of it is compiled here
        document = {"spec": line.spec.document(), "target": line.spec.target}
        found.append([line.name, line.spec.target, kernel_words(document), variant_words(document)])
    if output.wants_json():
        names = ("name", "target", "kernel", "variant")
        output.emit_json({
            "path": path, "lines": [dict(zip(names, row, strict=True)) for row in found],
        })  # fmt: skip
    else:
        output.rows(
            ["variant", "target", "kernel", "hooks"],
            found,
            narrower=(("hooks", 0), ("variant", 20), ("kernel", 12), ("variant", 8)),
        )
        output.summary(f"{len(found)} kernels")


@manifest_command.command("merge")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_output_option
def merge(paths: tuple[str, ...], out: str) -> None:
    """Merge manifests into one, each kernel once. What --output held before is replaced."""
    from ..deploy.manifest import merge_manifests

    _written(out, merge_manifests(paths, out))


@manifest_command.command("library")
@_output_option
@click.option("--head-dim", "head_dims", type=HeadDimType(), multiple=True, default=("64", "128"),
              help="Head dims: 64, or 192/128 for q and k, and v; else 64 and 128.")  # fmt: skip
@click.option("--dtype", "dtypes", type=DtypesType(), multiple=True, default=("fp32", "bf16"),
              help="Dtypes of q, k and v; else fp32 and bf16.")  # fmt: skip
@targets_option("A target, host, cpu, cuda or all; else cpu.", groups=True, default=("cpu",))
def library(
    out: str, head_dims: tuple[Any, ...], dtypes: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    """Write a manifest of all variants of the library, for calls of the format dense.

    What --output held before is replaced. `warm` compiles it, `pack --wheel` ships it.
    """
    from ..deploy.library import library_lines
    from ..deploy.manifest import write_manifest

    lines = library_lines(head_dims=head_dims, dtypes=dtypes, targets=targets)
    _written(out, write_manifest(out, lines, merge=False))


def _written(path: str, lines: Sized) -> None:
    output.emit({"path": path, "lines": len(lines)}, f"{path}: {len(lines)} kernels")
