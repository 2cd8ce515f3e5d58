"""The whole command line. An error becomes one readable block on stderr and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from typing import Any

import click
from click.shell_completion import get_completion_class

from ..errors import FlashAttnJitError
from . import output
from .command import Group
from .exit_codes import FAILED, exit_code

_MODULES = {
    "doctor": "doctor",
    "warm": "warm",
    "cache": "cache",
    "pack": "pack",
    "unpack": "pack",
    "manifest": "manifest",
    "explain": "problem",
    "bench": "problem",
}
"""Commands in the order of the help, and the modules that hold them."""


class App(Group):
    """The group of all commands, whose modules are imported when a command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_MODULES, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f".{_MODULES[cmd_name]}", __package__)
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

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
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: docs/command_line.md. `COMMAND --help` has the options.",
)
@click.version_option(package_name="flashattn_jit", prog_name="flashattn-jit")
def app() -> None:
    """Kernels of flashattn_jit: check, compile ahead, keep, ship, explain, measure."""


@app.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  flashattn-jit completion bash > ~/.local/share/bash-completion/completions/flashattn-jit
    zsh:   flashattn-jit completion zsh > "${fpath[1]}/_flashattn-jit"
    fish:  flashattn-jit completion fish > ~/.config/fish/completions/flashattn-jit.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    script = found(app, {}, "flashattn-jit", "_FLASHATTN_JIT_COMPLETE").source()
    output.emit({"shell": shell, "script": script}, script)
