"""`flashattn-jit completion`: the script that makes a shell complete commands and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import output
from .app import Command


@click.command("completion", cls=Command, short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  flashattn-jit completion bash > ~/.local/share/bash-completion/completions/flashattn-jit
    zsh:   flashattn-jit completion zsh > "${fpath[1]}/_flashattn-jit"
    fish:  flashattn-jit completion fish > ~/.config/fish/completions/flashattn-jit.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root().command
    script = found(root, {}, "flashattn-jit", "_FLASHATTN_JIT_COMPLETE").source()
    output.emit({"shell": shell, "script": script}, script)
