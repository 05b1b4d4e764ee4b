"""The progress of a run, and the daemon of a way of serving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from benchmarks.ways_of_serving.ways import Room, Way
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.cli.demo.runner import Progress
from prefixd.cli.output.progress import RichProgress
from prefixd.client import ClientError


class Silence:
    """Progress that is not shown."""

    def begin(self, text: str, total: int) -> None:
        """Says nothing."""

    def advance(self) -> None:
        """Says nothing."""


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar on a terminal, a line for each part of the run in pipes and logs."""
    with RichProgress(Console(stderr=True)) as progress:
        yield progress


@contextmanager
def daemon_of(way: Way, room: Room, waiting: int) -> Iterator[tuple[str, Progress]]:
    """Yields the address of a daemon that serves in this way, and the run's progress; `waiting` requests may wait.

    Raises DaemonFailed, with the end of its log, when it does not start or a call to it fails.
    """
    with shown_progress() as progress:
        progress.begin(f"{way.name}: starting a daemon", 0)
        with DaemonProcess(room.settings(way, waiting)) as daemon:
            try:
                yield daemon.address, progress
            except ClientError as error:
                raise DaemonFailed(f"{way.name}: the daemon failed: {error}{daemon.last_words()}") from error
