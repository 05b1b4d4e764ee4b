"""Progress bars for long commands: how far the run is, and the time since its start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def blocks_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with the blocks done and the total; it shows a bar if stderr is a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class RichProgress:
    """A bar for one run after the other on `console`, or a line for each if that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, text: str, total: int) -> None:
        """Starts the bar anew for a part of `total` requests; 0: a pulsing bar."""
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)
        self._bar.reset(self._task, description=text, total=total or None)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def add_bar(self, text: str) -> Callable[[int, int], None]:
        """Adds a second bar; returns a function to call with the amount done and the total, from any thread."""
        task = self._bar.add_task(text, total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def advance(self) -> None:
        """Counts one more request of the part."""
        self._bar.advance(self._task)
