"""Threads that are there before there is work for them.

`ThreadPoolExecutor.submit` starts a thread when it has none to spare. Where the system gives no more threads, it raises
RuntimeError, but keeps the job: another thread may still run it, although its caller was told that it has failed. So
a pool that copies into memory, or that a background task relies on, has all its threads before its first job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from prefixd_swap.errors import OutOfMemoryError


def started_threads(count: int, name: str, initializer: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    """A pool whose threads all run already: handing out a job can no longer fail for want of a thread.

    Args:
        count: threads.
        name: what their names begin with.
        initializer: called in each thread before its first job; what it raises is raised here.

    Raises:
        OutOfMemoryError: the system gives this process no more threads.
    """
    failures: list[Exception] = []

    def initialize() -> None:
        try:
            if initializer is not None:
                initializer()
        except Exception as error:
            failures.append(error)

    pool = ThreadPoolExecutor(count, name, initialize)
    meeting = threading.Barrier(count)  # keeps each thread busy until the last one runs
    try:
        waits = [pool.submit(meeting.wait) for _ in range(count)]
    except RuntimeError as error:
        meeting.abort()
        pool.shutdown(wait=False)
        raise OutOfMemoryError(
            f"{count} threads cannot be started ({error}); raise the limit of processes (`ulimit -u`, TasksMax= of "
            "systemd)"
        ) from error
    wait(waits, return_when=FIRST_EXCEPTION)
    if failures:
        pool.shutdown()
        raise failures[0]
    return pool
