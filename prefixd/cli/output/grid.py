"""What every table is made of: a console, columns, durations."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """A console on the present standard output; wide where that is no terminal: pipes get whole lines."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 1000)


def table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """A plain table; columns in `right` hold numbers, those in `fold` may go on in the next line."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column not in fold, overflow="fold")
    return made


def duration(seconds: float) -> str:
    """`0:01:30` from a minute on, `4.2 s` below."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
