"""`flashattn-jit doctor`: what would keep kernels from being compiled, kept, found or run."""

from __future__ import annotations

from dataclasses import asdict

import click

from . import exit_codes, output
from .app import Command


@click.command("doctor", cls=Command, short_help="Check what kernels need on this machine.")
@click.pass_context
def doctor_command(context: click.Context) -> None:
    """Check torch, CPU, compilers, CUDA, the cache, locks and the environment.

    Each line says what was found and, where something is amiss, what to do. Ends with exit code 12
    where a check is an error.
    """
    from ..inspect.doctor import doctor

    with output.activity("checking"):
        checks = doctor()
    if output.is_terminal() and not output.wants_json():
        output.rows(
            ["status", "what", "found", "remedy"],
            [[c.status, c.name, c.detail, c.remedy] for c in checks],
        )
    else:
        document = {"healthy": checks.healthy, "checks": [asdict(check) for check in checks]}
        output.emit(document, checks)
    if not checks.healthy:
        context.exit(exit_codes.CHECKS)
