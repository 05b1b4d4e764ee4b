"""Copies in threads that never outlive the right to make them."""

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
    """Copies on `threads` threads, off the event loop. numpy gives up the GIL while it copies.

    While the system gives this process no threads, copies are made on the event loop.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None  # from the first copy that needs it

    async def copy(self, pairs: Sequence[CopyPair], check: Callable[[], None]) -> None:
        """Copies every pair, calling `check` before each; `check` raises when the copy may no longer be made.

        When the caller is cancelled, the copies under way are finished first: afterwards the daemon may give
        the same bytes of the arena to someone else.
        """
        if sum(source.nbytes for _, source in pairs) <= _INLINE_BYTES:
            _copy_all(pairs, check)
            return
        loop = asyncio.get_running_loop()
        self._executor = self._executor or _started(self._threads)
        if self._executor is None:
            _copy_all(pairs, check)
            return
        shares = _shares(pairs, self._threads)
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


def _started(threads: int) -> ThreadPoolExecutor | None:
    """A pool whose threads all run; None while the system gives none.

    A pool that cannot start a thread for a job keeps the job all the same: it would copy later, without the right to.
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


def _shares(pairs: Sequence[CopyPair], threads: int) -> list[Sequence[CopyPair]]:
    """`pairs` in at most `threads` shares of about the same number of bytes; large pairs are split."""
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
