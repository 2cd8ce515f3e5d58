"""`flashattn-jit warm`: compile kernels ahead of the processes that need them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from . import exit_codes, output
from .command import Command
from .options import (
    HEADS,
    MANIFEST_OR_VARIANT,
    allow_cpp_option,
    dtypes_option,
    formats_option,
    head_dims_option,
    params_option,
    targets_option,
)
from .variant_names import is_file, variant_of


@click.command("warm", cls=Command)
@click.argument("what", nargs=-1, required=True, type=MANIFEST_OR_VARIANT)
@head_dims_option()
@dtypes_option()
@targets_option(
    "What to compile for: a target, host, cpu, cuda or all; else this host, or what a manifest "
    "names."
)
@formats_option()
@click.option(
    "--heads",
    type=HEADS,
    help="Query heads:key-value heads, for variants whose params need them: 32:8.",
)
@params_option()
@click.option(
    "--jobs", "-j", type=click.IntRange(min=1), help="Kernels compiled at a time; else one a core."
)
@allow_cpp_option
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def warm_command(
    what: tuple[str, ...], formats: tuple[str, ...], heads: tuple[int, int] | None,
    params: tuple[tuple[str, Any], ...], quiet: bool, **options: Any,
) -> None:  # fmt: skip
    """Compile every kernel that WHAT can need, so that FLASHATTN_JIT_COMPILE=never cannot miss.

    WHAT is a manifest (see `manifest`, and fa.record_manifest), - for one on standard input, or a
    variant, named as for `explain`, with --head-dim and --dtype. Kernels that a layer of the cache
    holds are left alone. Targets need not be this machine's.

    A kernel that fails keeps no other from being built; then the exit code is 4. Under
    FLASHATTN_JIT_COMPILE=never nothing is built: exit code 3 says that something is missing.
    """
    from ..deploy.warm.warm import warm

    q_heads, kv_heads = heads or (None, None)
    report = warm(
        [_what(text) for text in what], formats=formats or None, params=dict(params),
        num_q_heads=q_heads, num_kv_heads=kv_heads, progress=not quiet, strict=False, **options,
    )  # fmt: skip
    document = asdict(report)
    document["kernels"] = document.pop("results")
    compiled, failed = len(report.built), len(report.failures)
    totals = {"compiled": compiled, "failed": failed, "compile_s": report.compile_s}
    output.emit(document | totals, report)
    if report.failures:
        missing = all(one.error_type == "MissingKernelError" for one in report.failures)
        click.get_current_context().exit(exit_codes.MISSING if missing else exit_codes.COMPILE)


def _what(text: str) -> Any:
    """A manifest's path, "-" or a variant."""
    if text == "-" or (":" not in text and is_file(text)):
        return text if text == "-" else Path(text)
    if text.endswith((".jsonl", ".json")):
        raise click.UsageError(f"there is no manifest {text}")
    return variant_of(text)
