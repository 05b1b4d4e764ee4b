"""Parts of every table: a console, columns, durations."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Returns a console on the present standard output; it is wide if that is no terminal: pipes get whole lines."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 1000)


def table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """Returns a plain table; columns in `right` hold numbers, those in `fold` may continue in the next line."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column not in fold, overflow="fold")
    return made


def duration(seconds: float) -> str:
    """Formats seconds: `0:01:30` from a minute on, `4.2 s` below."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
