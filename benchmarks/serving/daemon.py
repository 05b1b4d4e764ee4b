"""The daemon of a way of serving, with a bar where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from benchmarks.serving.ways import Room, Way
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.cli.demo.runner import Progress, Silence
from prefixd.cli.output.progress import RichProgress
from prefixd.client import ClientError


@contextmanager
def daemon_of(way: Way, room: Room, waiting: int) -> Iterator[tuple[str, Progress]]:
    """The address of a daemon that serves in this way, and who is told how far the run is; `waiting` requests may wait.

    Raises DaemonFailed, with the end of its log, when it does not start or a call to it fails.
    """
    with _progress() as progress:
        progress.begin(f"{way.name}: starting a daemon", 0)
        with DaemonProcess(room.settings(way, waiting)) as daemon:
            try:
                yield daemon.address, progress
            except ClientError as error:
                raise DaemonFailed(f"{way.name}: the daemon failed: {error}{daemon.last_words()}") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """Silence in pipes and logs."""
    if not sys.stderr.isatty():
        yield Silence()
        return
    with RichProgress(Console(stderr=True)) as progress:
        yield progress
