"""The progress of a benchmark on standard error: one bar on a terminal, lines in a pipe.

Standard output has only the results. Progress is written only by `show` and `steps`, between timed
sections: no thread refreshes the bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LINES_APART_S = 3.0
_DRAWINGS_APART_S = 0.2

_begin = time.monotonic()
_shown = {"at": float("-inf")}
_bars: list[Any] = []


def steps(what: str, items: Collection[T]) -> Iterator[T]:
    """Iterates over the items and shows each one as it begins."""
    for done, item in enumerate(items):
        show(what, done, len(items))
        yield item


def show(what: str, done: int = 0, total: int = 0) -> None:
    """Shows what is measured now and how much of it is done; skips updates in quick succession."""
    if sys.stderr is None:
        return
    terminal, now = sys.stderr.isatty(), time.monotonic()
    if now - _shown["at"] < (_DRAWINGS_APART_S if terminal else LINES_APART_S):
        return
    _shown["at"] = now
    minutes, seconds = divmod(int(now - _begin), 60)
    text = f"{Path(sys.argv[0]).stem} {minutes}:{seconds:02}  {what}"
    if terminal:
        _draw(text, done, total)
    else:
        print(f"{text}, {done}/{total}" if total else text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints a line on standard output, above the bar."""
    hide()
    print(text, flush=True)


def hide() -> None:
    """Removes the bar; the next `show` draws it again."""
    while _bars:
        _bars.pop().stop()


def _draw(text: str, done: int, total: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    if not _bars:
        words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        # Not redirected: standard output may be another file than the bar's terminal.
        bar = Progress(BarColumn(bar_width=24), MofNCompleteColumn(), words, auto_refresh=False,
                       console=Console(file=sys.stderr), transient=True, redirect_stdout=False,
                       redirect_stderr=False)  # fmt: skip
        bar.add_task("")
        bar.start()
        _bars.append(bar)
    bar = _bars[0]
    bar.update(bar.task_ids[0], description=text, completed=done, total=total or None)
    bar.refresh()
