"""How long work is shown: a bar on a terminal, lines in a pipe, events for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


Progress = bool | Callable[[WarmEvent], object] | None


class Display(Protocol):
    """Something that shows events, and is told when there are no more."""

    def __call__(self, event: WarmEvent) -> object: ...

    def close(self) -> None: ...


def display(progress: Progress, total: int) -> Display:
    """What `progress` asks for: see `warm`."""
    if callable(progress):
        return _Call(progress)
    if progress is False or not total:
        return _Call(lambda event: None)
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bar(total)
    return _Lines()


class _Call:
    def __init__(self, function: Callable[[WarmEvent], object]) -> None:
        self._function = function

    def __call__(self, event: WarmEvent) -> object:
        return self._function(event)

    def close(self) -> None:
        pass


class _Lines:
    """A line a kernel."""

    def __call__(self, event: WarmEvent) -> None:
        if event.finished is not None and sys.stderr is not None:
            width = len(str(event.total))
            sys.stderr.write(f"[{event.done:{width}}/{event.total}] {event.finished}\n")
            sys.stderr.flush()

    def close(self) -> None:
        pass


class _Bar:
    """One bar, below it what is compiling."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import (
            Progress as Bar,
        )
        from rich.table import Column

        self._bar: Any = Bar(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("/"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def __call__(self, event: WarmEvent) -> None:
        if event.finished is not None and event.finished.failed:
            self._bar.console.print(str(event.finished), markup=False, highlight=False)
        self._bar.update(
            self._task, completed=event.done, description=_names(event.compiling), refresh=True
        )

    def close(self) -> None:
        self._bar.stop()


def _names(compiling: Sequence[str]) -> str:
    more = len(compiling) - _NAMED
    return ", ".join(compiling[:_NAMED]) + (f" and {more} more" if more > 0 else "")
