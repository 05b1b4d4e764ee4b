"""A thread for blocking calls, and the memory that it keeps for them.

A native call cannot be cancelled. After its deadline it may still read and write its memory. So there are two kinds of
calls:

    without the caller's memory: the caller returns at its deadline; the lane stays busy until the call has ended. The
        bytes are copied out of the lane's own memory, under a lock, and only while the caller waits.
    with the caller's memory: the caller returns only when the call has ended, even after its deadline.
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
        self._memory = mmap.mmap(-1, nbytes)  # not closed while a call may use it: the call has a reference
        self.nbytes = nbytes
        self.address = address_of(memoryview(self._memory))


class Visit:
    """Shared by a caller and its call: tells the call whether it may still touch the caller's memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = False

    def copy(self, pairs: Sequence[tuple[int, int, int]]) -> bool:
        """Copies memory, (to, from, bytes) each, in a thread; False, with nothing copied, if the caller has left."""
        with self._lock:
            if self._left:
                return False
            for to, source, nbytes in pairs:
                ctypes.memmove(to, source, nbytes)
            return True

    def leave(self) -> None:
        """From now on the caller's memory is not touched. Waits for a copy under way, some milliseconds."""
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
        waiting.exception()  # mark it as retrieved
        raise cancelled
    return waiting.result()


async def or_leave(future: Future[_T], leave: Callable[[], None]) -> _T:
    """The result of a call that does not use the caller's memory; when cancelled, it calls `leave` and returns."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting})
    except asyncio.CancelledError:
        leave()
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        raise
    return waiting.result()


def address_of(piece: memoryview) -> int:
    """The address of a piece of memory in this process."""
    return int(np.frombuffer(piece, np.uint8).ctypes.data) if len(piece) else 0
