"""How long work is shown: a bar on a terminal, lines in a pipe, events for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .report import KernelResult

_NAMED = 4  # kernels that a bar names at a time


@dataclass(frozen=True, slots=True)
class WarmEvent:
    """A moment of `warm`: `done` of `total` kernels are there or failed.

    compiling: what is compiled just now. finished: the kernel that this event is about, or None
    where only `compiling` changed.
    """

    done: int
    total: int
    compiling: tuple[str, ...]
    finished: KernelResult | None


Show = Callable[[WarmEvent], object]
Progress = bool | Show | None


@contextmanager
def display(progress: Progress, total: int) -> Iterator[Show]:
    """What `progress` asks for, see `warm`: called with each event, until the block is left."""
    if callable(progress):
        yield progress
    elif progress is False or not total:
        yield lambda event: None
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bar(total) as show:
            yield show
    else:
        yield _line


def _line(event: WarmEvent) -> None:
    """A line a kernel."""
    if event.finished is not None and sys.stderr is not None:
        width = len(str(event.total))
        sys.stderr.write(f"[{event.done:{width}}/{event.total}] {event.finished}\n")
        sys.stderr.flush()


@contextmanager
def _bar(total: int) -> Iterator[Show]:
    """One bar, below it what is compiling."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    with progress.Progress(
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("/"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=total)

        def show(event: WarmEvent) -> None:
            if event.finished is not None and event.finished.failed:
                bar.console.print(str(event.finished), markup=False, highlight=False)
            names, more = ", ".join(event.compiling[:_NAMED]), len(event.compiling) - _NAMED
            words = f"{names} and {more} more" if more > 0 else names
            bar.update(task, completed=event.done, description=words, refresh=True)

        yield show
