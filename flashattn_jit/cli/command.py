"""What every command and group of commands is made of."""

from __future__ import annotations

from typing import Any

import click

_SHARED = {"--json": "Print one JSON object.", "--debug": "Show the traceback of an error."}


class Command(click.Command):
    """A command with the options that all have: --json and --debug."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, text in _SHARED.items():
            self.params.append(click.Option([name], is_flag=True, expose_value=False, help=text))


class Group(click.Group):
    """A group whose commands are `Command`s, in the order in which they were added."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)
