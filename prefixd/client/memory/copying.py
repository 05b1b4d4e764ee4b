"""Copies in threads; each copy ends before the caller goes on, so none runs after its lease was released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

from prefixd.client.memory.buffers import Bytes

CopyPair: TypeAlias = tuple[Bytes, Bytes]
"""(destination, source), the same size."""

_INLINE_BYTES = 64 << 10


class Copier:
    """Copies in `threads` threads beside the event loop; numpy releases the GIL while it copies.

    If the system gives this process no threads, it copies on the event loop.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None  # from the first copy that needs it

    async def copy(self, pairs: Sequence[CopyPair], check: Callable[[], None]) -> None:
        """Copies every pair; calls `check` before each, which raises if the copy is no longer allowed.

        If the caller is cancelled, it waits for the copies under way: after that the daemon may give these bytes of the
        arena to another client.
        """
        if sum(source.nbytes for _, source in pairs) <= _INLINE_BYTES:
            _copy_all(pairs, check)
            return
        loop = asyncio.get_running_loop()
        self._executor = self._executor or _start_threads(self._threads)
        if self._executor is None:
            _copy_all(pairs, check)
            return
        shares = _split(pairs, self._threads)
        copies = [loop.run_in_executor(self._executor, _copy_all, share, check) for share in shares]
        cancelled: asyncio.CancelledError | None = None
        pending: set[asyncio.Future[None]] = set(copies)
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
                pending = {copy for copy in pending if not copy.done()}
        if cancelled is not None:
            raise cancelled
        for copy in copies:
            copy.result()

    def close(self) -> None:
        """Ends the threads once they are idle."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _start_threads(threads: int) -> ThreadPoolExecutor | None:
    """Returns a pool with all its threads running; None if the system gives no threads.

    A pool that cannot start a thread for a job keeps the job, and would copy later, when it is no longer allowed.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefixd-copy")
    meeting = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(meeting.wait)
    except RuntimeError:
        meeting.abort()
        pool.shutdown(wait=False)
        return None
    meeting.wait()
    return pool


def _copy_all(pairs: Sequence[CopyPair], check: Callable[[], None]) -> None:
    for destination, source in pairs:
        check()
        np.copyto(destination, source)


def _split(pairs: Sequence[CopyPair], threads: int) -> list[Sequence[CopyPair]]:
    """Splits `pairs` into at most `threads` shares of about the same number of bytes; splits large pairs too."""
    if threads == 1:
        return [pairs]
    target = -(-sum(source.nbytes for _, source in pairs) // threads)
    shares: list[list[CopyPair]] = [[]]
    room = target
    for destination, source in pairs:
        at = 0
        while at < source.nbytes:
            if not room:
                shares.append([])
                room = target
            count = min(room, source.nbytes - at)
            shares[-1].append((destination[at : at + count], source[at : at + count]))
            at += count
            room -= count
    return list(shares)
