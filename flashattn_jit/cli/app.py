"""The whole command line. An error becomes one readable block on stderr and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import click
from click.shell_completion import get_completion_class

from ..errors import FlashAttnJitError
from . import output
from .cache import cache_command
from .command import Group
from .doctor import doctor_command
from .exit_codes import FAILED, exit_code
from .manifest import manifest_command
from .option_words import in_options
from .pack import pack_command, unpack_command
from .problem import bench_command, explain_command
from .warm import warm_command


class App(Group):
    """The group of all commands."""

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
    words = in_options(error) if isinstance(error, FlashAttnJitError) else str(error)
    return words or type(error).__name__


@click.command(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: docs/command_line.md. `COMMAND --help` has the options.",
)
@click.version_option(package_name="flashattn_jit", prog_name="flashattn-jit")
def app() -> None:
    """Kernels of flashattn_jit: check, compile ahead, keep, ship, explain, measure."""


for _command in (
    doctor_command, warm_command, cache_command, pack_command, unpack_command, manifest_command,
    explain_command, bench_command,
):  # fmt: skip
    app.add_command(_command)


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
