"""A bar where somebody looks, silence in pipes and logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from prefixd.cli.progress import RichProgress
from prefixd.workloads.runner import Progress, Silence


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Shows how far a run is, on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield Silence()
        return
    with RichProgress(Console(stderr=True)) as progress:
        yield progress
