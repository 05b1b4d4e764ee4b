"""The event loop of a store's calls, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from prefixd_swap.errors import OutOfMemoryError, RemoteStoreError, StorageError

T = TypeVar("T")


class StoreLoop:
    """An event loop in a thread of its own.

    Raises:
        OutOfMemoryError: the system gives this process no more threads.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise OutOfMemoryError(
                f"the system gives this process no more threads ({error}); raise the limit"
            ) from error

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Runs `call` there. It runs to its end even if the caller is cancelled: it may write into memory.

        Raises:
            RemoteStoreError: `call` raised it, or an error that a store must not raise.
        """

        async def guarded() -> T:
            try:
                return await call()
            except StorageError:
                raise
            except Exception as error:
                raise RemoteStoreError(f"the store's client failed: {error!r}; this is a defect, report it") from error

        running: Future[T] = asyncio.run_coroutine_threadsafe(guarded(), self._loop)
        waiting = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait([waiting])
            waiting.exception()  # mark it as retrieved: the caller is gone
            raise

    async def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Runs `last` there, and ends the thread."""
        if not self._thread.is_alive():
            return
        try:
            await self.run(last)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
            self._loop.close()
