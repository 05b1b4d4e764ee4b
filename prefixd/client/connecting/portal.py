"""An event loop in a thread, for callers without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from prefixd.client.connecting.forks import forked_from
from prefixd.client.errors import ClientClosed, ExhaustedError

T = TypeVar("T")


class Portal:
    """Runs coroutines in the event loop of its own thread. Several threads of its process may use it at once.

    Raises ExhaustedError if the system gives no thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ignore_shared_poller)
        self._endings: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="prefixd-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise ExhaustedError(
                f"the client's thread cannot be started ({error}); raise the limit of processes (`ulimit -u`)"
            ) from error
        self._pid = os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; an interrupt cancels `work`. Raises `ClientClosed` after `stop`."""
        future = self.start(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise ClientClosed("the client was closed during the call") from error
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `work` without waiting. Raises `ClientClosed` after `stop`, `ForkedProcess` in a forked child."""
        if os.getpid() != self._pid:
            work.close()
            raise forked_from(self._pid)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise ClientClosed("the client is closed") from error

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`. In the portal's own thread, where garbage collection may end an iterator, it does not wait."""
        if threading.current_thread() is self._thread:
            self._endings.add(ending := self._loop.create_task(work))
            ending.add_done_callback(self._endings.discard)
        else:
            self.run(work)

    def each(self, answers: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields the items of an asynchronous generator; closing the iterator closes the generator."""

        async def following() -> T | None:
            return await anext(answers, None)

        async def close() -> None:
            async with aclosing(answers):
                pass

        try:
            while (answer := self.run(following())) is not None:
                yield answer
        finally:
            with suppress(ClientClosed):
                self.finish(close())

    def stop(self) -> None:
        """Cancels all running work and ends the thread; a second call does nothing."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        remaining = asyncio.all_tasks(self._loop)
        for task in remaining:
            task.cancel()
        if remaining:
            self._loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())


class Blocking(Generic[T]):
    """The base of blocking classes: they run the calls of an asynchronous object in a portal."""

    def __init__(self, inner: T, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal


def _ignore_shared_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio has one wake-up pipe for the event loops of all threads. The loop that reads it second finds it empty and
    # loses nothing (https://github.com/grpc/grpc/issues/25364).
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
