"""Thread pools that start all their threads before the first job, and waits for their jobs.

`ThreadPoolExecutor.submit` starts a thread when none is idle. If the system refuses the thread, `submit` raises
RuntimeError but keeps the job: another thread may still run it, although the caller was told that it failed. So a pool
that copies into memory, or that a background task relies on, has all its threads before its first job.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from prefixd_swap.errors import OutOfMemoryError


def started_threads(count: int, name: str, initializer: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    """A pool whose threads all run already: submitting a job can no longer fail for lack of a thread.

    Args:
        count: threads.
        name: prefix of the threads' names.
        initializer: called in each thread before its first job; an error that it raises is raised here.

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
    barrier = threading.Barrier(count)  # keeps each thread busy until the last one runs
    try:
        waits = [pool.submit(barrier.wait) for _ in range(count)]
    except RuntimeError as error:
        barrier.abort()
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


async def wait_all(futures: Sequence[Future[None]]) -> None:
    """Wait until all have ended, even when cancelled meanwhile; then raise the cancellation or the first error."""
    pending: set[asyncio.Future[None]] = {asyncio.wrap_future(future) for future in futures}
    waited = list(pending)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            pending = {future for future in pending if not future.done()}
    errors = [error for error in (future.exception() for future in waited) if error is not None]
    if cancelled is not None:
        raise cancelled
    if errors:
        raise errors[0]
