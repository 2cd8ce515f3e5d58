"""The whole command line. An error becomes one readable block on stderr and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from ..errors import FlashAttnJitError
from . import output
from .command import Group

_COMMANDS = {
    "doctor": ("doctor", "Check what kernels need on this machine."),
    "warm": ("warm", "Compile kernels ahead."),
    "cache": ("cache", "List, check, shrink and share the kernel cache."),
    "pack": ("pack", "Write kernels to one file, or to a wheel."),
    "unpack": ("pack", "Put a pack's kernels into the cache."),
    "manifest": ("manifest", "Look into manifests and merge them."),
    "explain": ("problem", "Explain what a variant becomes."),
    "bench": ("problem", "Time a variant's kernel beside torch's."),
    "kv": ("kv", "Tell what a KV cache will cost."),
    "completion": ("completion", "Print a shell's completion script."),
}
"""Commands in the order of the help: the modules that hold them, and what the help says of them."""


class App(Group):
    """The group of all commands. It lists them by `_COMMANDS`, and imports the one that runs."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See `click.Group`. The command with its options, which `get_command` does not have."""
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:  # while a shell completes
            return name, listed, rest
        module = import_module(f".{_COMMANDS[name][0]}", __package__)
        return name, getattr(module, f"{name}_command"), rest

    def main(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Runs a command and exits with its code."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, *rest, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader has seen enough. Python would complain once more when it closes stdout.
            sys.stdout = None
            code = 0
        except (Exception, KeyboardInterrupt) as error:
            code = fail(error, as_json="--json" in given, debug="--debug" in given)
        sys.exit(code if isinstance(code, int) else 0)


def fail(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Reports what ended a command, on stderr (with --json, as JSON on stdout too)."""
    from .exit_codes import FAILED, exit_code  # imports the cache's errors

    row, message = exit_code(error), _message(error)
    if debug:
        traceback.print_exception(error)
    if as_json:
        failure = {"kind": type(error).__name__, "exit": row.name, "code": row.code,
                   "message": message}  # fmt: skip
        click.echo(json.dumps({"schema": output.SCHEMA, "error": failure}, indent=1))
    if isinstance(error, click.UsageError):
        error.show()
    elif row.name == "interrupted":
        click.echo("stopped", err=True)
    else:
        ours = isinstance(error, FlashAttnJitError | click.ClickException)
        if row.code == FAILED and not (debug or ours):
            message = f"{type(error).__name__}: {message.rstrip()}\n(--debug shows where)"
        head = click.style("error:", fg="red", bold=True) if output.wants_colour() else "error:"
        click.echo(f"{head} {message.rstrip()}", err=True)
    return row.code


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    words = str(error)
    if isinstance(error, FlashAttnJitError):
        from .option_words import in_options  # imports the options of all commands

        words = in_options(error)
    return words or type(error).__name__


@click.command(
    cls=App,
    commands={name: click.Command(name, short_help=text) for name, (_, text) in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: docs/command_line.md. `COMMAND --help` has the options.",
)
@click.version_option(package_name="flashattn_jit", prog_name="flashattn-jit")
def app() -> None:
    """Kernels of flashattn_jit: check, compile ahead, keep, ship, explain, measure."""
