"""A thread that makes calls which block, and the memory that it keeps for them.

A native call cannot be cancelled. When its deadline has passed, it may still read and write the memory that it was
given. So there are two kinds of calls:

    without the caller's memory: the caller goes at its deadline; the lane stays busy until the call has ended. What it
        reads is copied out of the lane's own memory, under a lock, and only while the caller is there.
    with the caller's memory: the caller does not go before the call has ended, deadline or not.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")


class Lane:
    """One thread of `threads`, and `nbytes` of memory that calls in it may use.

    Raises:
        OSError: no memory.
    """

    def __init__(self, threads: ThreadPoolExecutor, nbytes: int) -> None:
        self._threads = threads
        self._memory = mmap.mmap(-1, nbytes)  # never closed while a call may use it: whoever runs the call refers to it
        self.nbytes = nbytes
        self.address = address_of(memoryview(self._memory))


class Visit:
    """What a caller that may leave shares with its call: whether its memory may still be touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = False

    def copy(self, pairs: Sequence[tuple[int, int, int]]) -> bool:
        """Copies memory, each (to, from, bytes), in a thread; False, and nothing is copied: the caller has left."""
        with self._lock:
            if self._left:
                return False
            for to, source, nbytes in pairs:
                ctypes.memmove(to, source, nbytes)
            return True

    def leave(self) -> None:
        """No memory of the caller is touched from now on. Waits for a copy that goes on, some milliseconds."""
        with self._lock:
            self._left = True


async def until_done(future: Future[_T]) -> _T:
    """The result of a call that uses the caller's memory: cancelled or not, it waits for the call's end.

    Raises:
        CancelledError: the caller was cancelled meanwhile.
    """
    waiting = asyncio.wrap_future(future)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        waiting.exception()  # seen
        raise cancelled
    return waiting.result()


async def or_leave(future: Future[_T], leave: Callable[[], None]) -> _T:
    """The result of a call that may be left alone."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting})
    except asyncio.CancelledError:
        leave()
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        raise
    return waiting.result()


def address_of(piece: memoryview) -> int:
    """Where a piece of memory is in this process."""
    return int(np.frombuffer(piece, np.uint8).ctypes.data) if len(piece) else 0
