"""The command group. An error becomes one readable block on stderr and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from ..errors import FlashAttnJitError
from . import output
from .exit_codes import exit_code
from .option_words import in_options

_COMMANDS = {
    "doctor": "doctor",
    "warm": "warm",
    "cache": "cache",
    "pack": "pack",
    "unpack": "pack",
    "manifest": "manifest",
    "explain": "explain",
    "bench": "bench",
    "completion": "completion",
}
"""Commands in the order of the help, and the modules that hold them."""


class Command(click.Command):
    """A command with the options that all have: --json and --debug."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, text in (("--json", "Print one JSON object."),
                           ("--debug", "Show the traceback of an error.")):  # fmt: skip
            option = click.Option(
                [name],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=_remember,
                help=text,
            )
            self.params.append(option)


class Group(click.Group):
    """A group whose commands are `Command`s."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class App(Group):
    """The whole command line. Commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        from importlib import import_module

        module = import_module(f".{_COMMANDS[cmd_name]}", __package__)
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command and exits with its code."""
        given = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(given, prog_name, complete_var, False, **extra)
        try:
            code = super().main(given, prog_name, complete_var, False, **extra)
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
    row = exit_code(error)
    if debug:
        traceback.print_exception(error)
    if as_json:
        failure = {"kind": type(error).__name__, "exit": row.name, "code": row.code,
                   "message": _message(error)}  # fmt: skip
        click.echo(json.dumps({"schema": output.SCHEMA, "error": failure}, indent=1))
    if isinstance(error, click.UsageError):
        error.show()
        return row.code
    if row.name == "interrupted":
        click.echo("stopped", err=True)
        return row.code
    block = _message(error).rstrip()
    if (
        row.code == 1
        and not debug
        and not isinstance(error, (FlashAttnJitError, click.ClickException))
    ):
        block = f"{type(error).__name__}: {block}\n(--debug shows where)"
    head = click.style("error:", fg="red", bold=True) if output.wants_colour() else "error:"
    click.echo(f"{head} {block}", err=True)
    return row.code


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, FlashAttnJitError):
        return in_options(error) or type(error).__name__
    return str(error) or type(error).__name__


def _remember(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().meta[str(option.name)] = True


@click.command(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: docs/command_line.md. `COMMAND --help` has the options.",
)
@click.version_option(package_name="flashattn_jit", prog_name="flashattn-jit")
def app() -> None:
    """Kernels of flashattn_jit: check, compile ahead, keep, ship, explain, measure."""
