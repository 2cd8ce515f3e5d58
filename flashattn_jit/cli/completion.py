"""`flashattn-jit completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import output
from .command import Command


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  flashattn-jit completion bash > ~/.local/share/bash-completion/completions/flashattn-jit
    zsh:   flashattn-jit completion zsh > "${fpath[1]}/_flashattn-jit"
    fish:  flashattn-jit completion fish > ~/.config/fish/completions/flashattn-jit.fish
    """
    app = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None
    script = found(app, {}, "flashattn-jit", "_FLASHATTN_JIT_COMPLETE").source()
    output.emit({"shell": shell, "script": script}, script)
