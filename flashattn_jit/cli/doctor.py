"""`flashattn-jit doctor`: what would keep kernels from being compiled, kept, found or run."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import click

from . import exit_codes, output
from .command import Command


@click.command("doctor", cls=Command)
def doctor_command() -> None:
    """Check torch, CPU, compilers, CUDA, the cache, locks and the environment.

    Each line says what was found and, where something is amiss, what to do. Ends with exit code 12
    where a check is an error.
    """
    from ..inspect.doctor.report import doctor

    with output.activity("checking"):
        checks = doctor()
    found = [asdict(check) for check in checks]
    rows = [[check.status, check.name, check.detail, check.remedy] for check in checks]
    table = partial(output.rows, ["status", "what", "found", "remedy"], rows)
    output.emit(
        {"healthy": checks.healthy, "checks": found}, table if output.is_terminal() else checks
    )
    if not checks.healthy:
        click.get_current_context().exit(exit_codes.CHECKS)
