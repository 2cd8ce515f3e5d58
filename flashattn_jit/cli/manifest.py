"""`flashattn-jit manifest`: look into manifests and merge them."""

from __future__ import annotations

import click

from . import output
from .app import Group
from .entries import kernel_words, variant_words
from .specs import manifest_lines


@click.group("manifest", cls=Group, short_help="Look into manifests and merge them.")
def manifest_command() -> None:
    """Look into manifests, which say what kernels a service needs, and merge them."""


@manifest_command.command("show")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
def show(path: str) -> None:
    """List the kernels of the manifest PATH (- for standard input)."""
    found = []
    for line in manifest_lines(path):
        document = {"spec": line.spec.document(), "target": line.spec.target}
        found.append([line.name, line.spec.target, kernel_words(document), variant_words(document)])
    if output.wants_json():
        names = ("name", "target", "kernel", "variant")
        output.emit_json("manifest show", {
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
@click.option("--output", "-o", "out", required=True, type=click.Path(dir_okay=False),
              help="The file to write.")  # fmt: skip
def merge(paths: tuple[str, ...], out: str) -> None:
    """Merge manifests into one, each kernel once. What --output held before is replaced."""
    from ..deploy.manifest import merge_manifests

    count = len(merge_manifests(paths, out))
    if output.wants_json():
        output.emit_json("manifest merge", {"path": out, "lines": count})
    else:
        output.lines(f"{out}: {count} kernels")
