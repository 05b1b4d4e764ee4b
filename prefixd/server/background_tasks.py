"""The daemon's background tasks: one that fails ends the daemon, which would otherwise take calls and never answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Starts tasks, watches them and cancels them.

    Args:
        on_failure: called when a task ends with an exception, after it has been logged.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._started: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[object, object, None], name: str) -> None:
        """Runs `work` until it ends or `cancel` is called."""
        task = asyncio.create_task(work, name=name)
        self._started.append(task)
        self.watch([task])

    def watch(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Watches tasks that their owners started and end."""
        for task in tasks:
            task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancels what `start` started."""
        for task in self._started:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("task %s failed; the daemon ends", task.get_name(), exc_info=task.exception())
            self._on_failure()
