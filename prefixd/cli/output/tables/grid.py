"""Parts of every table: a console, columns, durations, names of tiers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from prefixd.base.tiers import Tier

_LEAST_FOLDED = 16  # characters of a column that may continue in the next line


class Grid(Table):
    """A table that prints its rows as lines `column  value` where the terminal is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, or the lines of its rows with a blank line behind each."""
        if self._least_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names = [" ".join(str(column.header).split()) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for name, cell in zip(names, row, strict=True):
                text = cell if isinstance(cell, Text) else Text(str(cell))
                if text.plain:
                    yield Text.assemble((name, "bold"), " " * bool(name), text, overflow="fold")
            yield Text()

    def _least_width(self, console: Console, options: ConsoleOptions) -> int:
        least = len(self.columns) - 1  # a space between two columns
        for column in self.columns:
            cells = [column.header, *column.cells]
            width = max(Measurement.get(console, options.update(max_width=10_000), cell).maximum for cell in cells)
            least += width if column.no_wrap else min(width, _LEAST_FOLDED)
        return least


def console() -> Console:
    """Returns a console on the present standard output; it is wide if that is no terminal: pipes get whole lines."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 1000)


def table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """Returns a plain table; columns in `right` hold numbers, those in `fold` may continue in the next line."""
    made = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column not in fold, overflow="fold")
    return made


def tier_name(tier: int) -> str:
    """Returns the name of a tier of the contract, such as `gpu`, or `tier 9` if this version does not know it."""
    try:
        return Tier.from_wire(tier).label
    except ValueError:
        return f"tier {tier}"


def duration(seconds: float) -> str:
    """Formats seconds: `0:01:30` from a minute on, `4.2 s` below."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
