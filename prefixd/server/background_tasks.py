"""Runs the daemon's background tasks. If one fails that calls need, the daemon ends: otherwise it would take calls and
never answer them. A task that only makes figures leaves it running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Starts tasks, watches them and cancels them.

    Args:
        on_failure: called when a task that calls need ends with an exception, after it has been logged.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._started: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[object, object, None], name: str) -> None:
        """Runs `work` until it ends or `cancel` is called."""
        self.watch([self._start(work, name)])

    def start_figures(self, work: Coroutine[object, object, None], name: str) -> None:
        """As `start`, for work that no call needs: the daemon goes on without it."""
        self._start(work, name).add_done_callback(_log_failure)

    def watch(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Watches tasks that another part of the daemon has started and will end."""
        for task in tasks:
            task.add_done_callback(self._check_result)

    def cancel(self) -> None:
        """Cancels the tasks that `start` started."""
        for task in self._started:
            task.cancel()

    def _start(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._started.append(task)
        return task

    def _check_result(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("task %s failed; the daemon ends", task.get_name(), exc_info=task.exception())
            self._on_failure()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error(
            "task %s failed; its figures stand still until the daemon is started again",
            task.get_name(),
            exc_info=task.exception(),
        )
