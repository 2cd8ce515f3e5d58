"""What commands print: tables on a terminal, plain lines in a pipe, one JSON object with --json.

Plain lines hold no colour, no frame and no tab: columns are two spaces apart, one item a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

import click
from click.core import ParameterSource

SCHEMA = 1
"""Version of every JSON object; raised when a field changes its meaning or goes away."""

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "corrupt": "bold red"}
_SPACE = re.compile(r"\s+")
_GAP = 2  # between columns
_LINES_APART_S = 3.0
_DRAWINGS_APART_S = 0.2


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether tables and progress bars are wanted there."""
    stream = sys.stdout if stream is None else stream
    return bool(getattr(stream, "isatty", lambda: False)())


def wants_colour() -> bool:
    """Whether a terminal may be sent colours: https://no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def wants_json() -> bool:
    """Whether the running command was given --json."""
    context = click.get_current_context(silent=True)
    given = ParameterSource.COMMANDLINE
    return context is not None and context.get_parameter_source("json") is given


def emit(fields: Mapping[str, Any], text: object) -> None:
    """Prints what a command found: its one JSON object with --json, else the text.

    text: or a function that prints it.
    """
    if wants_json():
        command = click.get_current_context().command_path.partition(" ")[2]
        click.echo(
            json.dumps({"schema": SCHEMA, "command": command, **fields}, indent=1, default=str)
        )
    elif callable(text):
        text()
    else:
        click.echo(str(text))


def rows(
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    narrower: Sequence[tuple[str, int]] = (),
    summary: str = "",
) -> None:
    """Prints a table on a terminal, aligned plain lines without a header in a pipe.

    narrower: what gives way, in order, until no row of the table is wider than the terminal: a
    column, and the width that it is cut to at most, 0 to leave it out. summary: a sentence about
    what was listed, for a terminal: pipes get the items alone.
    """
    clean = [[_printable(_SPACE.sub(" ", cell).strip()) for cell in row] for row in cells]
    if is_terminal():
        _rich_table(header, clean, narrower)
        click.echo(summary, nl=bool(summary))
        return
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    for row in clean:
        # An empty cell would shift what a reader splits by spaces.
        text = "  ".join((c or "-").ljust(w) for c, w in zip(row, widths, strict=True))
        click.echo(text.rstrip())


def fields(pairs: Sequence[tuple[str, str]]) -> None:
    """Prints names and values, one pair a line."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {_printable(value)}".rstrip())


def _printable(text: str) -> str:
    """Without what a terminal would obey: names and notes may come from others' files."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _rich_table(
    header: Sequence[str], cells: Sequence[Sequence[str]], narrower: Sequence[tuple[str, int]]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours: Literal["auto"] | None = "auto" if wants_colour() else None
    out = Console(color_system=colours, highlight=False, markup=False, emoji=False)
    widths = {
        name: max(map(cell_len, column))
        for name, *column in zip(header, header, *cells, strict=True)
    }
    for name, least in narrower:
        if name not in widths:
            continue
        over = sum(widths.values()) + _GAP * (len(widths) - 1) - out.width
        if over > 0:
            widths[name] = max(min(least, widths[name]), widths[name] - over) if least else 0
            widths = {name: width for name, width in widths.items() if width}
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for name, width in widths.items():
        if narrower:
            # The beginning of a key is a key; that of anything else ends with dots.
            cut: Literal["crop", "ellipsis"] = "crop" if name == "key" else "ellipsis"
            table.add_column(name, no_wrap=True, overflow=cut, max_width=width)
        else:
            table.add_column(name, overflow="fold")
    for row in cells:
        shown = [cell for name, cell in zip(header, row, strict=True) if name in widths]
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in shown))
    out.print(table)


@contextlib.contextmanager
def activity(what: str) -> Iterator[Callable[[str], object]]:
    """What is going on, on stderr. Yields what to call with other words for it.

    One line on a terminal, gone in the end; elsewhere a line every few seconds. Nothing is written
    but by these calls: a measurement between two of them is left alone.
    """
    terminal = is_terminal(sys.stderr)
    last = float("-inf") if terminal else time.monotonic()
    width = 0  # of the line that a terminal shows

    def write(text: str) -> None:
        nonlocal width
        if sys.stderr is None:
            return
        if terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            text, width = f"{text.ljust(width)}\r", len(text)
        sys.stderr.write(text if terminal else f"{text}\n")
        sys.stderr.flush()

    def show(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= (_DRAWINGS_APART_S if terminal else _LINES_APART_S):
            last = now
            write(text)

    show(what)
    try:
        yield show
    finally:
        if terminal:
            write("")
