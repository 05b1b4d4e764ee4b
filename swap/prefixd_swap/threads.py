"""Threads that are there before there is work for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from prefixd_swap.errors import OutOfMemoryError


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already, so that handing out several jobs cannot fail after the first ones.

    Args:
        count: threads.
        name: what their names begin with.

    Raises:
        OutOfMemoryError: the system gives this process no more threads.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    meeting = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(meeting.wait)
    except RuntimeError as error:
        meeting.abort()
        pool.shutdown(wait=False)
        raise OutOfMemoryError(
            f"{count} threads cannot be started ({error}); raise the limit of processes (`ulimit -u`, TasksMax= of "
            "systemd)"
        ) from error
    meeting.wait()
    return pool
